"""``crosscurrent stress``: exit codes, the command that repeats a failure, stopping and going on."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscurrent.cli import main
from crosscurrent.gradient import transfer
from crosscurrent.stress import campaign
from crosscurrent.stress.campaign import Failure
from crosscurrent.stress.history import PAST_RACES
from crosscurrent.suite import history
from crosscurrent.suite.stressed import GradientCase

DOCUMENTED = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
ONE_CASE = ["stress", "--policies", "lastrec", "--quantizers", "default"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Whoever edits the package while the tests run makes it other code, which is rightly not gone on with.
    monkeypatch.setattr(campaign, "code_fingerprint", lambda: "0123456789abcdef")


class Quiet:
    """A trial in which nothing runs, and nothing differs."""

    problems = ()

    def run(self, seed: int) -> list[Failure]:
        return []

    def close(self) -> None:
        pass


def _json() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return found


def test_stopped_and_continued_all_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: GradientCase) -> Quiet:
        signal.raise_signal(signal.SIGINT)
        return Quiet()

    monkeypatch.setattr(GradientCase, "prepare", interrupted)
    assert main([*ONE_CASE, "--seeds", "2", "--json", "out.json"]) == 130
    monkeypatch.setattr(GradientCase, "prepare", lambda _: Quiet())
    output = capsys.readouterr().out
    assert "1 case(s) x 2 seed(s) on " in output
    assert "stopped after 0 of 2; the same command with --continue goes on" in output
    assert (_json()["verdict"], _json()["complete"]) == ("no verdict", False)
    assert Path(".crosscurrent-stress.json").is_file()

    assert main([*ONE_CASE, "--seeds", "2", "--delay_us", "50", "--continue"]) == 2
    assert "delay_us changed since" in capsys.readouterr().err

    assert main([*ONE_CASE, "--seeds", "2", "--json", "out.json", "--continue"]) == 0
    output = capsys.readouterr().out
    assert "nothing differed in 2 run(s)" in output
    assert "this will take about" in output
    document = _json()
    assert (document["format"], document["version"], document["verdict"]) == (
        "crosscurrent stress",
        1,
        "held",
    )
    assert document["cases"] == ["lastrec, default"]
    assert (document["seeds"], document["runs"], document["failures"]) == ([0, 1], 2, [])
    assert [path.name for path in Path().iterdir()] == ["out.json"]  # nothing is left to continue
    section = DOCUMENTED.split("\n## `crosscurrent stress`", 1)[1]
    table = section.split("\n| field |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == document.keys()


@pytest.mark.simulation
def test_a_failure_prints_the_one_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One fetch refills a slot without waiting for who still reads it."""
    right = transfer.Incoming.fetch
    fetches = itertools.count()

    def fetch(self: transfer.Incoming, source: transfer.HostBuffer, num_bytes: int) -> None:
        asynchronous = self._lanes.host_to_device is not self._lanes.main
        if asynchronous and next(fetches) == 6:
            self._consumed = [None for _ in self._consumed]
        right(self, source, num_bytes)

    monkeypatch.setattr(transfer.Incoming, "fetch", fetch)
    options = ["--seeds", "1", "--delay_us", "200", "--lanes", "main", "--json", "out.json", "--save", "."]
    assert main([*ONE_CASE, *options, "--html", "out.html"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED lastrec, default, with nothing delayed" in lines
    assert "FAILED lastrec, default, with seed 0" in lines
    assert "2 failed, listed above, in 1 run(s)" in lines
    assert _json()["verdict"] == "failed"
    repeat = [line.partition("repeat:")[2].strip() for line in lines if "repeat:" in line][-1]
    assert repeat == (
        "crosscurrent stress --seed 0 --policies lastrec --quantizers default "
        "--checkpoints kv_checkpoints --lanes main --delay_us 200.0"
    )
    assert _json()["failures"][-1]["repeat"] == repeat
    assert all(f"`{field}`" in DOCUMENTED for field in _json()["failures"][-1])
    page = Path("out.html").read_text(encoding="utf-8")
    assert page.count(repeat) >= 1
    assert "2 failed in 1 run(s)." in page
    replay = [line.partition("replay:")[2].strip() for line in lines if "replay:" in line][-1]
    assert main(shlex.split(replay)[1:]) == 1
    assert "elements changed" in capsys.readouterr().out


def test_a_seed_that_raises_is_a_failure_and_the_run_can_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fatal(Quiet):
        def run(self, seed: int) -> list[Failure]:
            raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(GradientCase, "prepare", lambda _: Fatal())
    assert main([*ONE_CASE, "--seeds", "3"]) == 1
    output = capsys.readouterr().out
    assert "  it raised RuntimeError: device-side assert triggered" in output
    assert "stopped after 1 of 3; the same command with --continue goes on" in output
    assert main([*ONE_CASE, "--seeds", "3", "--continue"]) == 1
    output = capsys.readouterr().out
    assert output.count("FAILED lastrec, default, with seed 0") == 1  # of the first part
    assert "stopped after 2 of 3" in output


def test_the_races_of_the_past_in_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of them only; ``test_history`` shows all."""
    monkeypatch.setattr(history, "history", partial(history.history, races=PAST_RACES[:1]))
    assert main(["stress", "--history", "--json", "out.json"]) == 0
    output = capsys.readouterr().out
    assert PAST_RACES[0].name in output
    shown = ", witnessed and shown by a delay" if torch.cuda.is_available() else " and witnessed"
    assert f"held: 1 races of the past named{shown}" in output
    assert all(f"`{field}`" in DOCUMENTED for field in _json()["history"][0])
    assert [shown["name"] for shown in _json()["history"]] == [PAST_RACES[0].name, "unchanged"]
    assert _json()["verdict"] == "held"


@pytest.mark.no_gpu
def test_without_cuda_nothing_is_run_and_nothing_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE_CASE, "--no_simulate"]) == 3
    assert "nothing was run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must not be negative, got -1"),
        (["--policies", "lastrek"], "there is no policy 'lastrek'; there are dense, lastrec, h2o"),
        (["--quantizers", ""], "name at least one quantizer"),
        (["--checkpoints", "kv"], "there is no kind of checkpoint 'kv'"),
        (["--lanes", "mian"], "there is no lane 'mian'; the lanes are device_to_host, host_to_device, main"),
        (["--delay_us", "0"], "delay_us must be a number above 0"),
        (["--how", "sometimes"], "sometimes"),
        (["--save", "nowhere"], "there is no folder nowhere"),
        (["--state", "nowhere/state"], "name another file with --state"),
        (["--continue"], "there is nothing to continue"),
    ],
)
def test_wrong_use_is_exit_code_2_and_one_line(
    options: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stress", *options]) == 2
    error = capsys.readouterr().err
    assert advice in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--json", "old", "--html", "old"], "was named for two results"),
        (["--history", "--html", "old"], "--history writes no page; leave out --html"),
        (["--history", "--cuda_graphs", "--json", "old"], "leave out --cuda_graphs"),
        (["--continue", "--json", "old"], "there is nothing to continue"),
        (["--state", "nowhere/state", "--json", "old"], "name another file with --state"),
    ],
)
def test_wrong_use_leaves_old_results_where_they_are(
    options: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old").write_text("old", encoding="utf-8")
    assert main([*ONE_CASE, "--seeds", "1", *options]) == 2
    assert advice in capsys.readouterr().err
    assert Path("old").read_text(encoding="utf-8") == "old"


def test_wrong_use_leaves_what_there_is_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    Path(".crosscurrent-stress.json").write_text("{}", encoding="utf-8")
    assert main([*ONE_CASE, "--seeds", "1", "--json", "nowhere/out.json"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err
    assert Path(".crosscurrent-stress.json").is_file()
