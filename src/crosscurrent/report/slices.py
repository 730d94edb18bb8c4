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
    drawing = _Drawing()
    for record, start, stop, cost in zip(sources, run.start, run.stop, costs, strict=True):
        match record:
            case RecordEvent():
                drawing.recorded(record)
            case WaitEvent():
                drawing.waited(record)
            case Op():
                drawing.operation(record, start, stop, cost)
            case HostWait():
                drawing.host_waited(record, start, stop)
    where = drawing.where
    return Slices(
        slices=tuple(drawing.slices),
        arrows=tuple(drawing.arrows),
        races=tuple(
            Race(where[finding.first.index], where[finding.second.index], number)
            for number, finding in enumerate(findings)
            if finding.first.index in where and finding.second.index in where
        ),
        makespan=run.makespan,
        num_ops=len(drawing.slices),
        num_arrows=len(drawing.arrows),
    )


class _Drawing:
    """Slices so far, and what the next ones are ordered after."""

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self.arrows: list[Arrow] = []
        self.where: dict[int, int] = {}
        """By record: its slice."""
        self._last: dict[int, int] = {}  # lane -> its last slice
        self._recorded: dict[int, int] = {}  # event -> the last slice of its lane when it was recorded
        self._waiting: dict[int, list[tuple[int, str, int]]] = {}  # lane -> what its next slice waits for

    def recorded(self, record: RecordEvent) -> None:
        if record.lane in self._last:
            self._recorded[record.event] = self._last[record.lane]

    def waited(self, record: WaitEvent) -> None:
        if record.event in self._recorded:
            wait = (self._recorded[record.event], record.via, record.site)
            self._waiting.setdefault(record.lane, []).append(wait)

    def operation(self, op: Op, start: int, stop: int, cost: Cost) -> None:
        position = self._add(Slice(op.lane, start, stop, op.index, op.index, _name(op, cost), op.site))
        for source, via, site in self._waiting.pop(op.lane, ()):
            self._arrow(source, position, via, site)

    def host_waited(self, wait: HostWait, start: int, stop: int) -> None:
        awaited = (
            [self._recorded.get(wait.event)]
            if wait.event is not None
            else list(map(self._last.get, wait.lanes))
        )
        position = self._add(
            Slice(HOST, start, stop, wait.index, wait.index, wait.kind, wait.site, wait=True)
        )
        for source in awaited:
            if source is not None:
                self._arrow(source, position, wait.kind, wait.site)

    def _add(self, piece: Slice) -> int:
        position = self.where[piece.record] = self._last[piece.lane] = len(self.slices)
        self.slices.append(piece)
        return position

    def _arrow(self, source: int, target: int, via: str, site: int) -> None:
        one, other = self.slices[source], self.slices[target]
        stop = other.stop if other.wait else other.start
        self.arrows.append(Arrow(source, target, via, site, one.stop, stop, one.record, other.record))


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
    slices, new = _joined(drawing.slices, racing, -(-len(drawing.slices) // max_slices))
    arrows = _moved(drawing.arrows, new)
    if len(arrows) > max_arrows:
        arrows = _some(arrows, {new[end] for end in racing}, max_arrows)
    return Slices(
        slices=tuple(slices),
        arrows=tuple(arrows),
        races=tuple(Race(new[race.first], new[race.second], race.finding) for race in drawing.races),
        makespan=drawing.makespan,
        num_ops=drawing.num_ops,
        num_arrows=drawing.num_arrows,
    )


def _joined(pieces: Sequence[Slice], racing: set[int], most: int) -> tuple[list[Slice], list[int]]:
    """Neighbours of a lane joined, up to ``most`` in one; and by old slice, the new one that holds it."""
    slices: list[Slice] = []
    new: list[int] = []
    open_run: dict[int, int] = {}  # lane -> the slice that still takes neighbours in
    for old, piece in enumerate(pieces):
        run = open_run.get(piece.lane)
        if (
            run is not None
            and old not in racing
            and slices[run].num < most
            and slices[run].wait == piece.wait
        ):
            head = slices[run]
            slices[run] = head._replace(stop=piece.stop, last=piece.record, num=head.num + 1)
        else:
            run = len(slices)
            slices.append(piece)
            if old in racing:
                open_run.pop(piece.lane, None)
            else:
                open_run[piece.lane] = run
        new.append(run)
    named = [
        piece._replace(name=f"{piece.num} operations from {piece.name}") if piece.num > 1 else piece
        for piece in slices
    ]
    return named, new


def _moved(arrows: Iterable[Arrow], new: Sequence[int]) -> list[Arrow]:
    """The arrows between new slices; of those that now join the same two, one."""
    joined: dict[tuple[int, int], Arrow] = {}
    for arrow in arrows:
        source, target = new[arrow.source], new[arrow.target]
        if source != target:
            joined.setdefault((source, target), arrow._replace(source=source, target=target))
    return list(joined.values())


def _some(arrows: Sequence[Arrow], racing: set[int], most: int) -> list[Arrow]:
    """Those of racing slices first, and of the others some from everywhere."""
    kept = [arrow for arrow in arrows if arrow.source in racing or arrow.target in racing][:most]
    chosen = set(kept)
    others = [arrow for arrow in arrows if arrow not in chosen]
    room = min(most - len(kept), len(others))
    return kept + [others[i * len(others) // room] for i in range(room)]
