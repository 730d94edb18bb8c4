"""Collects racing pairs by cause, and remembers which sync calls there were around them."""

from __future__ import annotations

from collections.abc import Iterable

from crosscurrent.races.blocks import Entry
from crosscurrent.races.causes import Cause, Context, Freed, RaceKind
from crosscurrent.races.clocks import Clocks, Recording
from crosscurrent.races.mending import Mending
from crosscurrent.trace.records import Access, HostWait, MemoryKind, Op, RecordEvent, WaitEvent

_Wait = WaitEvent | HostWait
_Key = tuple[RaceKind, int, str, int, int, str, int, MemoryKind, int]


class Collector:
    """The races so far, one example of each cause; bounded by the program's text, not by its run."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._mending: Mending | None = None
        self._causes: dict[_Key, Cause] = {}
        self._last_wait: dict[int, tuple[RecordEvent | None, _Wait]] = {}
        self._last_wait_for: dict[tuple[int, int], tuple[RecordEvent, _Wait]] = {}
        self._last_recording: dict[int, Recording] = {}
        self._unrecorded: dict[int, WaitEvent] = {}

    @property
    def causes(self) -> list[Cause]:
        """The causes, in order of appearance."""
        self.settle()
        return list(self._causes.values())

    def freed(self, block: int, lanes: Iterable[int]) -> None:
        """A block was given back that the allocator holds until ``lanes`` are done with what they have."""
        self.settle()
        if self._mending is not None:
            self._mending.freed(block, lanes)

    def settle(self) -> None:
        """Find out what the last races lack; the clocks are about to change."""
        if self._mending is not None:
            self._mending.settle()

    def recorded(self, recording: Recording) -> None:
        """An event was recorded."""
        self._last_recording[recording.record.lane] = recording
        if self._mending is not None:
            self._mending.recorded(recording.record)

    def waited(self, lane: int, record: RecordEvent | None, wait: _Wait) -> None:
        """``lane`` waited for a recording, or (the host) for all work of some lanes."""
        self._last_wait[lane] = (record, wait)
        self._unrecorded.pop(lane, None)
        if record is not None:
            self._last_wait_for[lane, record.lane] = (record, wait)
        if self._mending is not None:
            self._mending.waited(lane, record, wait)

    def waited_for_nothing(self, wait: WaitEvent) -> None:
        """A stream waited for an event that nobody had recorded."""
        self._unrecorded[wait.lane] = wait

    def race(
        self,
        kind: RaceKind,
        lane: int,
        entry: Entry,
        op: Op,
        access: Access,
        memory: MemoryKind,
        *,
        freed: Freed | None = None,
        certain: bool = True,
    ) -> None:
        """An access of ``op`` is not ordered after ``entry``, an access on ``lane``."""
        epoch, first, first_access = entry
        allocated = -1 if freed is None else freed.allocated
        key = (kind, lane, first.name, first.site, op.lane, op.name, op.site, memory, allocated)
        cause = self._causes.get(key)
        pair = (first.index, op.index)
        if cause is None:
            cause = self._causes[key] = Cause(
                kind=kind,
                first_lane=lane,
                first=first,
                first_access=first_access,
                second_lane=op.lane,
                second=op,
                second_access=access,
                memory=memory,
                certain=certain,
                context=self._context(lane, epoch, first, op),
                freed=freed,
                last=pair,
            )
        else:
            cause.certain |= certain
            # One pair of ops that meets in several tensors counts once.
            if cause.last != pair:
                cause.count += 1
                cause.last = pair
        if self._mending is None:
            self._mending = Mending(self._clocks)
        self._mending.race(cause, lane, epoch, op, -1 if freed is None else freed.block)

    def _context(self, lane: int, epoch: int, first: Op, op: Op) -> Context:
        recording = self._last_recording.get(lane)
        # A wait for nothing explains a race only where its lane has not waited for something since.
        vain = [self._unrecorded[side] for side in {lane, op.lane} if side in self._unrecorded]
        unrecorded = max(vain, key=lambda wait: wait.index, default=None)
        elsewhere = self._last_wait.get(op.lane)
        if elsewhere is not None:
            record, wait = elsewhere
            lanes = (record.lane,) if record is not None else wait.lanes if isinstance(wait, HostWait) else ()
            if wait.index < first.index or lane in lanes:
                elsewhere = None
        return Context(
            early=self._last_wait_for.get((op.lane, lane)),
            ready=recording.record if recording is not None and recording.epoch >= epoch else None,
            unrecorded=unrecorded,
            elsewhere=elsewhere,
        )
