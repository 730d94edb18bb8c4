"""The whole trace as slices on lanes and arrows between them, on the model clock.

Both pictures of a whole run, the page's timeline and the Perfetto trace, are made of these. Where a
trace is too long to draw, ``thinned`` joins neighbouring operations of a lane into one slice that says
how many it stands for; what takes part in a race is never joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from crosscurrent.races.findings import Finding
from crosscurrent.report.costs import Cost, Rates, program_of
from crosscurrent.report.makespan import play
from crosscurrent.report.source import short_op
from crosscurrent.trace.records import HOST, HostWait, Op, Record, RecordEvent, TraceInfo, WaitEvent


class Slice(NamedTuple):
    """Something that took time on a lane: an operation, a wait of the host, or ``num`` operations."""

    lane: int
    start: int
    stop: int
    """Nanoseconds of the model."""

    record: int
    """Its record's, or that of the first it stands for."""

    last: int
    name: str
    site: int
    wait: bool = False
    num: int = 1
    """How many it stands for."""


class Arrow(NamedTuple):
    """Orders one slice before another; both are positions in the list of slices.

    The arrow goes from the end of record ``before`` to the start of record ``after`` (to the end, for a
    wait of the host). These are the first and the last record of their slices unless some were joined.
    """

    source: int
    target: int
    via: str
    site: int
    start: int
    stop: int
    before: int
    after: int


class Race(NamedTuple):
    """The slices of a racing pair, and the number of its finding."""

    first: int
    second: int
    finding: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """What there is to draw."""

    slices: tuple[Slice, ...]
    arrows: tuple[Arrow, ...]
    races: tuple[Race, ...]
    makespan: int
    num_ops: int
    num_arrows: int
    """How many there were before anything was joined or left out."""


def slices_of(
    records: Sequence[Record], info: TraceInfo, rates: Rates, findings: Iterable[Finding] = ()
) -> Slices:
    """Everything in a trace that can be drawn."""
    steps, sources, costs = program_of(records, info, rates)
    run = play(steps)
    slices: list[Slice] = []
    arrows: list[Arrow] = []
    where: dict[int, int] = {}  # record -> slice
    last: dict[int, int] = {}  # lane -> its last slice so far
    recorded: dict[int, int] = {}  # event -> the last slice of its lane when it was recorded
    waiting: dict[int, list[tuple[int, str, int]]] = {}  # lane -> arrows into its next slice
    for record, start, stop, cost in zip(sources, run.start, run.stop, costs, strict=True):
        if isinstance(record, RecordEvent):
            if record.lane in last:
                recorded[record.event] = last[record.lane]
        elif isinstance(record, WaitEvent):
            if record.event in recorded:
                waiting.setdefault(record.lane, []).append((recorded[record.event], record.via, record.site))
        elif isinstance(record, Op):
            position = where[record.index] = last[record.lane] = len(slices)
            slices.append(
                Slice(record.lane, start, stop, record.index, record.index, _name(record, cost), record.site)
            )
            for source, via, site in waiting.pop(record.lane, ()):
                arrows.append(_arrow(slices, source, position, via, site))
        elif isinstance(record, HostWait):
            ends = [recorded.get(record.event)] if record.event is not None else map(last.get, record.lanes)
            awaited = [end for end in ends if end is not None]
            position = last[HOST] = len(slices)
            slices.append(
                Slice(HOST, start, stop, record.index, record.index, record.kind, record.site, wait=True)
            )
            arrows += [_arrow(slices, source, position, record.kind, record.site) for source in awaited]
    races = [
        Race(where[finding.first.index], where[finding.second.index], number)
        for number, finding in enumerate(findings)
        if finding.first.index in where and finding.second.index in where
    ]
    return Slices(
        slices=tuple(slices),
        arrows=tuple(arrows),
        races=tuple(races),
        makespan=run.makespan,
        num_ops=len(slices),
        num_arrows=len(arrows),
    )


def _arrow(slices: Sequence[Slice], source: int, target: int, via: str, site: int) -> Arrow:
    one, other = slices[source], slices[target]
    stop = other.stop if other.wait else other.start
    return Arrow(source, target, via, site, one.stop, stop, one.record, other.record)


def _name(op: Op, cost: Cost) -> str:
    name = short_op(op.name)
    if cost.direction is None:
        return name
    return f"{name} ({cost.direction.value}{', pageable' if cost.pageable else ''})"


def thinned(drawing: Slices, *, max_slices: int, max_arrows: int) -> Slices:
    """At most about so many slices (racing ones come on top), and at most so many arrows."""
    if len(drawing.slices) <= max_slices and len(drawing.arrows) <= max_arrows:
        return drawing
    racing = {end for race in drawing.races for end in (race.first, race.second)}
    run_length = -(-len(drawing.slices) // max_slices)
    slices: list[Slice] = []
    new = [0] * len(drawing.slices)
    open_run: dict[int, int] = {}  # lane -> the slice that still takes neighbours in
    for old, piece in enumerate(drawing.slices):
        run = open_run.get(piece.lane)
        if old in racing or run_length == 1:
            open_run.pop(piece.lane, None)
            new[old] = len(slices)
            slices.append(piece)
        elif run is None or slices[run].num == run_length or slices[run].wait != piece.wait:
            open_run[piece.lane] = new[old] = len(slices)
            slices.append(piece)
        else:
            new[old] = run
            head = slices[run]
            slices[run] = head._replace(stop=piece.stop, last=piece.record, num=head.num + 1)
    slices = [
        piece._replace(name=f"{piece.num} operations from {piece.name}") if piece.num > 1 else piece
        for piece in slices
    ]
    # Of the arrows that now join the same two slices, one is drawn.
    joined: dict[tuple[int, int], Arrow] = {}
    for arrow in drawing.arrows:
        source, target = new[arrow.source], new[arrow.target]
        if source != target:
            joined.setdefault((source, target), arrow._replace(source=source, target=target))
    arrows = list(joined.values())
    if len(arrows) > max_arrows:
        ends = {new[end] for end in racing}
        kept = [arrow for arrow in arrows if arrow.source in ends or arrow.target in ends][:max_arrows]
        room = max_arrows - len(kept)
        chosen = set(kept)
        others = [arrow for arrow in arrows if arrow not in chosen]
        kept += [others[i * len(others) // room] for i in range(min(room, len(others)))]
        arrows = kept
    return Slices(
        slices=tuple(slices),
        arrows=tuple(arrows),
        races=tuple(Race(new[race.first], new[race.second], race.finding) for race in drawing.races),
        makespan=drawing.makespan,
        num_ops=drawing.num_ops,
        num_arrows=drawing.num_arrows,
    )
