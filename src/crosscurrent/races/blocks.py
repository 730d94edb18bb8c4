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
from typing import NamedTuple

from crosscurrent.races.causes import Freed
from crosscurrent.races.clocks import Clock
from crosscurrent.races.regions import Cover, contains
from crosscurrent.trace.records import HOST, Access, Free, MemoryKind, Op, Region

SMALL_BLOCK = 1 << 20
"""Largest block, in bytes, that PyTorch's caching allocator serves from its pool of small blocks."""

REGIONS = 32
"""Regions of a block remembered for a lane before the first look for some to forget."""

Entry = tuple[int, Op, Access]
"""An access and its epoch."""

NEVER: Entry = (0, Op(-1, HOST, "", -1, ()), Access(-1, Region(0, 1, 1), False))


NOTHING: dict[Region, Entry] = {}
"""The accesses of a history that has none."""


class History:
    """What one lane did to one block; see Note [What is remembered of a block]."""

    __slots__ = ("last_read", "last_write", "limit", "reads", "writes")

    def __init__(self) -> None:
        # Never changed in place while they are ``NOTHING``, which all histories share.
        self.writes = NOTHING
        self.reads = NOTHING
        self.last_write = NEVER
        self.last_read = NEVER
        self.limit = REGIONS

    def done(self, known: int) -> bool:
        """Whether all of it is over once the lane's epoch ``known`` is."""
        return self.last_write[0] <= known and self.last_read[0] <= known

    def thin(self, write: Access, known: int) -> None:
        """Forget the accesses up to epoch ``known`` that ``write``, ordered after them, covers."""
        cover = write.region
        for entries in (self.writes, self.reads):
            covered = [
                region for region, entry in entries.items() if entry[0] <= known and contains(cover, region)
            ]
            for region in covered:
                del entries[region]

    def compact(self, done: int) -> None:
        """Forget the accesses up to epoch ``done``, and those that the lane's own later ones cover."""
        entries = sorted(self.entries(), key=lambda entry: (entry[0], entry[2].write), reverse=True)
        written, touched = Cover(), Cover()
        for epoch, _, (_, region, write, *_) in entries:
            if epoch <= done or (written if write else touched).holds(region):
                del (self.writes if write else self.reads)[region]
                continue
            touched.add(region)
            if write:
                written.add(region)
        # Doubling makes the look cost little for each region added.
        self.limit = max(REGIONS, 2 * max(len(self.writes), len(self.reads)))

    def entries(self) -> Iterable[Entry]:
        yield from self.writes.values()
        yield from self.reads.values()


class Residue(NamedTuple):
    """An access that was not known to be done when its block was given back."""

    lane: int
    entry: Entry
    freed: Freed


Owed = tuple[Entry, Free, int]
"""An access of a pool's own lane that was not known to be done when its block was given back: the access, the
free, and the call site of the allocation."""

Key = tuple[bool] | tuple[bool, str, int, int]
"""What residue of a lane is kept apart: by whether it wrote, and by op, call site, and call site of the
allocation, where the pool's own lane may still run into it."""


class Pool:
    """Freed blocks that later allocations may be served from; see Note [Reuse]."""

    __slots__ = ("own_read", "own_write", "residue", "snapshot")

    def __init__(self) -> None:
        self.own_write: Owed | None = None
        self.own_read: Owed | None = None
        self.residue: dict[int, dict[Key, Residue]] = {}
        self.snapshot: tuple[Residue, ...] | None = ()

    def take_back(self, block: Block, free: Free, done: Clock) -> None:
        """Keep what still runs on a freed block once all up to ``done`` is over."""
        freed: Freed | None = None
        for lane, history in block.lanes.items():
            known = done[lane]
            if lane == block.owner:
                self._take_own(history, known, (free, block.site))
                continue
            if history.done(known):
                continue
            if freed is None:
                freed = freed_of(free, block.owner, block.site)
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

    def _take_own(self, history: History, known: int, freed: tuple[Free, int]) -> None:
        """Keep the last write and the last read of the pool's own lane."""
        entry = history.last_write
        if entry[0] > known and (self.own_write is None or self.own_write[0][0] < entry[0]):
            self.own_write = (entry, *freed)
        entry = history.last_read
        if entry[0] > known and (self.own_read is None or self.own_read[0][0] < entry[0]):
            self.own_read = (entry, *freed)

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

    def __init__(self, nbytes: int, memory: MemoryKind, owner: int, pool: Pool | None, site: int) -> None:
        self.nbytes = nbytes
        self.memory = memory
        self.owner = owner
        self.pool = pool
        self.site = site
        self.lanes: dict[int, History] = {}
        self.hazards: tuple[Residue, ...] = ()
        self.own_write: Owed | None = None
        self.own_read: Owed | None = None
        self.told: frozenset[tuple[int, int, bool, int]] = frozenset()
        self.sole = -1
        self.mine = _UNUSED
        self.used: set[int] | None = None

    @property
    def is_haunted(self) -> bool:
        """Whether the memory may still be in use by what was there before."""
        return bool(self.hazards) or self.own_write is not None or self.own_read is not None

    def owed(self) -> Iterable[Residue]:
        """What the pool's own lane may still do to the memory."""
        for owed in (self.own_write, self.own_read):
            if owed is not None:
                entry, free, site = owed
                yield Residue(self.owner, entry, freed_of(free, self.owner, site))

    def hold(self, lane: int) -> None:
        """The allocator will hold the block back for ``lane``; for the pool's own lane it does not."""
        if lane != self.owner:
            if self.used is None:
                self.used = set()
            self.used.add(lane)


def freed_of(free: Free, owner: int, site: int) -> Freed:
    """The block that ``free`` gave back to the pool of lane ``owner``; ``site`` allocated it."""
    return Freed(free.block, owner, site, free.site, free.index)


_UNUSED = History()
