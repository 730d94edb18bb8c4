"""A long run of many cases with many seeds, which can be stopped and continued.

A *case* is prepared once (``Case.prepare``), and then tried with one seed after the other (``Trial.run``).
``Account`` keeps what was done in a small file, so that a run which was stopped, or killed, goes on where it
was. The file says what it belongs to; with other options, or other code, it is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from crosscurrent.errors import WrongUseError
from crosscurrent.files import in_one_act

logger = logging.getLogger(__name__)

FORMAT = "crosscurrent stress state"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something that came out otherwise."""

    case: str
    seed: int | None
    """None: nothing was delayed yet when it failed."""
    what: str
    """What was seen, what was expected; may have several lines."""
    schedule: str | None = None
    """The schedule that shows it, where one was replayed."""
    trace: str | None = None
    """The file with the program that the schedule belongs to, if it was saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One seed of one case, or its preparation (seed None)."""

    case: str
    seed: int | None
    failures: tuple[Failure, ...]
    seconds: float


class Trial(Protocol):
    """A case that is ready to be tried."""

    @property
    def problems(self) -> Sequence[Failure]:
        """What is wrong already, before anything is delayed."""

    def run(self, seed: int) -> Sequence[Failure]:
        """Try one seed; what failed."""

    def close(self) -> None:
        """Give back what the case held."""


class Case(Protocol):
    """Something to try."""

    @property
    def name(self) -> str:
        """Its name in tables and in the state file."""

    def prepare(self) -> Trial:
        """Run it once undisturbed, and get ready to try seeds."""


def run(cases: Sequence[Case], seeds: Sequence[int], account: Account) -> Iterator[Result]:
    """Prepare each case and try all seeds that the account does not have yet; a result at a time.

    A seed that raises has failed, and is the last one: a device that has met garbage as an index is lost to
    its process, and whatever came after would fail for that reason.
    """
    for case in cases:
        waiting = [seed for seed in seeds if not account.has(case.name, seed)]
        if not waiting:
            continue
        begin = time.perf_counter()
        trial = case.prepare()
        try:
            yield _result(account, case.name, None, trial.problems, begin)
            for seed in waiting:
                begin = time.perf_counter()
                try:
                    failures = trial.run(seed)
                except Exception as error:
                    logger.debug("%s, seed %d", case.name, seed, exc_info=True)
                    what = f"it raised {type(error).__name__}: {_first_line(error)}"
                    raised = Failure(case=case.name, seed=seed, what=what)
                    yield _result(account, case.name, seed, [raised], begin)
                    return
                yield _result(account, case.name, seed, failures, begin)
        finally:
            trial.close()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _result(
    account: Account, case: str, seed: int | None, failures: Sequence[Failure], begin: float
) -> Result:
    account.note(case, seed, failures)
    return Result(case=case, seed=seed, failures=tuple(failures), seconds=time.perf_counter() - begin)


class Account:
    """What a campaign has done so far, and the file that remembers it."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        self.path = path
        self._identity = dict(identity)
        self._done: dict[str, list[int]] = {}
        self._failures: list[Failure] = []

    @classmethod
    def resume(cls, path: Path, identity: Mapping[str, str]) -> Account:
        """Go on from a file.

        Raises ``WrongUseError`` if there is none, if it cannot be read, or if it belongs to another campaign.
        """
        account = cls(path, identity)
        if not path.is_file():
            raise WrongUseError(f"there is nothing to continue: no file {path}")
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if (stored["format"], stored["version"]) != (FORMAT, VERSION):
                raise WrongUseError(f"{path} was not written by this version of `crosscurrent stress`")
            other = {
                name
                for name in {*stored["identity"], *account._identity}
                if stored["identity"].get(name) != account._identity.get(name)
            }
            done = {str(case): [int(seed) for seed in seeds] for case, seeds in stored["done"].items()}
            failures = [Failure(**failure) for failure in stored["failures"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WrongUseError(f"{path} is damaged ({error}); start over without it") from error
        if other:
            raise WrongUseError(
                f"{path} belongs to another run: {', '.join(sorted(other))} changed since; start over"
            )
        account._done, account._failures = done, failures
        return account

    @property
    def failures(self) -> tuple[Failure, ...]:
        """All failures so far, those of earlier parts of the run included."""
        return tuple(self._failures)

    def has(self, case: str, seed: int) -> bool:
        """Whether this was done."""
        return seed in self._done.get(case, ())

    def num_done(self, cases: Sequence[str], seeds: Sequence[int]) -> int:
        """How many of these were done."""
        return sum(self.has(case, seed) for case in cases for seed in seeds)

    def note(self, case: str, seed: int | None, failures: Sequence[Failure]) -> None:
        """Something was done; remember it."""
        # A case is prepared again when the run goes on, and finds the same problems again.
        self._failures += [failure for failure in failures if failure not in self._failures]
        if seed is not None:
            self._done.setdefault(case, []).append(seed)
        self._save()

    def close(self) -> None:
        """All is done: there is nothing to continue."""
        self.path.unlink(missing_ok=True)

    def _save(self) -> None:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "identity": self._identity,
            "done": self._done,
            "failures": [asdict(failure) for failure in self._failures],
        }
        with in_one_act(self.path) as partial:
            partial.write_text(json.dumps(content) + "\n", encoding="utf-8")


def code_fingerprint() -> str:
    """Changes with any line of this package: results for other code are no results."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
