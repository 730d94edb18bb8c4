"""What ``crosscurrent stress`` says: failures as they come, how long it takes, and the results in the end."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from crosscurrent.cli.console import output, say

if TYPE_CHECKING:
    from crosscurrent.report.document import Report
    from crosscurrent.stress.campaign import Failure, Result
    from crosscurrent.suite.verification import Cuda

JSON_FORMAT = "crosscurrent stress"
JSON_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """A run, or as much of one as there is."""

    cases: tuple[str, ...]
    seeds: tuple[int, ...]
    failures: tuple[Failure, ...]
    num_done: int
    """Runs that were made: seeds of cases."""
    cuda: Cuda
    delay_us: float
    command: str
    """The command of all of it."""
    repeat: Callable[[Failure], str]
    """The one command that shows a failure again."""

    @property
    def complete(self) -> bool:
        """Whether everything was tried."""
        return self.num_done == len(self.cases) * len(self.seeds)

    @property
    def verdict(self) -> str:
        """``failed``, ``held``, or ``no verdict`` for a run that was stopped."""
        return "failed" if self.failures else "held" if self.complete else "no verdict"

    @property
    def sentence(self) -> str:
        """The verdict and what it covers."""
        if self.failures:
            failed = len({(failure.case, failure.seed) for failure in self.failures})
            return f"{failed} failed, listed above, in {self.num_done} run(s)"
        return f"nothing differed in {self.num_done} run(s)"

    @property
    def claim(self) -> str:
        """What a good verdict means, and what it does not."""
        where = "delays on this GPU" if self.cuda is self.cuda.REAL else "schedules of the recorded traces"
        return f"on and off are the same bits under all {where} that were tried; it proves nothing of others"

    def conclude(self) -> None:
        """Say it."""
        if not self.complete:
            total = len(self.cases) * len(self.seeds)
            say(f"stopped after {self.num_done} of {total}; the same command with --continue goes on")
        styles = {"failed": "bold red", "held": "bold green", "no verdict": "bold"}
        output().print(Text(self.sentence, styles[self.verdict]), soft_wrap=True)
        if self.verdict == "held":
            say(self.claim)

    def as_json(self) -> dict[str, object]:
        """The document of a run."""
        return head(self.cuda, self.verdict) | {
            "complete": self.complete,
            "cases": list(self.cases),
            "seeds": list(self.seeds),
            "runs": self.num_done,
            "delay_us": self.delay_us,
            "failures": [asdict(failure) | {"repeat": self.repeat(failure)} for failure in self.failures],
        }

    def as_report(self) -> Report:
        """The same to be rendered."""
        from crosscurrent.report.document import Report, Section, Verdict, environment

        failed = Counter(failure.case for failure in self.failures)
        rows = tuple(
            (case, str(len(self.seeds)), f"{failed[case]} failed" if failed[case] else "nothing differed")
            for case in self.cases
        )
        sections = [
            Section(
                title="The gradient, transfers on against off",
                columns=("case", "seeds", "outcome"),
                rows=rows,
                good=tuple(not failed[case] for case in self.cases),
            )
        ]
        if self.failures:
            details = tuple(
                (failure.case, when(failure), failure.what, self.repeat(failure)) for failure in self.failures
            )
            columns = ("case", "when", "what", "repeat")
            sections.append(
                Section(title="Failures", columns=columns, rows=details, good=tuple(False for _ in details))
            )
        verdicts = {"failed": Verdict.FAILED, "held": Verdict.HELD, "no verdict": Verdict.NO_VERDICT}
        simulated = self.cuda is not self.cuda.REAL
        held = f"{self.sentence}: {self.claim}."
        return Report(
            title="stress",
            verdict=verdicts[self.verdict],
            summary=held if self.verdict == "held" else f"{self.sentence}.".replace(", listed above,", ""),
            sections=tuple(sections),
            simulated=simulated,
            environment=environment(simulated=simulated),
            command=self.command,
        )


class Estimate:
    """Says once how long all of it will take: after the first case was prepared, and two seeds were tried."""

    def __init__(self, seeds: int, left: int) -> None:
        self._seeds = seeds
        self._left = left
        self._preparation = 0.0
        self._tried: list[float] = []
        self._said = False

    def after(self, result: Result) -> str | None:
        """The sentence, when it is time for it."""
        self._left -= 1
        if result.seed is None:
            self._preparation = result.seconds
        else:
            self._tried.append(result.seconds)
        if self._said or len(self._tried) < min(2, self._seeds):
            return None
        self._said = True
        cases = self._left / (self._seeds + 1)
        seconds = cases * self._preparation + (self._left - cases) * sum(self._tried) / len(self._tried)
        return f"this will take about {_duration(seconds)} more"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def head(cuda: Cuda, verdict: str) -> dict[str, object]:
    """What every JSON document of the command starts with."""
    import torch

    from crosscurrent import __version__

    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "crosscurrent": __version__,
        "torch": torch.__version__,
        "cuda": cuda.name.lower(),
        "verdict": verdict,
    }


def when(failure: Failure) -> str:
    """Under which delays it failed."""
    return "with nothing delayed" if failure.seed is None else f"with seed {failure.seed}"


def failure_lines(failure: Failure, repeat: str) -> list[str]:
    """A failure as it is printed."""
    lines = [f"FAILED {failure.case}, {when(failure)}", *(f"  {line}" for line in failure.what.splitlines())]
    if failure.schedule is not None and failure.trace is not None:
        lines.append(f"  replay:  {shlex.join(['crosscurrent', 'replay', failure.trace, failure.schedule])}")
    elif failure.schedule is not None:
        lines.append(f"  schedule: {failure.schedule}")
    return [*lines, f"  repeat:  {repeat}"]
