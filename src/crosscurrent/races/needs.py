"""Builds the skeleton of a trace: which of its accesses need an edge at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from crosscurrent.races.blocks import pool_of
from crosscurrent.races.causes import Freed, RaceKind
from crosscurrent.races.regions import Overlap, overlap
from crosscurrent.races.skeleton import Conflict, Edge, GivenBack, Mark, Need, Pool, Reuse, Skeleton
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

_Entry = tuple[int, Op, Access]


@dataclass(slots=True, eq=False)
class _Block:
    pool: Pool | None
    memory: MemoryKind
    nbytes: int
    site: int
    number: int = 0
    """How many blocks its pool had been given back before it was allocated."""

    own: dict[bool, tuple[int, Op, Access, Freed]] = field(default_factory=dict)
    uses: dict[tuple[int, bool], dict[Region, _Entry]] = field(default_factory=dict)
    """The last accesses by lane and whether they wrote, then by region."""

    held: set[int] = field(default_factory=set)


def skeleton_of(records: Sequence[Record]) -> Skeleton:
    """The edges of a trace, and what needs them; in one pass."""
    builder = _Builder(1 + max(map(_lane, records), default=0))
    for record in records:
        builder.feed(record)
    return builder.skeleton


def _lane(record: Record) -> int:
    if isinstance(record, HostWait):
        return max(record.lanes, default=HOST)
    return record.lane if isinstance(record, Op | Alloc | UseStream | RecordEvent | WaitEvent) else HOST


class _Builder:
    def __init__(self, num_lanes: int) -> None:
        self.skeleton = Skeleton(num_lanes)
        self._epochs = [0] * num_lanes
        self._blocks: dict[int, _Block] = {}
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._needed: dict[tuple[int, int], int] = {}

    def feed(self, record: Record) -> None:
        if isinstance(record, Op):
            self._op(record)
        elif isinstance(record, Alloc):
            self._alloc(record)
        elif isinstance(record, Free):
            self._free(record)
        elif isinstance(record, UseStream):
            if record.block in self._blocks:
                self._hold(self._blocks[record.block], record.lane)
        elif isinstance(record, RecordEvent):
            self.skeleton.add(Mark(record.lane, self._epochs[record.lane], record.event))
        elif isinstance(record, WaitEvent):
            self._edge(record.lane, record.event, (), record)
        elif isinstance(record, HostWait):
            self._edge(HOST, record.event, record.lanes, record)

    def _edge(
        self, lane: int, event: int | None, lanes: tuple[int, ...], record: WaitEvent | HostWait
    ) -> None:
        work = tuple((other, self._epochs[other]) for other in lanes)
        self.skeleton.add(Edge(lane, event, work, record, len(self.skeleton.edges)))

    def _op(self, op: Op) -> None:
        lane = op.lane
        if lane != HOST:
            self._epochs[lane] += 1
        for access in op.accesses:
            block = self._blocks.get(access.block)
            if block is None:
                block = self._blocks[access.block] = _Block(None, MemoryKind.DEVICE, -1, op.site)
            self._conflicts(block, op, access)
            self._reuses(block, op, access)
            if access.kept:
                self._hold(block, lane)
            if lane != HOST:
                if access.write and access.region.run == block.nbytes:
                    self._replace(block, lane)
                entry = (self._epochs[lane], op, access)
                block.uses.setdefault((lane, access.write), {})[access.region] = entry

    def _conflicts(self, block: _Block, op: Op, access: Access) -> None:
        """The last conflicting access of each other lane, if it is ordered and nothing implies it yet."""
        for (lane, wrote), entries in block.uses.items():
            if lane == op.lane or not (wrote or access.write):
                continue
            known = self.skeleton.recorded.known(op.lane, lane)
            floor = self._needed.get((op.lane, lane), 0)
            last: _Entry | None = None
            for entry in entries.values():
                if (
                    floor < entry[0] <= known
                    and (last is None or entry[0] > last[0])
                    and overlap(entry[2].region, access.region) is not Overlap.NO
                ):
                    last = entry
            if last is not None:
                kind = _kind(wrote, access.write)
                conflict = Conflict(kind, lane, last[1], last[2], op, access, block.memory)
                self._need(op.lane, lane, last[0], conflict)

    def _reuses(self, block: _Block, op: Op, access: Access) -> None:
        pool = block.pool
        if pool is None:
            return
        lane = op.lane
        if lane != pool.owner:
            for wrote, (epoch, first, first_access, freed) in block.own.items():
                met = self.skeleton.recorded.known(lane, pool.owner) >= epoch
                if met and (wrote or access.write) and epoch > self._needed.get((lane, pool.owner), 0):
                    conflict = Conflict(
                        RaceKind.REUSE, pool.owner, first, first_access, op, access, block.memory, freed
                    )
                    self._need(lane, pool.owner, epoch, conflict)
        told = max(pool.told.get((lane, True), 0), 0 if access.write else pool.told.get((lane, False), 0))
        if block.number > told:
            reuse = Reuse(lane, pool, block.number, op, access)
            racing = frozenset(self.skeleton.recorded.unmet(reuse))
            self.skeleton.add(replace(reuse, excepted=racing))
            if not racing:
                pool.told[lane, access.write] = block.number

    def _need(self, lane: int, other: int, epoch: int, conflict: Conflict) -> None:
        self._needed[lane, other] = epoch
        self.skeleton.add(Need(lane, other, epoch, conflict))

    def _replace(self, block: _Block, lane: int) -> None:
        """A write covers the whole block: what is ordered before it needs no mention any more."""
        recorded = self.skeleton.recorded
        block.uses = {
            (other, wrote): entries
            for (other, wrote), entries in block.uses.items()
            if other != lane and max(entry[0] for entry in entries.values()) > recorded.known(lane, other)
        }

    def _alloc(self, alloc: Alloc) -> None:
        key = pool_of(alloc)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(alloc.memory, key[0])
        block = self._blocks[alloc.block] = _Block(pool, alloc.memory, alloc.nbytes, alloc.site)
        if alloc.fresh:
            block.number = pool.num_given_back
            block.own = dict(pool.own)

    def _free(self, free: Free) -> None:
        block = self._blocks.pop(free.block, None)
        if block is None or block.pool is None:
            return
        pool = block.pool
        freed = Freed(free.block, pool.owner, block.site, free.site)
        left = []
        for (lane, wrote), entries in block.uses.items():
            epoch, op, access = max(entries.values(), key=lambda entry: entry[0])
            # The pool's own lane is nothing that the allocator holds a block back for, but a lane that it
            # does hold it back for may have waited for the pool's own.
            if lane != pool.owner or block.held:
                left.append((lane, wrote, epoch))
                pool.uses[lane, wrote, epoch] = (op, access, freed)
            elif wrote not in pool.own or pool.own[wrote][0] < epoch:
                pool.own[wrote] = (epoch, op, access, freed)
        if left:
            pool.num_given_back += 1
            held = tuple((lane, self._epochs[lane]) for lane in sorted(block.held))
            self.skeleton.add(GivenBack(pool, pool.num_given_back, tuple(left), held))

    def _hold(self, block: _Block, lane: int) -> None:
        if block.pool is not None and lane != block.pool.owner:
            block.held.add(lane)


def _kind(wrote: bool, writes: bool) -> RaceKind:
    if not writes:
        return RaceKind.READ_AFTER_WRITE
    return RaceKind.WRITE_AFTER_WRITE if wrote else RaceKind.WRITE_AFTER_READ
