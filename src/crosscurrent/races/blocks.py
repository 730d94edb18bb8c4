"""What is remembered of live blocks and of freed memory.

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
    edge, that from the pool's lane; so only the last of each lane is kept of it. What the pool's own lane
    did is always of that kind, and nearly all that there is: it is kept as an ``Owed`` for writes and one
    for reads, made into a residue only when it turns out to race.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from crosscurrent.races.causes import Freed
from crosscurrent.races.clocks import Clock
from crosscurrent.races.regions import Cover, contains
from crosscurrent.trace.records import HOST, Access, Alloc, MemoryKind, Op, Region

MOST_SPARE: Final = 256
"""Blocks that a pool keeps to use again."""

SMALL_BLOCK: Final = 1 << 20
"""Largest block, in bytes, that PyTorch's caching allocator serves from its pool of small blocks
(``kSmallSize``)."""

REGIONS = 32
"""Regions of a block remembered for a lane before the first look for some to forget."""

Entry = tuple[int, Op, Access]
"""An access and its epoch."""

NEVER: Final[Entry] = (0, Op(-1, HOST, "", -1, ()), Access(-1, Region(0, 1, 1), False))


ALONE: Final[dict[Region, Entry]] = {}
"""The table of a history of which the last access, if there is one, is all that is remembered. Shared by
all of them, and told by identity: most blocks are only ever seen whole, and need no table."""


class History:
    """What one lane did to one block; see Note [What is remembered of a block]."""

    __slots__ = ("last_read", "last_write", "limit", "reads", "writes")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        # The last write and read of each region; never changed in place while they are ``ALONE``.
        self.writes = self.reads = ALONE
        self.last_write = self.last_read = NEVER
        self.limit = REGIONS

    def write(self, entry: Entry) -> bool:
        """Remember a write; whether there are so many regions that some might be forgotten."""
        last, self.last_write = self.last_write, entry
        region = entry[2][1]
        entries = self.writes
        if entries is ALONE:
            if not last[0] or last[2][1] == region:
                return False
            entries = self.writes = {last[2][1]: last}
        entries[region] = entry
        return len(entries) > self.limit

    def read(self, entry: Entry) -> bool:
        """The same for a read."""
        last, self.last_read = self.last_read, entry
        region = entry[2][1]
        entries = self.reads
        if entries is ALONE:
            if not last[0] or last[2][1] == region:
                return False
            entries = self.reads = {last[2][1]: last}
        entries[region] = entry
        return len(entries) > self.limit

    def num_entries(self) -> int:
        """How many accesses are remembered."""
        return sum(1 for _ in self.entries())

    def written(self) -> Iterable[Entry]:
        """The writes that are remembered."""
        if self.writes is not ALONE:
            return self.writes.values()
        return () if not self.last_write[0] else (self.last_write,)

    def seen(self) -> Iterable[Entry]:
        """The reads that are remembered."""
        if self.reads is not ALONE:
            return self.reads.values()
        return () if not self.last_read[0] else (self.last_read,)

    def done(self, known: int) -> bool:
        """Whether all of it is over once the lane's epoch ``known`` is."""
        return self.last_write[0] <= known and self.last_read[0] <= known

    def thin(self, write: Access, known: int) -> None:
        """Forget the accesses up to epoch ``known`` that ``write``, ordered after them, covers."""
        cover = write.region
        # The last ones are kept where they are: what they say of all that came before them stays true.
        self.writes = _left(self.writes, self.written(), cover, known)
        self.reads = _left(self.reads, self.seen(), cover, known)

    def compact(self, done: int) -> None:
        """Forget the accesses up to epoch ``done``, and those that the lane's own later ones cover."""
        writes = {entry[2].region: entry for entry in self.written()}
        reads = {entry[2].region: entry for entry in self.seen()}
        entries = sorted(self.entries(), key=lambda entry: (entry[0], entry[2].write), reverse=True)
        written, touched = Cover(), Cover()
        for epoch, _, (_, region, write, *_) in entries:
            if epoch <= done or (written if write else touched).holds(region):
                del (writes if write else reads)[region]
                continue
            touched.add(region)
            if write:
                written.add(region)
        self.writes, self.reads = writes, reads
        # Doubling makes the look cost little for each region added.
        self.limit = max(REGIONS, 2 * max(len(writes), len(reads)))

    def entries(self) -> Iterable[Entry]:
        """All accesses that are remembered."""
        yield from self.written()
        yield from self.seen()


def _left(
    table: dict[Region, Entry], entries: Iterable[Entry], cover: Region, known: int
) -> dict[Region, Entry]:
    """``table`` without those of its entries up to epoch ``known`` that ``cover`` holds."""
    covered = {entry[2].region for entry in entries if entry[0] <= known and contains(cover, entry[2].region)}
    if not covered:
        return table
    return {region: entry for region, entry in table.items() if region not in covered}


class Residue(NamedTuple):
    """An access that was not known to be done when its block was given back."""

    lane: int
    entry: Entry
    freed: Freed


Owed = tuple[Entry, int, int, int]
"""An access of a pool's own lane that was not known to be done when its block was given back: the access, the
block, and the call sites of the free and of the allocation."""

NOT_OWED: Final[Owed] = (NEVER, -1, -1, -1)

Key = tuple[bool] | tuple[bool, str, int, int]
"""What residue of a lane is kept apart: by whether it wrote, and by op, call site, and call site of the
allocation, where the pool's own lane may still run into it."""


def pool_of(alloc: Alloc) -> tuple[int, bool]:
    """The allocator's pool that a block comes from, and goes back to: its lane, and whether it is for small
    blocks. There is one for all pinned memory, which belongs to no stream, and is the host's when it is
    handed out."""
    if alloc.memory is MemoryKind.PINNED:
        return HOST, False
    return alloc.lane, alloc.nbytes <= SMALL_BLOCK


class Pool:
    """Freed blocks that later allocations may be served from; see Note [Reuse]."""

    __slots__ = ("own_read", "own_write", "residue", "snapshot", "spare")

    def __init__(self) -> None:
        self.spare: list[Block] = []
        """Freed blocks that only their own lane used, cleared, to be used again: most blocks live for a few
        ops, and making one takes longer than all that is done with it."""
        self.own_write: Owed = NOT_OWED
        self.own_read: Owed = NOT_OWED
        self.residue: dict[int, dict[Key, Residue]] = {}
        self.snapshot: tuple[Residue, ...] | None = ()

    def take_back(self, block: Block, number: int, site: int, done: Clock) -> None:
        """Keep what still runs on a freed block once all up to ``done`` is over."""
        freed: Freed | None = None
        for lane, history in block.lanes.items():
            known = done[lane]
            if lane == block.owner:
                self.take_own(history, known, number, site, block.site)
                continue
            if history.done(known):
                continue
            if freed is None:
                freed = Freed(number, block.owner, block.site, site)
            for entry in history.entries():
                if entry[0] > known:
                    _, op, (_, _, write, *_) = entry
                    key: Key = (write, op.name, op.site, block.site)
                    group = self.residue.get(lane)
                    if group is None:
                        group = self.residue[lane] = {}
                    before = group.get(key)
                    if before is None or before.entry[0] < entry[0]:
                        group[key] = Residue(lane, entry, freed)
            self.snapshot = None

    def take_own(self, history: History, known: int, number: int, site: int, allocated: int) -> None:
        """Keep the last write and the last read of the pool's own lane."""
        entry = history.last_write
        epoch = entry[0]
        if epoch > known and self.own_write[0][0] < epoch:
            self.own_write = (entry, number, site, allocated)
        entry = history.last_read
        epoch = entry[0]
        if epoch > known and self.own_read[0][0] < epoch:
            self.own_read = (entry, number, site, allocated)

    def hazards(self, host: Clock, owner: Clock) -> tuple[Residue, ...]:
        """What other lanes may still do to memory that is handed out now."""
        for lane in list(self.residue):
            group = self.residue[lane]
            last = 0
            for _, entry, _ in group.values():
                if entry[0] > last:
                    last = entry[0]
            if last <= host[lane]:
                del self.residue[lane]
                self.snapshot = None
            elif len(group) > 2 and last <= owner[lane]:
                # All ordered before the pool's own lane: the last write and the last read stand for all.
                stand: dict[Key, Residue] = {}
                for item in group.values():
                    key = (item.entry[2].write,)
                    if key not in stand or stand[key].entry[0] < item.entry[0]:
                        stand[key] = item
                self.residue[lane] = stand
                self.snapshot = None
        if self.snapshot is None:
            self.snapshot = tuple(item for group in self.residue.values() for item in group.values())
        return self.snapshot


class Block:
    """One live block."""

    __slots__ = (
        "hazards",
        "lanes",
        "memory",
        "mine",
        "nbytes",
        "own_read",
        "own_write",
        "owner",
        "pool",
        "site",
        "sole",
        "told",
        "used",
    )

    def __init__(
        self,
        nbytes: int = -1,
        memory: MemoryKind = MemoryKind.DEVICE,
        owner: int = -1,
        pool: Pool | None = None,
        site: int = -1,
    ) -> None:
        # Without arguments it can be unpickled where it is compiled; they are those of an unknown allocation.
        self.nbytes = nbytes
        self.memory = memory
        self.owner = owner
        self.pool = pool
        self.site = site
        self.lanes: dict[int, History] = {}
        self.hazards: tuple[Residue, ...] = ()
        self.own_write: Owed = NOT_OWED
        self.own_read: Owed = NOT_OWED
        self.told: frozenset[tuple[int, int, bool, int]] = frozenset()
        self.sole = -1
        self.mine = _UNUSED
        self.used: set[int] | None = None

    @property
    def is_haunted(self) -> bool:
        """Whether the memory may still be in use by what was there before."""
        return bool(self.hazards) or self.is_owed

    @property
    def is_owed(self) -> bool:
        """Whether the pool's own lane may still be at it."""
        return self.own_write[0][0] > 0 or self.own_read[0][0] > 0

    def owed(self) -> Iterable[Residue]:
        """What the pool's own lane may still do to the memory."""
        for owed in (self.own_write, self.own_read):
            entry, number, site, allocated = owed
            if entry[0]:
                yield Residue(self.owner, entry, Freed(number, self.owner, allocated, site))

    def hold(self, lane: int) -> None:
        """The allocator will hold the block back for ``lane``; for the pool's own lane it does not."""
        if lane != self.owner:
            if self.used is None:
                self.used = set()
            self.used.add(lane)


_UNUSED = History()
"""Stands in for ``mine`` until ``sole`` is a lane: nothing is ever written to it."""
