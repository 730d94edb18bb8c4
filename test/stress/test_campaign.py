"""Long runs: what is done once is not done again, and never taken for what it is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from crosscurrent.errors import WrongUseError
from crosscurrent.stress.campaign import Account, Failure, code_fingerprint, run

IDENTITY = {"code": "abc", "delay_us": "100"}


@dataclass
class Squares:
    """A case whose odd seeds fail; remembers what it was asked."""

    name: str
    broken: bool = False
    fatal: int | None = None
    asked: list[int] = field(default_factory=list)
    prepared: int = 0
    closed: int = 0

    @property
    def problems(self) -> Sequence[Failure]:
        return [Failure(case=self.name, seed=None, what="broken")] if self.broken else []

    def prepare(self) -> Squares:
        self.prepared += 1
        return self

    def run(self, seed: int) -> Sequence[Failure]:
        self.asked.append(seed)
        if seed == self.fatal:
            raise RuntimeError("device-side assert triggered\nand so on")
        return [Failure(case=self.name, seed=seed, what=f"{seed} is odd")] if seed % 2 else []

    def close(self) -> None:
        self.closed += 1


def test_every_seed_of_every_case_is_tried_once(tmp_path: Path) -> None:
    cases = [Squares("one"), Squares("two")]
    account = Account(tmp_path / "state", IDENTITY)
    results = list(run(cases, range(3), account))
    assert [(result.case, result.seed) for result in results] == [
        (case, seed) for case in ("one", "two") for seed in (None, 0, 1, 2)
    ]
    assert [(failure.case, failure.seed) for failure in account.failures] == [("one", 1), ("two", 1)]
    assert [(case.asked, case.prepared, case.closed) for case in cases] == [([0, 1, 2], 1, 1)] * 2
    account.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop_after", range(9))
def test_a_run_that_was_stopped_goes_on_where_it_was(stop_after: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = [Squares("one", broken=True), Squares("two")]
    account = Account(path, IDENTITY)
    results = run(first, range(3), account)
    for _ in range(stop_after):
        next(results)
    results.close()
    assert all(case.closed == case.prepared for case in first)
    if stop_after == 0:
        assert not path.exists()
        return
    second = [Squares("one", broken=True), Squares("two")]
    again = Account.resume(path, IDENTITY)
    list(run(second, range(3), again))
    for one, other in zip(first, second, strict=True):
        assert sorted(one.asked + other.asked) == [0, 1, 2]
        assert other.prepared == (len(one.asked) < 3)
    assert {(failure.case, failure.seed) for failure in again.failures} == {
        ("one", None),
        ("one", 1),
        ("two", 1),
    }
    assert len(again.failures) == 3
    assert again.num_done(["one", "two"], range(3)) == 6


def test_a_seed_that_raises_has_failed_and_is_the_last(tmp_path: Path) -> None:
    path = tmp_path / "state"
    cases = [Squares("one", fatal=2), Squares("two")]
    account = Account(path, IDENTITY)
    results = list(run(cases, range(0, 8, 2), account))
    assert [(result.case, result.seed) for result in results] == [("one", None), ("one", 0), ("one", 2)]
    assert [failure.what for failure in account.failures] == [
        "it raised RuntimeError: device-side assert triggered"
    ]
    assert (cases[0].closed, cases[1].prepared) == (1, 0)
    again = [Squares("one", fatal=2), Squares("two")]
    list(run(again, range(0, 8, 2), Account.resume(path, IDENTITY)))
    assert [case.asked for case in again] == [[4, 6], [0, 2, 4, 6]]


def test_more_seeds_go_on_from_fewer(tmp_path: Path) -> None:
    path = tmp_path / "state"
    list(run([Squares("one")], range(2), Account(path, IDENTITY)))
    case = Squares("one")
    list(run([case], range(4), Account.resume(path, IDENTITY)))
    assert case.asked == [2, 3]


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "state"
    list(run([Squares("one")], range(2), Account(path, IDENTITY)))
    with pytest.raises(WrongUseError, match="belongs to another run: delay_us changed since"):
        Account.resume(path, IDENTITY | {"delay_us": "200"})
    with pytest.raises(WrongUseError, match="lanes changed since"):
        Account.resume(path, IDENTITY | {"lanes": "main"})


@pytest.mark.parametrize("content", ["", "[]", '{"format": "crosscurrent stress state"}', "{"])
def test_a_damaged_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(WrongUseError, match="is damaged"):
        Account.resume(path, IDENTITY)


def test_another_version_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pytest.raises(WrongUseError, match="nothing to continue"):
        Account.resume(path, IDENTITY)
    list(run([Squares("one")], range(1), Account(path, IDENTITY)))
    stored = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(stored | {"version": 2}), encoding="utf-8")
    with pytest.raises(WrongUseError, match="not written by this version"):
        Account.resume(path, IDENTITY)


def test_the_code_has_a_fingerprint() -> None:
    assert code_fingerprint() == code_fingerprint()
    assert len(code_fingerprint()) == 16
