"""The report of ``crosscurrent verify``, for the page and for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crosscurrent.report.document import Report, Section
    from crosscurrent.suite.layer import Verdict
    from crosscurrent.suite.verification import Cuda, Result


def as_report(results: Sequence[Result], cuda: Cuda, verdict: Verdict, command: str) -> Report:
    """The layers as a table, and the findings and the trace of one scenario: one with a race, if there is."""
    from crosscurrent.report import document
    from crosscurrent.suite.layer import Verdict
    from crosscurrent.suite.race_freedom import Seen
    from crosscurrent.trace.records import TraceInfo

    seen = [(r.scenario, r.outcome.evidence) for r in results if isinstance(r.outcome.evidence, Seen)]
    seen.sort(key=lambda each: not each[1].findings)
    counts = {one: sum(each.outcome.verdict is one for each in results) for one in Verdict}
    said = ", ".join(f"{count} {one.value}" for one, count in counts.items() if count)
    drawn = f" The timeline is that of {seen[0][0].name}." if seen else ""
    simulated = cuda is not cuda.REAL
    return document.Report(
        title="the long-context gradient",
        verdict={
            Verdict.HELD: document.Verdict.HELD,
            Verdict.FAILED: document.Verdict.FAILED,
            Verdict.NOT_RUN: document.Verdict.NO_VERDICT,
        }[verdict],
        summary=f"Of {len(results)} questions about the long-context gradient: {said}.{drawn}",
        findings=seen[0][1].findings if seen else (),
        info=seen[0][1].info if seen else TraceInfo([], []),
        records=seen[0][1].records if seen else (),
        sections=(_layers(results), *_survivors(results)),
        simulated=simulated,
        environment=document.environment(simulated=simulated),
        command=command,
    )


def _layers(results: Sequence[Result]) -> Section:
    from crosscurrent.report.document import Section
    from crosscurrent.suite.layer import Verdict

    good = {Verdict.HELD: True, Verdict.FAILED: False, Verdict.NOT_RUN: None}
    rows = []
    for each in results:
        outcome = each.outcome
        verdict, time = outcome.verdict.value, f"{each.seconds:.1f} s"
        rows.append((each.layer, each.scenario.name, verdict, time, outcome.detail))
    return Section(
        title="Layers",
        columns=("layer", "scenario", "verdict", "time", "what was seen"),
        rows=tuple(rows),
        good=tuple(good[each.outcome.verdict] for each in results),
    )


def _survivors(results: Sequence[Result]) -> tuple[Section, ...]:
    from crosscurrent.report.document import Section
    from crosscurrent.stress.mutations import Score

    rows = tuple(
        (each.scenario.name, mutant.kind, mutant.place, mutant.what, mutant.reason)
        for each in results
        if isinstance(each.outcome.evidence, Score)
        for mutant in each.outcome.evidence.survivors
    )
    if not rows:
        return ()
    columns = ("scenario", "mutation", "place", "what", "why it survived")
    return (Section(title="Mutants that survived", columns=columns, rows=rows, good=(False,) * len(rows)),)
