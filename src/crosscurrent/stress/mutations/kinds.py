"""The sync edges of a trace, and what can be done to each: records in, records out.

An edge has two ends, and each is changed on its own: the recording and the wait. Recordings that nobody waits
for are no edges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from crosscurrent.trace.records import (
    NO_EVENT,
    HostWait,
    Op,
    Record,
    RecordEvent,
    Site,
    TraceInfo,
    WaitEvent,
)


class Kind(Enum):
    """What is done to an end of an edge."""

    WAIT_DROPPED = "wait dropped"
    RECORD_DROPPED = "recording dropped"
    EARLY = "recorded too early"
    """As early as the recording before it on the same lane that covers less: as if the event were stale."""

    RECORDED_ELSEWHERE = "recorded on the wrong stream"
    WAITED_ELSEWHERE = "waited for by the wrong stream"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """One change to one end of one edge, once."""

    kind: Kind
    index: int
    """The record that is changed, by its number in the trace."""

    site: Site
    call: str
    """What was called there: ``record``, ``wait_event``, ``query``, ..."""

    occurrence: int
    """Which call at this call site it is, from 0, of those that call the same."""

    place: str
    """In which part of the program, in the words of whoever asked."""

    lane: int | None = None
    """The wrong lane, for the kinds that have one."""

    earlier: int = 0
    """For ``EARLY``: how many recordings of the lane it goes back. More than there are: to before all."""

    previous: int | None = None
    """For ``EARLY``: the number of that recording's record; None if there is none."""

    def __str__(self) -> str:
        where = f"{self.site.file.rpartition('/')[2]}:{self.site.line} ({self.site.function})"
        lane = "" if self.lane is None else f", lane {self.lane}"
        return f"{self.kind.value}{lane}: {where}, {self.call} {self.occurrence}, {self.place}"


def mutations_of(
    records: Sequence[Record],
    info: TraceInfo,
    *,
    owns: Callable[[Site], bool] = lambda _: True,
    place: Callable[[int], str] = lambda _: "anywhere",
) -> list[Mutation]:
    """Every change to every edge that is made at a call site of which ``owns`` says so.

    ``place`` says for a record's number where in the program it is.
    """
    return list(_Finder(records, info, owns, place).mutations())


def mutated(records: Sequence[Record], mutation: Mutation) -> list[Record]:
    """The trace that would have come of it. ``records`` may be a thinned trace."""
    at = _position(records, mutation.index)
    changed = list(records)
    record = changed.pop(at)
    match mutation.kind:
        case Kind.EARLY if mutation.previous is not None:
            changed.insert(_position(records, mutation.previous) + 1, record)
        case Kind.RECORDED_ELSEWHERE | Kind.WAITED_ELSEWHERE:
            assert isinstance(record, RecordEvent | WaitEvent)
            assert mutation.lane is not None
            changed.insert(at, record._replace(lane=mutation.lane))
    return changed


def _position(records: Sequence[Record], index: int) -> int:
    position = bisect_left(records, index, key=lambda record: record.index)
    if position == len(records) or records[position].index != index:
        raise ValueError(f"record {index} is not in this trace: the mutation belongs to another")
    return position


class _Finder:
    def __init__(
        self,
        records: Sequence[Record],
        info: TraceInfo,
        owns: Callable[[Site], bool],
        place: Callable[[int], str],
    ) -> None:
        self._records = records
        self._info = info
        self._owns = owns
        self._place = place
        self._waited_for = {
            record.event
            for record in records
            if isinstance(record, WaitEvent | HostWait) and _orders(record) and owns(info.sites[record.site])
        }
        self._lanes = sorted({r.lane for r in records if isinstance(r, RecordEvent | WaitEvent)})
        self._calls: Counter[tuple[str, int]] = Counter()

    def mutations(self) -> Iterator[Mutation]:
        ops: Counter[int] = Counter()
        recorded: dict[int, list[tuple[int, int]]] = {}  # by lane: record numbers, and ops before them
        for record in self._records:
            if isinstance(record, Op):
                ops[record.lane] += 1
            elif isinstance(record, WaitEvent | HostWait):
                yield from self._of_wait(record)
            elif isinstance(record, RecordEvent):
                past = recorded.setdefault(record.lane, [])
                if record.event in self._waited_for:
                    yield from self._of_recording(record, past, ops[record.lane])
                else:
                    self._number(record)
                past.append((record.index, ops[record.lane]))

    def _of_wait(self, wait: WaitEvent | HostWait) -> Iterator[Mutation]:
        drop = self._dropped(Kind.WAIT_DROPPED, wait)
        if not (_orders(wait) and self._owns(drop.site)):
            return
        yield drop
        if isinstance(wait, WaitEvent):
            for lane in self._lanes:
                if lane != wait.lane:
                    yield replace(drop, kind=Kind.WAITED_ELSEWHERE, lane=lane)

    def _of_recording(
        self, record: RecordEvent, past: Sequence[tuple[int, int]], num_ops: int
    ) -> Iterator[Mutation]:
        drop = self._dropped(Kind.RECORD_DROPPED, record)
        yield drop
        for lane in self._lanes:
            if lane != record.lane:
                yield replace(drop, kind=Kind.RECORDED_ELSEWHERE, lane=lane)
        back, previous = len(past) + 1, None
        for steps, (index, ops) in enumerate(reversed(past), start=1):
            if ops < num_ops:
                back, previous = steps, index
                break
        yield replace(drop, kind=Kind.EARLY, earlier=back, previous=previous)

    def _dropped(self, kind: Kind, record: RecordEvent | WaitEvent | HostWait) -> Mutation:
        call, occurrence = self._number(record)
        return Mutation(
            kind=kind,
            index=record.index,
            site=self._info.sites[record.site],
            call=call,
            occurrence=occurrence,
            place=self._place(record.index),
        )

    def _number(self, record: RecordEvent | WaitEvent | HostWait) -> tuple[str, int]:
        """What was called, and which such call this is at its call site."""
        call = record.kind if isinstance(record, HostWait) else record.via
        self._calls[call, record.site] += 1
        return call, self._calls[call, record.site] - 1


def _orders(wait: WaitEvent | HostWait) -> bool:
    """Whether a wait orders anything."""
    if isinstance(wait, HostWait) and wait.event is None:
        return bool(wait.lanes)
    return wait.event != NO_EVENT
