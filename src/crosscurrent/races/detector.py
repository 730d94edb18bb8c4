"""Finds every race of a trace in one pass, with memory bounded by what is live.

Note [What is remembered of a block]
    For each lane that used it: its last write and its last read of each region, with their epochs.
    A later access to an overlapping region, on another lane whose clock has not reached such an
    epoch, is a race. An earlier access of the same lane need not be remembered: whatever orders the
    later one orders it as well. Nor need one that is ordered before a write that covers it (or, for a
    read, before a read that covers it): what comes unordered with it comes unordered with that, too.
    What the host has waited for is forgotten, since everything issued later comes after it.

Note [The sole lane]
    Most blocks are used on one lane. ``sole`` is a lane that all earlier accesses to a block are
    ordered before; accesses on it need no test, and this stays so, for clocks only grow and an
    access on another lane resets it.

Note [Reuse]
    A freed block lies in the pool of the lane that was current when it was allocated, and any later
    allocation from there (of its size class; freed neighbours coalesce, so that sizes within a class
    tell nothing) may be served from it. What still runs there at the free is kept as *residue* of
    the pool, less what ``record_stream`` covers: the allocator holds a block back until what those
    streams had been given by the time of the free is done. (It ignores ``record_stream`` with the
    pool's own stream.) PyTorch's own copies from and to pinned memory do the same for their streams.
    An allocation takes the residue of its moment along, and its accesses are tested against that
    as against the block's own history: an allocation that nothing touches before a wait is no race.
    Residue ordered before the pool's own lane is harmless there, and for any other lane one missing
    edge, that from the pool's lane; so only the last of each lane is kept of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from crosscurrent.races.causes import Cause, Context, Freed, RaceKind
from crosscurrent.races.clocks import Clock, Clocks, Recording
from crosscurrent.races.findings import Finding, findings_of
from crosscurrent.races.regions import Overlap, contains, overlap
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
    Unknown,
    UseStream,
    WaitEvent,
)

SMALL_BLOCK = 1 << 20
"""Largest block, in bytes, that PyTorch's caching allocator serves from its pool of small blocks."""

REGIONS = 32
"""Regions of a block remembered for a lane before the first look for some to forget."""

Entry = tuple[int, Op, Access]
"""An access and its epoch."""

_NEVER: Entry = (0, Op(-1, HOST, "", -1, ()), Access(-1, Region(0, 1, 1), False))


class HostWaitCount(NamedTuple):
    """A call that made the host wait, and how often it did; ``record`` is the first time."""

    record: HostWait
    lanes: tuple[int, ...]
    """The lanes waited for; an event's is that on which it was recorded."""

    times: int


class UnknownCount(NamedTuple):
    """Something that could not be understood, and how often it was met."""

    record: Unknown
    times: int


class _History:
    """What one lane did to one block; see Note [What is remembered of a block]."""

    __slots__ = ("last_read", "last_write", "limit", "reads", "writes")

    def __init__(self) -> None:
        self.writes: dict[Region, Entry] = {}
        self.reads: dict[Region, Entry] = {}
        self.last_write = _NEVER
        self.last_read = _NEVER
        self.limit = REGIONS

    def entries(self) -> Iterable[Entry]:
        yield from self.writes.values()
        yield from self.reads.values()


class _Residue(NamedTuple):
    """An access that was not known to be done when its block was given back."""

    lane: int
    entry: Entry
    freed: Freed


class _Pool:
    """Freed blocks that later allocations may be served from; see Note [Reuse]."""

    __slots__ = ("residue", "snapshot")

    def __init__(self) -> None:
        self.residue: dict[int, dict[tuple[Any, ...], _Residue]] = {}
        self.snapshot: tuple[_Residue, ...] | None = ()


class _Block:
    """One live block."""

    __slots__ = ("hazards", "lanes", "memory", "mine", "nbytes", "owner", "pool", "site", "sole", "told", "used")

    def __init__(self, nbytes: int, memory: MemoryKind, owner: int, pool: _Pool | None, site: int) -> None:
        self.nbytes = nbytes
        self.memory = memory
        self.owner = owner
        self.pool = pool
        self.site = site
        self.lanes: dict[int, _History] = {}
        self.hazards: tuple[_Residue, ...] = ()
        self.told: frozenset[tuple[int, int, bool, int]] = frozenset()
        self.sole = -1
        self.mine = _UNUSED
        self.used: set[int] | None = None


_UNUSED = _History()


class Detector:
    """Fed a trace record by record, knows its races so far.

    >>> detector = Detector()
    >>> for record in records:
    ...     detector.feed(record)
    >>> detector.findings(info)

    ``feed`` keeps nothing but the history that later records can race with, and one example of each
    cause; how long the program runs does not matter.
    """

    def __init__(self) -> None:
        self._clocks = Clocks()
        self._blocks: dict[int, _Block] = {}
        self._pools: dict[tuple[MemoryKind, int, bool], _Pool] = {}
        self._causes: dict[tuple[Any, ...], Cause] = {}
        self._host_waits: dict[tuple[Any, ...], HostWaitCount] = {}
        self._unknown: dict[tuple[Any, ...], UnknownCount] = {}
        self._last_wait: dict[int, tuple[RecordEvent | None, WaitEvent | HostWait]] = {}
        self._last_wait_for: dict[tuple[int, int], tuple[RecordEvent, WaitEvent | HostWait]] = {}
        self._last_recording: dict[int, Recording] = {}
        self._unrecorded: dict[int, WaitEvent] = {}
        self._feeders: dict[type, Callable[[Any], None]] = {
            Op: self._op,
            Alloc: self._alloc,
            Free: self._free,
            UseStream: self._use_stream,
            RecordEvent: self._record_event,
            DropEvent: self._drop_event,
            WaitEvent: self._wait_event,
            HostWait: self._host_wait,
            Unknown: self._not_understood,
        }

    def feed(self, record: Record) -> None:
        """Take in the next record of the trace."""
        self._feeders[record.__class__](record)

    def findings(self, info: TraceInfo) -> list[Finding]:
        """The races so far: one finding for each missing edge, in a stable order, with stable ids."""
        return findings_of(self._causes.values(), info)

    @property
    def causes(self) -> list[Cause]:
        """The races so far as integers, by kind, lanes, ops and call sites, in order of appearance."""
        return list(self._causes.values())

    @property
    def host_waits(self) -> list[HostWaitCount]:
        """The calls that made the host wait, in the order of their first times."""
        return list(self._host_waits.values())

    @property
    def unknown(self) -> list[UnknownCount]:
        """What could not be understood, by op, call site and reason."""
        return list(self._unknown.values())

    @property
    def num_retained(self) -> int:
        """Accesses, residues and recordings that are kept: what the detector's memory grows with."""
        kept = self._clocks.num_recordings
        for block in self._blocks.values():
            kept += 1 + len(block.hazards)
            kept += sum(len(history.writes) + len(history.reads) for history in block.lanes.values())
        for pool in self._pools.values():
            kept += sum(map(len, pool.residue.values()))
        return kept

    # Accesses.

    def _op(self, op: Op) -> None:
        lane = op[1]
        clock = self._clocks.of(lane)
        if lane == HOST:
            for access in op[4]:
                self._host_access(op, access, clock)
            return
        epoch = clock[lane] = clock[lane] + 1
        blocks = self._blocks
        for access in op[4]:
            number, region, write, _, _, kept = access
            try:
                block = blocks[number]
            except KeyError:
                block = self._unannounced(number, op)
            history = block.mine if block.sole == lane else self._compare(block, op, access, clock)
            if kept:
                self._hold(block, lane)
            entry = (epoch, op, access)
            if write:
                if region[2] == block.nbytes:
                    # The write covers the whole block, so it replaces all that is ordered before it.
                    history.writes.clear()
                    history.reads.clear()
                    history.last_read = _NEVER
                    if block.sole == lane:
                        block.hazards = ()
                        if len(block.lanes) != 1:
                            block.lanes = {lane: history}
                writes = history.writes
                writes[region] = history.last_write = entry
                if len(writes) > history.limit:
                    self._forget(block, access, clock)
            else:
                reads = history.reads
                reads[region] = history.last_read = entry
                if len(reads) > history.limit:
                    self._forget(block, access, clock)

    def _host_access(self, op: Op, access: Access, clock: Clock) -> None:
        """Test an access of the host; it leaves nothing behind, for nothing issued later can precede it."""
        block = self._blocks.get(access.block)
        if block is None:
            block = self._unannounced(access.block, op)
        if block.lanes or block.hazards:
            self._test(block, op, access, clock)
            for lane in [lane for lane in block.lanes if _done(block.lanes[lane], lane, clock)]:
                del block.lanes[lane]
                block.sole = -1

    def _compare(self, block: _Block, op: Op, access: Access, clock: Clock) -> _History:
        """Test an access against what other lanes did; returns its own lane's history."""
        lane = op.lane
        if lane != HOST and not block.lanes and not block.hazards:
            block.mine = block.lanes[lane] = _History()
            block.sole = lane
            return block.mine
        clean = self._test(block, op, access, clock)
        lanes = block.lanes
        host = self._clocks.host
        for other in [
            other for other, history in lanes.items() if other != lane and _done(history, other, host)
        ]:
            del lanes[other]
        if access.write and lanes:
            self._replace(block, access, clock, lane)
        history = lanes.get(lane)
        if history is None:
            history = lanes[lane] = _History()
        block.mine = history
        block.sole = lane if clean else -1
        return history

    def _test(self, block: _Block, op: Op, access: Access, clock: Clock) -> bool:
        """Report the races of an access; whether all that was ever done to the block comes before it."""
        lane = op.lane
        clean = True
        for other, history in block.lanes.items():
            if other == lane:
                continue
            known = clock[other]
            if history.last_write[0] > known:
                clean = False
                kind = RaceKind.WRITE_AFTER_WRITE if access.write else RaceKind.READ_AFTER_WRITE
                self._meet(block, kind, other, history.writes, known, op, access)
            if history.last_read[0] > known:
                clean = False
                if access.write:
                    self._meet(block, RaceKind.WRITE_AFTER_READ, other, history.reads, known, op, access)
        for residue in block.hazards:
            other = residue.lane
            if other == lane or residue.entry[0] <= clock[other]:
                continue
            clean = False
            # Judged at the first unordered access of each lane: its later ones tell nothing new.
            told = (residue.freed.block, residue.entry[1].index, residue.entry[2].write, lane)
            if (access.write or residue.entry[2].write) and told not in block.told:
                block.told |= {told}
                self._race(block, RaceKind.REUSE, other, residue.entry, op, access, residue.freed, True)
        return clean

    def _meet(
        self,
        block: _Block,
        kind: RaceKind,
        lane: int,
        entries: dict[Region, Entry],
        known: int,
        op: Op,
        access: Access,
    ) -> None:
        """Report what of another lane's ``entries`` overlaps and is not ordered before an access."""
        for region, entry in entries.items():
            if entry[0] > known:
                answer = overlap(region, access.region)
                if answer is not Overlap.NO:
                    self._race(block, kind, lane, entry, op, access, None, answer is Overlap.YES)

    # What may be forgotten.

    def _replace(self, block: _Block, access: Access, clock: Clock, lane: int) -> None:
        """Forget what other lanes did before a write that covers it."""
        for other, history in block.lanes.items():
            if other != lane and len(history.writes) + len(history.reads) <= REGIONS:
                _thin(history, access, clock[other])

    def _forget(self, block: _Block, access: Access, clock: Clock) -> None:
        """Look for accesses to forget, in a block of which a lane uses many regions."""
        host = self._clocks.host
        for lane, history in block.lanes.items():
            _thin(history, access, clock[lane])
            done = host[lane]
            for entries in (history.writes, history.reads):
                for region in [region for region, entry in entries.items() if entry[0] <= done]:
                    del entries[region]
            # Doubling makes the look cost a constant for each region added.
            history.limit = max(REGIONS, 2 * max(len(history.writes), len(history.reads)))

    # Memory.

    def _alloc(self, alloc: Alloc) -> None:
        owner, nbytes, memory = alloc.lane, alloc.nbytes, alloc.memory
        if memory is MemoryKind.PINNED:
            # One pool for all: a pinned block belongs to no stream, and is the host's when it is handed out.
            owner = HOST
        key = (memory, owner, memory is MemoryKind.DEVICE and nbytes <= SMALL_BLOCK)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool()
        block = self._blocks[alloc.block] = _Block(nbytes, memory, owner, pool, alloc.site)
        if alloc.fresh and pool.residue:
            clock = self._clocks.of(owner)
            block.hazards = self._settle(pool, clock)
            if owner != HOST and all(hazard.entry[0] <= clock[hazard.lane] for hazard in block.hazards):
                block.mine = block.lanes[owner] = _History()
                block.sole = owner

    def _settle(self, pool: _Pool, clock: Clock) -> tuple[_Residue, ...]:
        """The residue of a pool that is not done yet."""
        host = self._clocks.host
        residue = pool.residue
        for lane in list(residue):
            group = residue[lane]
            if max(item.entry[0] for item in group.values()) <= host[lane]:
                del residue[lane]
                pool.snapshot = None
            elif len(group) > 2 and max(item.entry[0] for item in group.values()) <= clock[lane]:
                # All ordered before the pool's own lane: the last write and the last read stand for all.
                last: dict[tuple[Any, ...], _Residue] = {}
                for item in group.values():
                    write = (item.entry[2].write,)
                    if write not in last or last[write].entry[0] < item.entry[0]:
                        last[write] = item
                residue[lane] = last
                pool.snapshot = None
        if pool.snapshot is None:
            pool.snapshot = tuple(item for group in residue.values() for item in group.values())
        return pool.snapshot

    def _free(self, free: Free) -> None:
        block = self._blocks.pop(free.block, None)
        if block is None or not block.lanes:
            return
        pool = block.pool
        if pool is None:
            self._not_understood(_homeless(free))
            return
        owner = block.owner
        done = self._clocks.host
        if block.used is not None:
            done = list(done)
            for lane in block.used:
                done = list(map(max, done, self._clocks.of(lane)))
        freed = None
        for lane, history in block.lanes.items():
            if history.last_write[0] <= done[lane] and history.last_read[0] <= done[lane]:
                continue
            if freed is None:
                freed = Freed(free.block, owner, block.site, free.site, free.index)
            if lane == owner:
                entries: Iterable[Entry] = (history.last_write, history.last_read)
            else:
                entries = history.entries()
            for entry in entries:
                if entry[0] > done[lane]:
                    op, write = entry[1], entry[2].write
                    key = (write,) if lane == owner else (write, op.name, op.site, block.site)
                    group = pool.residue.setdefault(lane, {})
                    before = group.get(key)
                    if before is None or before.entry[0] < entry[0]:
                        group[key] = _Residue(lane, entry, freed)
            pool.snapshot = None

    def _use_stream(self, use: UseStream) -> None:
        block = self._blocks.get(use.block)
        if block is not None:
            self._hold(block, use.lane)

    def _hold(self, block: _Block, lane: int) -> None:
        """The allocator will hold the block back for ``lane``; for the pool's own lane it does not."""
        if lane != block.owner:
            if block.used is None:
                block.used = set()
            block.used.add(lane)

    def _unannounced(self, number: int, op: Op) -> _Block:
        """A block whose allocation the trace does not tell."""
        block = self._blocks[number] = _Block(-1, MemoryKind.DEVICE, -1, None, op.site)
        return block

    # Synchronization.

    def _record_event(self, record: RecordEvent) -> None:
        self._last_recording[record.lane] = self._clocks.record(record)

    def _drop_event(self, drop: DropEvent) -> None:
        self._clocks.drop(drop.event)

    def _wait_event(self, wait: WaitEvent) -> None:
        recording = self._clocks.wait(wait)
        if recording is None:
            self._unrecorded[wait.lane] = wait
        else:
            self._waited(wait.lane, recording.record, wait)

    def _host_wait(self, wait: HostWait) -> None:
        recording = self._clocks.host_wait(wait)
        lanes = wait.lanes if recording is None else (recording.record.lane,)
        if recording is not None:
            self._waited(HOST, recording.record, wait)
        elif wait.lanes:
            self._last_wait[HOST] = (None, wait)
        key = (wait.kind, wait.op, wait.site, lanes)
        before = self._host_waits.get(key)
        self._host_waits[key] = (
            HostWaitCount(wait, lanes, 1) if before is None else before._replace(times=before.times + 1)
        )

    def _waited(self, lane: int, record: RecordEvent, wait: WaitEvent | HostWait) -> None:
        self._last_wait[lane] = (record, wait)
        self._last_wait_for[lane, record.lane] = (record, wait)

    def _not_understood(self, unknown: Unknown) -> None:
        key = (unknown.op, unknown.site, unknown.reason)
        before = self._unknown.get(key)
        self._unknown[key] = (
            UnknownCount(unknown, 1) if before is None else before._replace(times=before.times + 1)
        )

    # Races.

    def _race(
        self,
        block: _Block,
        kind: RaceKind,
        lane: int,
        entry: Entry,
        op: Op,
        access: Access,
        freed: Freed | None,
        certain: bool,
    ) -> None:
        epoch, first, first_access = entry
        allocated = -1 if freed is None else freed.allocated
        key = (kind, lane, first.name, first.site, op.lane, op.name, op.site, block.memory, allocated)
        cause = self._causes.get(key)
        pair = (first.index, op.index)
        if cause is None:
            self._causes[key] = Cause(
                kind=kind,
                first_lane=lane,
                first=first,
                first_access=first_access,
                second_lane=op.lane,
                second=op,
                second_access=access,
                memory=block.memory,
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

    def _context(self, lane: int, epoch: int, first: Op, op: Op) -> Context:
        recording = self._last_recording.get(lane)
        unrecorded = max(
            (self._unrecorded[side] for side in {lane, op.lane} if side in self._unrecorded),
            key=lambda wait: wait.index,
            default=None,
        )
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


def _done(history: _History, lane: int, clock: Clock) -> bool:
    """Whether all that ``lane`` did to a block is known to ``clock``."""
    known = clock[lane]
    return history.last_write[0] <= known and history.last_read[0] <= known


def _thin(history: _History, access: Access, known: int) -> None:
    """Forget the accesses up to epoch ``known`` that ``access``, ordered after them, covers."""
    cover = access.region
    for entries in (history.writes, history.reads) if access.write else (history.reads,):
        covered = [
            region
            for region, entry in entries.items()
            if entry[0] <= known and entry[2] is not access and contains(cover, region)
        ]
        for region in covered:
            del entries[region]


def _homeless(free: Free) -> Unknown:
    reason = "freed, but its allocation is not in the trace, so that its reuse cannot be judged"
    return Unknown(free.index, "free", free.site, reason)
