"""The report of a watch, and that of an overlap."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from crosscurrent.report.document import HostWaits, Report, Unclear, Verdict, environment

if TYPE_CHECKING:
    from crosscurrent.races.watch import Watch
    from crosscurrent.report.overlap import Overlap


def report_of(
    watch: Watch,
    *,
    title: str,
    simulated: bool,
    command: str = "",
    advise: bool = False,
) -> Report:
    """What a watch saw, as a report to render.

    If the watch kept its trace there is a timeline, and advice: ``advise`` asks which sync calls are needed,
    which takes longer the more there are.
    """
    findings = tuple(watch.findings)
    idle = watch.idle_waits
    waits = tuple(
        HostWaits(*wait, times, min(idle[wait], times)) for wait, times in Counter(watch.host_waits).items()
    )
    set_up = {wait.site for wait in waits if wait.is_set_up}
    unknown = tuple(Unclear(*what, times) for what, times in Counter(watch.unknown).items())
    verdict = Verdict.RACES if findings else Verdict.NO_VERDICT if unknown else Verdict.RACE_FREE
    return Report(
        title=title,
        verdict=verdict,
        findings=findings,
        host_waits=waits,
        unknown=unknown,
        # Nothing is to be done about an allocation that is where it should be.
        advice=tuple(item for item in watch.advice if item.kind != "allocation" or item.site not in set_up)
        if watch.keeps_trace and advise
        else None,
        info=watch.info,
        records=tuple(watch.records) if watch.keeps_trace else (),
        simulated=simulated,
        environment=environment(simulated=simulated),
        command=command,
    )


def report_of_overlap(overlap: Overlap, *, title: str, command: str = "") -> Report:
    """The analysis of overlap as a report to render; it says nothing of races."""
    simulated = bool(overlap.modelled)
    return Report(
        title=title,
        verdict=Verdict.MEASURED,
        overlap=overlap,
        simulated=simulated,
        environment=environment(simulated=simulated),
        command=command,
    )
