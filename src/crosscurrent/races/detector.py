"""Finds every race of a trace in one pass, with memory bounded by what is live.

How it remembers accesses and freed memory is told in ``blocks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from crosscurrent.races.blocks import (
    ALONE,
    MOST_SPARE,
    NEVER,
    NOT_OWED,
    REGIONS,
    SMALL_BLOCK,
    Block,
    Entry,
    History,
    Pool,
    Residue,
)
from crosscurrent.races.causes import Cause, RaceKind
from crosscurrent.races.clocks import Clock, Clocks
from crosscurrent.races.collector import Collector
from crosscurrent.races.findings import Finding, findings_of
from crosscurrent.races.regions import Overlap, overlap
from crosscurrent.trace.records import (
    HOST,
    NO_EVENT,
    Access,
    Alloc,
    DropEvent,
    Free,
    HostWait,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    Sink,
    TraceInfo,
    Unknown,
    UseStream,
    WaitEvent,
)

_PINNED: Final = MemoryKind.PINNED


class HostWaitCount(NamedTuple):
    """A call that made the host wait, and how often it did; ``record`` is the first time."""

    record: HostWait
    lanes: tuple[int, ...]
    """The lanes waited for; an event's is that on which it was recorded."""

    times: int
    idle: int = 0
    """How often there was nothing to wait for: the host knew all work to be done."""


class UnknownCount(NamedTuple):
    """Something that could not be understood, and how often it was met."""

    record: Unknown
    times: int


class Detector(Sink):
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
        self._blocks: dict[int, Block] = {}
        # By the lane that owns them.
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._pinned: dict[int, Pool] = {}
        self._found = Collector(self._clocks)
        self._host_waits: dict[tuple[Any, ...], HostWaitCount] = {}
        self._unknown: dict[tuple[Any, ...], UnknownCount] = {}
        self._feeders: dict[type, Callable[[Any], None]] = {
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
        if record.__class__ is Op:
            self.op(record)
        else:
            self._feeders[record.__class__](record)

    def op(self, record: Op) -> None:
        """Take in the next record, an ``Op``."""
        lane = record[1]
        clock = self._clocks.of(lane)
        if lane == HOST:
            for access in record[4]:
                self._host_access(record, access, clock)
            return
        epoch = clock[lane] = clock[lane] + 1
        blocks = self._blocks
        for access in record[4]:
            number, region, write, _, _, kept = access
            try:
                block = blocks[number]
            except KeyError:
                block = self._unannounced(number, record)
            history = block.mine if block.sole == lane else self._compare(block, record, access, clock)
            if kept:
                block.hold(lane)
            entry = (epoch, record, access)
            if not write:
                # As ``History.read`` does it, for the usual case.
                last = history.last_read
                if history.reads is ALONE and (not last[0] or last[2][1] is region):
                    history.last_read = entry
                elif history.read(entry):
                    self._forget(block)
            elif region[2] != block.nbytes:
                if history.write(entry):
                    self._forget(block)
            else:
                # The write covers the whole block, so it replaces all that is ordered before it.
                history.last_write = entry
                history.last_read = NEVER
                history.writes = history.reads = ALONE
                if block.sole == lane:
                    block.hazards = ()
                    block.own_write = block.own_read = NOT_OWED
                    if len(block.lanes) != 1:
                        block.lanes = {lane: history}

    def findings(self, info: TraceInfo) -> list[Finding]:
        """The races so far: one finding for each missing edge, in a stable order, with stable ids."""
        return findings_of(self._found.causes, info)

    @property
    def causes(self) -> list[Cause]:
        """The races so far as integers, by kind, lanes, ops and call sites, in order of appearance."""
        return self._found.causes

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
            kept += sum(history.num_entries() for history in block.lanes.values())
        for pool in (*self._small.values(), *self._large.values(), *self._pinned.values()):
            kept += 2 + sum(map(len, pool.residue.values()))
        return kept

    # Accesses.

    def _host_access(self, op: Op, access: Access, clock: Clock) -> None:
        """Test an access of the host; it leaves nothing behind, for nothing issued later can precede it."""
        block = self._blocks.get(access.block)
        if block is None:
            block = self._unannounced(access.block, op)
        if block.lanes or block.is_haunted:
            self._test(block, op, access, clock)
            for lane in [lane for lane in block.lanes if block.lanes[lane].done(clock[lane])]:
                del block.lanes[lane]
                block.sole = -1

    def _compare(self, block: Block, op: Op, access: Access, clock: Clock) -> History:
        """Test an access against what other lanes did; returns its own lane's history."""
        lane = op.lane
        if lane != HOST and not block.lanes and not block.is_haunted:
            block.mine = block.lanes[lane] = History()
            block.sole = lane
            return block.mine
        clean = self._test(block, op, access, clock)
        lanes = block.lanes
        host = self._clocks.host
        for other in [
            other for other, history in lanes.items() if other != lane and history.done(host[other])
        ]:
            del lanes[other]
        if access.write and lanes:
            self._replace(block, access, clock, lane)
        history = lanes.get(lane)
        if history is None:
            history = lanes[lane] = History()
        block.mine = history
        block.sole = lane if clean else -1
        return history

    def _test(self, block: Block, op: Op, access: Access, clock: Clock) -> bool:
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
                self._meet(block, kind, other, history.written(), known, op, access)
            if history.last_read[0] > known:
                clean = False
                if access.write:
                    self._meet(block, RaceKind.WRITE_AFTER_READ, other, history.seen(), known, op, access)
        for residue in block.hazards:
            if residue.lane != lane and residue.entry[0] > clock[residue.lane]:
                clean = False
                self._reuse(block, residue, op, access)
        if lane != block.owner and block.is_owed:
            for residue in block.owed():
                if residue.entry[0] > clock[residue.lane]:
                    clean = False
                    self._reuse(block, residue, op, access)
        return clean

    def _reuse(self, block: Block, residue: Residue, op: Op, access: Access) -> None:
        """Report an access to memory that is still used as what it was before, if one of the two writes."""
        _, entry, freed = residue
        # Judged at the first unordered access of each lane: its later ones tell nothing new.
        told = (freed.block, entry[1].index, entry[2].write, op.lane)
        if (access.write or entry[2].write) and told not in block.told:
            block.told |= {told}
            self._found.race(RaceKind.REUSE, residue.lane, entry, op, access, block.memory, freed=freed)

    def _meet(
        self,
        block: Block,
        kind: RaceKind,
        lane: int,
        entries: Iterable[Entry],
        known: int,
        op: Op,
        access: Access,
    ) -> None:
        """Report what of another lane's ``entries`` overlaps and is not ordered before an access."""
        for entry in entries:
            if entry[0] > known:
                answer = overlap(entry[2].region, access.region)
                if answer is not Overlap.NO:
                    certain = answer is Overlap.YES
                    self._found.race(kind, lane, entry, op, access, block.memory, certain=certain)

    # What may be forgotten.

    def _replace(self, block: Block, access: Access, clock: Clock, lane: int) -> None:
        """Forget what other lanes did before a write that covers it."""
        for other, history in block.lanes.items():
            if other != lane and len(history.writes) + len(history.reads) <= REGIONS:
                history.thin(access, clock[other])

    def _forget(self, block: Block) -> None:
        """Look for accesses to forget, in a block of which a lane uses many regions."""
        host = self._clocks.host
        for lane, history in block.lanes.items():
            history.compact(host[lane])

    # Memory.

    def _alloc(self, alloc: Alloc) -> None:
        index, number, owner, nbytes, memory, site, fresh = alloc
        self.alloc(index, number, owner, nbytes, memory, site, fresh)

    def _free(self, free: Free) -> None:
        index, number, site = free
        self.free(index, number, site)

    def alloc(
        self, index: int, number: int, owner: int, nbytes: int, memory: MemoryKind, site: int, fresh: bool
    ) -> None:
        """Take in the next record, an ``Alloc``."""
        # As ``pool_of`` says, without a call.
        if memory is _PINNED:
            owner = HOST
            pools = self._pinned
        else:
            pools = self._large if nbytes > SMALL_BLOCK else self._small
        pool = pools.get(owner)
        if pool is None:
            pool = pools[owner] = Pool()
            self._clocks.of(owner)  # clocks have room for all lanes of which there is a history
        if fresh and pool.spare and not pool.residue:
            block = self._blocks[number] = pool.spare.pop()
            block.nbytes = nbytes
            block.site = site
            block.own_write = pool.own_write
            block.own_read = pool.own_read
            return
        block = self._blocks[number] = Block(nbytes, memory, owner, pool, site)
        if not fresh:
            return
        block.own_write = pool.own_write
        block.own_read = pool.own_read
        if pool.residue:
            clock = self._clocks.of(owner)
            block.hazards = pool.hazards(self._clocks.host, clock)
            for lane, entry, _ in block.hazards:
                if entry[0] > clock[lane]:
                    return
        if owner != HOST:
            block.mine = block.lanes[owner] = History()
            block.sole = owner

    def free(self, index: int, number: int, site: int) -> None:
        """Take in the next record, a ``Free``."""
        block = self._blocks.pop(number, None)
        if block is None or not block.lanes:
            return
        pool = block.pool
        if pool is None:
            self._not_understood(_homeless(index, site))
            return
        done = self._clocks.host
        owner = block.owner
        if block.sole == owner and not (block.hazards or block.used or len(block.lanes) > 1):
            pool.take_own(block.mine, done[owner], number, site, block.site)
            if not block.told and len(pool.spare) < MOST_SPARE:
                block.mine.clear()
                pool.spare.append(block)
            return
        if block.used:
            for lane in block.used:
                done = list(map(max, done, self._clocks.of(lane)))
            self._found.freed(number, block.used)
        pool.take_back(block, number, site, done)

    def _use_stream(self, use: UseStream) -> None:
        block = self._blocks.get(use.block)
        if block is not None:
            block.hold(use.lane)

    def _unannounced(self, number: int, op: Op) -> Block:
        """A block whose allocation the trace does not tell."""
        block = self._blocks[number] = Block(site=op.site)
        return block

    # Synchronization.

    def _record_event(self, record: RecordEvent) -> None:
        self._found.settle()
        self._found.recorded(self._clocks.record(record))

    def _drop_event(self, drop: DropEvent) -> None:
        self._clocks.drop(drop.event)

    def _wait_event(self, wait: WaitEvent) -> None:
        self._found.settle()
        recording = self._clocks.wait(wait)
        if recording is not None:
            self._found.waited(wait.lane, recording.record, wait)
        elif wait.event == NO_EVENT:
            self._found.waited_for_nothing(wait)

    def _host_wait(self, wait: HostWait) -> None:
        self._found.settle()
        idle = int(self._clocks.all_done)
        recording = self._clocks.host_wait(wait)
        lanes = wait.lanes if recording is None else (recording.record.lane,)
        if lanes:
            self._found.waited(HOST, None if recording is None else recording.record, wait)
        key = (wait.kind, wait.op, wait.site, lanes)
        before = self._host_waits.get(key)
        self._host_waits[key] = (
            HostWaitCount(wait, lanes, 1, idle)
            if before is None
            else before._replace(times=before.times + 1, idle=before.idle + idle)
        )

    def _not_understood(self, unknown: Unknown) -> None:
        key = (unknown.op, unknown.site, unknown.reason)
        before = self._unknown.get(key)
        self._unknown[key] = (
            UnknownCount(unknown, 1) if before is None else before._replace(times=before.times + 1)
        )


def _homeless(index: int, site: int) -> Unknown:
    reason = "freed, but its allocation is not in the trace, so that its reuse cannot be judged"
    return Unknown(index, "free", site, reason)
