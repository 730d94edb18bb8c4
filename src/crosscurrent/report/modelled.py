"""The overlap of a trace by the cost model: what a run on the stated machine would look like."""

from __future__ import annotations

from collections.abc import Sequence

from crosscurrent.report.costs import Rates, program_of
from crosscurrent.report.makespan import play
from crosscurrent.report.overlap import PASSES as ANALYSIS
from crosscurrent.report.overlap import Activity, Blocked, Overlap, Timeline, analyse
from crosscurrent.report.source import short_op
from crosscurrent.schedules.countdown import Countdown
from crosscurrent.trace.records import HOST, HostWait, Op, Record, Site, TraceInfo, WaitEvent

_COSTS = 4
"""Passes over a program that working out its costs takes as long as."""

PASSES = _COSTS + 2 + ANALYSIS
"""Passes over a program, at most: its costs, playing it, what ran when, and the analysis."""


def overlap_of_records(
    records: Sequence[Record],
    info: TraceInfo,
    rates: Rates | None = None,
    countdown: Countdown | None = None,
) -> Overlap:
    """How the operations of a trace would overlap, and what its sync edges allow.

    ``countdown`` counts passes over the program, of which there are at most ``PASSES``.
    """
    countdown = countdown or Countdown()
    return analyse(timeline_of(records, info, rates or Rates(), countdown), countdown)


def timeline_of(records: Sequence[Record], info: TraceInfo, rates: Rates, countdown: Countdown) -> Timeline:
    """What would run when, by the cost model."""
    program, sources, costs = program_of(records, info, rates)
    countdown.take(_COSTS)
    run = play(program)
    countdown.take()
    activities: list[Activity] = []
    blocked: list[Blocked] = []
    waits: list[tuple[str, Site | None] | None] = []
    for record, cost, start, stop in zip(sources, costs, run.start, run.stop, strict=True):
        waits.append(None)
        if isinstance(record, Op) and record.lane != HOST:
            lane = info.lanes[record.lane]
            activities.append(
                Activity(
                    start,
                    stop,
                    lane.device or 0,
                    lane.name,
                    short_op(record.name),
                    cost.direction,
                    cost.nbytes,
                    info.site_at(record.site),
                    cost.pageable,
                )
            )
        elif isinstance(record, HostWait):
            waits[-1] = (record.kind, info.site_at(record.site))
            if record.kind != "query":
                blocked.append(Blocked(start, stop, record.kind, info.site_at(record.site)))
        elif isinstance(record, WaitEvent):
            waits[-1] = (record.via, info.site_at(record.site))
    countdown.take()
    return Timeline(
        activities=activities,
        blocked=blocked,
        stop=run.makespan,
        program=program,
        waits=waits,
        modelled=str(rates),
    )
