"""``Report``: everything that a report shows. Whoever has a verdict fills one in; all renderers read it.

``check`` and ``watch``, ``verify`` and ``stress`` make one each; the terminal, the HTML page and the
Perfetto trace are functions of it. Nothing here runs a program or touches a tensor.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from crosscurrent.races.advice import Advice
from crosscurrent.races.findings import Finding
from crosscurrent.report.costs import Rates
from crosscurrent.report.missing import num_missing, shared_waits
from crosscurrent.report.source import percent
from crosscurrent.trace.records import Record, Site, TraceInfo

if TYPE_CHECKING:
    from crosscurrent.report.overlap import Overlap


class Verdict(Enum):
    """What was found out. Only the first two are good news."""

    RACE_FREE = "no race"
    HELD = "held"
    """Everything that was asked held. Whether races were looked for depends on what was asked."""

    RACES = "races"
    FAILED = "failed"
    """Something else than a race is wrong: a layer of ``verify``, a mutant that survived."""

    NO_VERDICT = "no verdict"
    """Nothing bad was found, but not everything could be looked at."""

    MEASURED = "measured"
    """Nobody looked for races, only at the overlap."""


class HostWaits(NamedTuple):
    """A call that made the host wait, and how often."""

    kind: str
    op: str
    """The op in which it happened; empty for a call that does nothing but wait."""

    site: Site
    streams: tuple[str, ...]
    """What was waited for; empty where the host was held up without ordering anything."""

    times: int = 1
    idle: int = 0
    """How often the device had nothing left to do, so that nothing was waited for."""

    @property
    def is_set_up(self) -> bool:
        """Whether it is pinned memory that was allocated when that held nothing up, as it should be."""
        return self.kind == "allocation" and self.idle == self.times


class Unclear(NamedTuple):
    """A call that could not be understood, and how often it was made. No verdict covers it."""

    op: str
    site: Site
    reason: str
    times: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A table of its own: the layers of ``verify``, the mutants of ``stress``.

    ``good`` says of each row whether it is good news, bad news, or neither (None).
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    good: tuple[bool | None, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"every row of {self.title!r} needs {len(self.columns)} cells")
        if self.good and len(self.good) != len(self.rows):
            raise ValueError(f"{self.title!r} has {len(self.rows)} rows, and {len(self.good)} of them judged")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was run, what was found, and the trace it was found in."""

    title: str
    """What was looked at: a script and its arguments, the name of a test."""

    verdict: Verdict
    summary: str = ""
    """One sentence to stand beside the verdict. Made from the findings if empty."""

    findings: tuple[Finding, ...] = ()
    host_waits: tuple[HostWaits, ...] = ()
    unknown: tuple[Unclear, ...] = ()
    advice: tuple[Advice, ...] | None = None
    """None: nobody asked which edges are needed, which is not the same as that there is none."""

    sections: tuple[Section, ...] = ()
    info: TraceInfo = field(default_factory=lambda: TraceInfo([], []))
    records: Sequence[Record] = ()
    """The whole trace, where it was kept. Without it, there is no timeline."""

    overlap: Overlap | None = None
    rates: Rates = field(default_factory=Rates)
    """The model clock by which the timeline is drawn."""

    simulated: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    command: str = ""
    """The command that gives this report again."""

    replay: str = ""
    """The command that runs a finding's schedule, without the schedule; empty if nothing was saved."""

    @property
    def blocking(self) -> tuple[HostWaits, ...]:
        """The calls that held the host up, without the program's set-up."""
        return tuple(wait for wait in self.host_waits if not wait.is_set_up)

    @property
    def set_up(self) -> tuple[HostWaits, ...]:
        """The allocations of pinned memory that held nothing up."""
        return tuple(wait for wait in self.host_waits if wait.is_set_up)

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        count = len(self.findings)
        if self.verdict is Verdict.RACES or count:
            return "1 race" if count == 1 else f"{count} races"
        if self.verdict is Verdict.MEASURED:
            share = None if self.overlap is None else self.overlap.hidden_share
            return "Nothing to hide" if share is None else f"{percent(share)} of the transfers hidden"
        return {
            Verdict.RACE_FREE: "No race",
            Verdict.HELD: "All held",
            Verdict.FAILED: "Failed",
            Verdict.NO_VERDICT: "No verdict",
        }[self.verdict]

    @property
    def sentence(self) -> str:
        """What the verdict means, and what it does not."""
        if self.summary:
            return self.summary
        if self.findings:
            pairs = sum(finding.count for finding in self.findings)
            missing = num_missing(self.findings)
            edges = "1 sync edge is missing" if missing == 1 else f"{missing:,} sync edges are missing"
            what = f"{edges}: {pairs:,} pair{'s' * (pairs != 1)} of operations may run in either order."
            return "\n".join([what, *(shared.sentence for shared in shared_waits(self.findings))])
        if self.verdict is Verdict.RACE_FREE:
            return "Every schedule that the sync edges of this run allow gives the same bits."
        if self.verdict is Verdict.MEASURED:
            modelled = self.overlap is not None and bool(self.overlap.modelled)
            source = "By a model: nothing was measured." if modelled else "As measured on this machine."
            return f"{source} Races were not looked for."
        if self.unknown:
            return "Nothing bad was found, but some calls could not be understood; they are listed below."
        return ""


def environment(*, simulated: bool) -> tuple[tuple[str, str], ...]:
    """The versions and the machine that a verdict was found with."""
    import torch

    from crosscurrent import __version__

    device = "simulated"
    if not simulated:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return (
        ("crosscurrent", __version__),
        ("torch", torch.__version__),
        ("CUDA", str(torch.version.cuda or "not built in")),
        ("device", device),
        ("Python", sys.version.split()[0]),
        ("platform", platform.platform()),
    )
