"""What was wrong with a test, as text."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import pytest
from rich.console import Console
from rich.text import Text

from crosscurrent.errors import RaceError
from crosscurrent.races.findings import Finding
from crosscurrent.races.watch import HostWaitCall, NotUnderstood
from crosscurrent.report.missing import shared_waits
from crosscurrent.report.source import excerpt, place_of, short_op
from crosscurrent.report.text import finding_text
from crosscurrent.report.wording import title
from crosscurrent.schedules.explore import Difference
from crosscurrent.trace.records import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Everything that is wrong with the body of a test."""

    findings: tuple[Finding, ...] = ()
    waits: tuple[HostWaitCall, ...] = ()
    """All waits of the host, if there are more than ``waits_allowed``."""
    waits_allowed: int = 0
    unknown: tuple[NotUnderstood, ...] = ()
    strict: bool = True
    """Whether what could not be understood is bad by itself."""
    differences: tuple[Difference, ...] = ()
    """Schedules that came out otherwise, although the detector found no race."""
    not_replayable: str = ""
    simulated: bool = False
    repeat: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether the test fails."""
        uncertain = self.not_replayable or (self.strict and self.unknown)
        return bool(self.findings or self.waits or self.differences or uncertain)

    def fail(self) -> NoReturn:
        """Fail the test with all of it."""
        text = say(self)
        raise RacyTestError(text, self.findings) if self.findings else FailedError(text)


_Outcome: Any = pytest.fail.Exception


class FailedError(_Outcome):  # type: ignore[misc]
    """A test that is wrong, with its text in color; pytest shows it without a traceback."""

    def __init__(self, text: Text) -> None:
        super().__init__(text.plain, pytrace=False)
        self.text = text


class RacyTestError(FailedError, RaceError):
    """The same for races, so that ``xfail(raises=crosscurrent.RaceError)`` knows it."""

    def __init__(self, text: Text, findings: Sequence[Finding]) -> None:
        FailedError.__init__(self, text)
        self.findings = tuple(findings)


def say(judgement: Judgement) -> Text:
    """The text of a failure; its first line says the most."""
    text = Text()
    text.append(f"{_headline(judgement)}{' (simulated CUDA)' if judgement.simulated else ''}\n", "bold red")
    for number, finding in enumerate(judgement.findings, start=1):
        text.append("\n")
        text.append_text(finding_text(finding, number=number, total=len(judgement.findings)))
        text.append("\n")
    for shared in shared_waits(judgement.findings):
        text.append(f"\n{shared.sentence}\n")
    if judgement.waits:
        allowed = f"{judgement.waits_allowed} allowed" if judgement.waits_allowed else "none is allowed"
        text.append(f"\nthe host waited {_times(len(judgement.waits))}, {allowed}\n", "bold red")
        for wait, times in Counter(judgement.waits).items():
            what = f"{wait.kind} in {short_op(wait.op)}" if wait.op else wait.kind
            streams = f", for {', '.join(wait.streams)}" if wait.streams else ""
            _call(text, f"{what}{streams}", wait.site, times)
    for difference in judgement.differences:
        text.append("\na schedule gives other values than program order\n", "bold red")
        text.append("".join(f"  {line}\n" for line in str(difference).splitlines()))
    if judgement.not_replayable:
        text.append(f"\nthe test cannot be run again: {judgement.not_replayable}\n", "bold yellow")
    if judgement.unknown:
        text.append("\nnot understood: the verdict does not cover these\n", "bold yellow")
        for call in judgement.unknown:
            _call(text, f"{call.op}: {call.reason}", call.site, 1)
    if judgement.repeat:
        text.append(f"\nrepeat: {judgement.repeat}\n")
    text.rstrip()
    return text


def _headline(judgement: Judgement) -> str:
    findings = judgement.findings
    if findings:
        more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
        return f"race: {title(findings[0])}{more}"
    if judgement.differences:
        return "no race was found, but another schedule gives other values"
    if judgement.waits:
        return f"the host waited {_times(len(judgement.waits))}"
    return "no verdict: not everything could be looked at"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _call(text: Text, what: str, site: Site, times: int) -> None:
    repeated = f" ({times} times)" if times > 1 else ""
    function = f" ({site.function})" if site.function else ""
    text.append(f"  {what} at {place_of(site)}{function}{repeated}\n")
    for line in excerpt(site, context=0):
        text.append(f"  > {line.number:>5} | {line.text}\n", "bold red")


def dress(report: pytest.TestReport, error: BaseException) -> None:
    """Shorten the one-line summary of a failure, and write its text in color on terminals that have any."""
    longrepr: Any = report.longrepr
    if isinstance(error, FailedError) and hasattr(longrepr, "toterminal"):
        # The rest of it stays as pytest made it: xdist and the JUnit XML take the plain text from there.
        longrepr.toterminal = partial(_write, error.text)
        if longrepr.reprcrash is not None:
            longrepr.reprcrash.message = error.text.plain.partition("\n")[0]


def _write(text: Text, writer: Any) -> None:
    if not writer.hasmarkup:
        writer.line(text.plain)
        return
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=writer.fullwidth)
    console.print(text, soft_wrap=True, highlight=False, emoji=False)
    writer.write(stream.getvalue())
