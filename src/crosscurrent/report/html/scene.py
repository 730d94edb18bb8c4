"""Which records to draw for a race: the pair, then what bears on its order, then what lies near."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from crosscurrent.races.causes import RaceKind
from crosscurrent.races.findings import Finding
from crosscurrent.trace.records import Alloc, Free, HostWait, Op, Record, RecordEvent, WaitEvent

ROWS = 14
"""Records drawn for one finding, at most."""

SEARCH = 4_000
"""Records looked at on either side of a race for something worth drawing."""

MAX_WAITS = 3
"""Waits drawn because they come between the pair and might have ordered it."""


class Scene:
    """The records around one race. ``chosen`` are those to draw, in the order of the trace."""

    def __init__(self, finding: Finding, records: Sequence[Record]) -> None:
        self._finding = finding
        self._records = records
        self._start = position_of(records, finding.first.index)
        self._stop = position_of(records, finding.second.index)
        self._near = records[max(0, self._start - SEARCH) : self._stop]
        self._between = records[self._start + 1 : min(self._stop, self._start + SEARCH)]
        self._recordings = {record.event: record for record in self._near if isinstance(record, RecordEvent)}
        chosen: dict[int, Record] = {}
        for record in self._by_importance():
            if len(chosen) == ROWS:
                break
            chosen[record.index] = record
        self.chosen = [chosen[index] for index in sorted(chosen)]

    def left_out(self, one: Record, other: Record) -> int:
        """How many records lie between two."""
        return position_of(self._records, other.index) - position_of(self._records, one.index) - 1

    def _by_importance(self) -> Iterator[Record]:
        yield self._records[self._start]
        yield self._records[self._stop]
        yield from self._lifetimes()
        yield from self._waits_for_too_little()
        yield from self._unused_recording()
        yield from self._other_accesses()
        yield from self._edges_of_the_pair()
        yield from self._neighbours()

    def _lifetimes(self) -> Iterator[Record]:
        """Of a reuse: when the first block was given back, and when the second was handed out."""
        if self._finding.kind is RaceKind.REUSE:
            for record in self._records[self._start : self._stop]:
                gives_back = isinstance(record, Free) and record.block == self._finding.first.block
                hands_out = isinstance(record, Alloc) and record.block == self._finding.second.block
                if gives_back or hands_out:
                    yield record

    def _waits_for_too_little(self) -> Iterator[Record]:
        """The waits between the pair; without any, the last wait of the second lane for the first."""
        first = self._finding.first
        found = 0
        for record in reversed(self._near):
            if not self._holds_back_second(record):
                continue
            source = self._recordings.get(record.event) if record.event is not None else None
            between = record.index > first.index
            if between or (source is not None and source.lane == first.lane_index):
                yield record
                if source is not None:
                    yield source
                found += 1
            if found == MAX_WAITS or (found and not between):
                return

    def _holds_back_second(self, record: Record) -> TypeGuard[WaitEvent | HostWait]:
        if isinstance(record, WaitEvent):
            return record.lane == self._finding.second.lane_index
        return isinstance(record, HostWait) and (record.event is not None or bool(record.lanes))

    def _unused_recording(self) -> Iterator[Record]:
        """An event that does cover the first access: to wait for it would be the whole fix."""
        lane = self._finding.first.lane_index
        for record in self._between:
            if isinstance(record, RecordEvent) and record.lane == lane:
                yield record
                return

    def _other_accesses(self) -> Iterator[Record]:
        block = self._finding.first.block
        touching = [
            record
            for record in self._between
            if isinstance(record, Op) and any(access.block == block for access in record.accesses)
        ]
        yield from touching[:1] + touching[-1:]

    def _edges_of_the_pair(self) -> Iterator[Record]:
        """The edges that do exist: what the two accesses were made to wait for last."""
        pair = ((self._finding.first, self._start), (self._finding.second, self._stop))
        for side, position in pair:
            for record in reversed(self._records[max(0, position - SEARCH) : position]):
                if isinstance(record, WaitEvent) and record.lane == side.lane_index:
                    if record.event in self._recordings:
                        yield self._recordings[record.event]
                    yield record
                    break

    def _neighbours(self) -> Iterator[Record]:
        """The nearest operations of the two lanes, before, between and after the pair."""
        first, second = self._finding.first.lane_index, self._finding.second.lane_index
        start, stop = self._start, self._stop
        yield from self._nearest(range(start - 1, max(-1, start - 1 - SEARCH), -1), first)
        yield from self._nearest(range(start + 1, min(stop, start + SEARCH)), first)
        yield from self._nearest(range(stop - 1, max(start, stop - SEARCH), -1), second)
        yield from self._nearest(range(stop + 1, min(len(self._records), stop + SEARCH)), second)

    def _nearest(self, positions: range, lane: int) -> Iterator[Record]:
        for position in positions:
            record = self._records[position]
            if isinstance(record, Op) and record.lane == lane and record.accesses:
                yield record
                return


def position_of(records: Sequence[Record], index: int) -> int:
    """Where a record is in the trace, or would be: a trace may have been cut."""
    if index < len(records) and records[index].index == index:
        return index
    return bisect_left(records, index, key=lambda record: record.index)


def holds(records: Sequence[Record], index: int) -> bool:
    """Whether a trace has a record."""
    position = position_of(records, index)
    return position < len(records) and records[position].index == index
