"""A small language for traces that are written by hand: integers, no tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from crosscurrent.schedules.order import PartialOrder
from crosscurrent.trace.records import (
    HOST,
    Access,
    Alloc,
    Free,
    HostWait,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    Region,
    UseStream,
    WaitEvent,
)


class Script:
    """Writes a trace, one call a record."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._events = 0

    def op(self, lane: int, *accesses: tuple[int, str], name: str = "op") -> int:
        """An operation; accesses are ``(block, "r" or "w")``, of 64 bytes. Returns its record number."""
        touched = tuple(Access(block, Region(0, 64, 64), "w" in how) for block, how in accesses)
        return self._add(lambda index: Op(index, lane, name, 0, touched))

    def alloc(
        self, block: int, lane: int, nbytes: int = 512, *, pinned: bool = False, fresh: bool = True
    ) -> None:
        memory = MemoryKind.PINNED if pinned else MemoryKind.DEVICE
        self._add(lambda index: Alloc(index, block, lane, nbytes, memory, 0, fresh))

    def free(self, block: int) -> None:
        self._add(lambda index: Free(index, block, 0))

    def use(self, block: int, lane: int) -> None:
        self._add(lambda index: UseStream(index, block, lane, 0))

    def record(self, lane: int) -> int:
        self._events += 1
        event = self._events
        self._add(lambda index: RecordEvent(index, lane, event, 0, "record"))
        return event

    def wait(self, lane: int, event: int) -> None:
        if lane == HOST:
            self._add(lambda index: HostWait(index, "event", event, (), 0))
        else:
            self._add(lambda index: WaitEvent(index, lane, event, 0, "wait_event"))

    def edge(self, source: int, target: int) -> None:
        """What ``source`` has been given -> what ``target`` is given from now on."""
        self.wait(target, self.record(source))

    def synchronize(self, *lanes: int) -> None:
        self._add(lambda index: HostWait(index, "synchronize", None, lanes, 0))

    @property
    def order(self) -> PartialOrder:
        return PartialOrder.of(self.records)

    def _add(self, make: Callable[[int], Record]) -> int:
        index = len(self.records)
        self.records.append(make(index))
        return index


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def new_script() -> Callable[[], Script]:
    return Script
