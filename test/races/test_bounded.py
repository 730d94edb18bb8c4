"""What the detector keeps grows with what is live, not with how long the program runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from race_programs import NBYTES, WHOLE

from crosscurrent.races.blocks import REGIONS
from crosscurrent.races.detector import Detector
from crosscurrent.trace.records import (
    HOST,
    Access,
    Alloc,
    DropEvent,
    Free,
    HostWait,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    Region,
    TraceInfo,
    UseStream,
    WaitEvent,
)

MAIN, FETCH, STORE = 1, 2, 3
SLOTS, PINNED, CACHE = (0, 1), (2, 3), 4
FIRST_FREE = 10

Loop = Callable[[int], Iterator[Record]]


def op(lane: int, site: int, *accesses: tuple[int, Region, bool]) -> Op:
    return Op(0, lane, "op", site, tuple(Access(*access) for access in accesses))


def temporaries(step: int) -> Iterator[Record]:
    """One stream; each step allocates, writes, reads, and frees what the step before allocated."""
    block = FIRST_FREE + step
    yield Alloc(0, block, MAIN, NBYTES, MemoryKind.DEVICE, 0)
    yield op(MAIN, 1, (SLOTS[0], WHOLE, False), (block, WHOLE, True))
    if step:
        yield op(MAIN, 2, (block - 1, WHOLE, False), (SLOTS[0], WHOLE, True))
        yield Free(0, block - 1, 3)


def asynchronous_offload(step: int) -> Iterator[Record]:
    """Fetch, compute, store on three streams with events only: the host never waits for anything."""
    slot, pinned, block = SLOTS[step % 2], PINNED[step % 2], FIRST_FREE + step
    event = 4 * step
    if step >= 2:
        yield WaitEvent(0, FETCH, event - 8 + 1, 0, "wait_event")
        yield DropEvent(0, event - 8 + 1)
    yield op(FETCH, 1, (pinned, WHOLE, False), (slot, WHOLE, True))
    yield RecordEvent(0, FETCH, event, 2, "wait_stream")
    yield WaitEvent(0, MAIN, event, 2, "wait_stream")
    yield DropEvent(0, event)
    yield Alloc(0, block, MAIN, NBYTES, MemoryKind.DEVICE, 3)
    yield op(MAIN, 4, (slot, WHOLE, False), (block, WHOLE, True))
    yield RecordEvent(0, MAIN, event + 1, 5, "record")
    yield RecordEvent(0, MAIN, event + 2, 6, "wait_stream")
    yield WaitEvent(0, STORE, event + 2, 6, "wait_stream")
    yield DropEvent(0, event + 2)
    yield op(STORE, 7, (block, WHOLE, False))
    yield UseStream(0, block, STORE, 8)
    yield Free(0, block, 9)


def cache_writes(step: int) -> Iterator[Record]:
    """One row of a cache after the other is written and the whole is read on another stream."""
    row = step % 64
    yield op(MAIN, 1, (CACHE, Region(row, row + 1, 1), True))
    yield RecordEvent(0, MAIN, step, 2, "wait_stream")
    yield WaitEvent(0, STORE, step, 2, "wait_stream")
    yield DropEvent(0, step)
    yield op(STORE, 3, (CACHE, WHOLE, False))
    yield RecordEvent(0, STORE, -2 - step, 4, "wait_stream")
    yield WaitEvent(0, MAIN, -2 - step, 4, "wait_stream")
    yield DropEvent(0, -2 - step)


def ever_new_regions(step: int) -> Iterator[Record]:
    """One stream writes regions that it never wrote before, and now and then all of the block."""
    start = step * 7919 % 10**6
    yield op(MAIN, 1, (CACHE, Region(start, start + 3, 3), True))
    if step % 100 == 0:
        yield op(MAIN, 2, (CACHE, Region(0, 10**6 + 3, 10**6 + 3), True))


def host_between(step: int) -> Iterator[Record]:
    """Regions that are new in each step, on two streams, with a host that waits each time."""
    start = step * 7919 % 10**6
    lane = (MAIN, STORE)[step % 2]
    yield op(lane, 1, (CACHE, Region(start, start + 3, 3), True))
    yield HostWait(0, "synchronize", None, (lane,), 2)
    yield op(HOST, 3, (PINNED[0], WHOLE, True))


def events_that_nobody_drops(step: int) -> Iterator[Record]:
    """Recordings that stay reachable, of work that the host has waited for."""
    yield op(MAIN, 1, (SLOTS[0], WHOLE, True))
    yield RecordEvent(0, MAIN, step, 2, "record")
    yield HostWait(0, "event", step, (), 3)


def racy(step: int) -> Iterator[Record]:
    """The same race in each step, with reuse."""
    block = FIRST_FREE + step
    yield Alloc(0, block, MAIN, NBYTES, MemoryKind.DEVICE, 0)
    yield op(MAIN, 1, (block, WHOLE, True))
    yield op(STORE, 2, (block, WHOLE, False))
    yield Free(0, block, 3)


# The largest number of entries that each loop may keep: its live blocks (up to five, one entry each),
# and for each up to two accesses on each of up to three lanes, recordings, and residue of a few sites.
BOUNDS: dict[Loop, int] = {
    temporaries: 20,
    asynchronous_offload: 40,
    # 64 rows written on one lane, and the whole read on the other; twice that before a look forgets some.
    cache_writes: 2 * 64 + 20,
    # 100 regions between two writes of the whole, and the limit that was reached is kept for the next time.
    ever_new_regions: 4 * 100 + 20,
    host_between: 4 * REGIONS + 20,
    # Recordings are looked through when there are more than 1024.
    events_that_nobody_drops: 1024 + 20,
    racy: 20,
}


@pytest.mark.parametrize("loop", BOUNDS)
def test_history_stays_flat(loop: Loop) -> None:
    detector = Detector()
    most = 0
    for step in range(20_000):
        for record in loop(step):
            detector.feed(record)
        most = max(most, detector.num_retained) if step % 50 == 0 else most
    assert most <= BOUNDS[loop]


def test_a_race_that_repeats_is_one_finding_with_a_count() -> None:
    detector = Detector()
    for step in range(1000):
        for record in racy(step):
            # The positions are what counts pairs.
            detector.feed(record._replace(index=4 * step + record[3] if isinstance(record, Op) else 0))
    info = TraceInfo([], [])
    found = {finding.kind.value: finding for finding in detector.findings(info)}
    assert found["read-after-write"].count == 1000
    assert len(found) == 2, "the missing edge to the reader, and the reuse of its source"
