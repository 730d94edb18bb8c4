"""Whose memory a new block is handed: the allocator's part of a schedule.

The caching allocator serves a block from what was given back to the same pool: the same device, the
same owner stream, small (up to 1 MiB) or large. It splits freed blocks, and merges freed
neighbours, so that the old block and the new one may meet at any multiple of its granularity: that is
the ``shift``. Pinned memory comes from one pool of the host.

Each block takes over from at most one other. An uncovered access to the old block and the first access
to the new one race whatever became of the rest of memory, so pairs are all that a search needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import le
from typing import NamedTuple

from crosscurrent.races.blocks import pool_of
from crosscurrent.schedules.order import PartialOrder, bounds
from crosscurrent.trace.records import Alloc, Free, Op, Record, UseStream

GRANULARITY = 512
"""Bytes to which the caching allocator rounds (``kMinBlockSize``)."""


class Reuse(NamedTuple):
    """``block`` starts ``shift`` bytes after the place where ``old`` started."""

    block: int
    old: int
    shift: int = 0


class Block(NamedTuple):
    """What a trace says about one block: its size, its pool, and when it was there (record numbers)."""

    number: int
    nbytes: int
    pool: tuple[int, bool]
    fresh: bool
    start: int
    stop: int | None


def blocks_of(records: Iterable[Record]) -> dict[int, Block]:
    """The blocks of a trace, by number."""
    blocks: dict[int, Block] = {}
    for record in records:
        if isinstance(record, Alloc):
            blocks[record.block] = Block(
                record.block, record.nbytes, pool_of(record), record.fresh, record.index, None
            )
        elif isinstance(record, Free) and record.block in blocks:
            blocks[record.block] = blocks[record.block]._replace(stop=record.index)
    return blocks


def candidates(records: Sequence[Record], order: PartialOrder) -> Iterator[Reuse]:
    """Every pair of blocks of which the second may be handed the memory of the first, with the shifts
    at which they can meet: start on start, and those at which accesses of both start at one place.

    A pair is left out if all that is done to the old block comes before all that is done to the new one:
    then no schedule can tell who has whose memory.
    """
    blocks = blocks_of(records)
    first, last = bounds(order)
    starts: dict[int, set[int]] = {}
    for record in records:
        if isinstance(record, Op):
            for access in record.accesses:
                starts.setdefault(access.block, set()).add(access.region.start // GRANULARITY)
    for new in blocks.values():
        if not new.fresh or new.number not in starts:
            continue
        for old in blocks.values():
            if old.stop is None or old.stop > new.start or old.pool != new.pool or old.number not in starts:
                continue
            if all(map(le, last[old.number], first[new.number])):
                continue
            shifts = {(a - b) * GRANULARITY for a in starts[old.number] for b in starts[new.number]}
            for shift in sorted(shifts | {0}, key=lambda shift: (abs(shift), shift)):
                if -new.nbytes < shift < old.nbytes:
                    yield Reuse(new.number, old.number, shift)


def best_fit(records: Sequence[Record]) -> tuple[Reuse, ...]:
    """What the caching allocator would most likely do: the smallest freed block of the pool that is big
    enough, the oldest of equals. A block that is still held for another lane is not handed out."""
    blocks = blocks_of(records)
    held = {record.block for record in records if isinstance(record, UseStream)}
    held |= {a.block for record in records if isinstance(record, Op) for a in record.accesses if a.kept}
    free: list[Block] = []
    chosen = []
    for record in records:
        if isinstance(record, Free) and record.block in blocks and record.block not in held:
            free.append(blocks[record.block])
        elif isinstance(record, Alloc) and record.fresh:
            fitting = [b for b in free if b.pool == blocks[record.block].pool and b.nbytes >= record.nbytes]
            if fitting:
                taken = min(fitting, key=lambda block: block.nbytes)
                free.remove(taken)
                chosen.append(Reuse(record.block, taken.number))
    return tuple(chosen)


def check(records: Sequence[Record], reuse: Sequence[Reuse]) -> None:
    """Raise ``ValueError`` if the allocator could not have made these choices."""
    blocks = blocks_of(records)
    for block, old, shift in reuse:
        if block not in blocks or old not in blocks:
            raise ValueError(f"block {block if block not in blocks else old} is not of this trace")
        new, gone = blocks[block], blocks[old]
        if not new.fresh or gone.stop is None or gone.stop > new.start or new.pool != gone.pool:
            raise ValueError(f"block {block} cannot have been handed the memory of block {old}")
        if shift % GRANULARITY or not -new.nbytes < shift < max(gone.nbytes, 1):
            raise ValueError(f"blocks {old} and {block} cannot meet at a shift of {shift} bytes")
    if len({block for block, _, _ in reuse}) != len(reuse):
        raise ValueError("a block can be handed the memory of one other block only")


def places(records: Sequence[Record], reuse: Sequence[Reuse]) -> dict[int, tuple[int, int]]:
    """Where every block lies: the block that founded its place, and its distance from that one's start.

    Raises ``ValueError`` if two blocks would be at one place at the same time.
    """
    blocks = blocks_of(records)
    where: dict[int, tuple[int, int]] = {index: (index, 0) for index in blocks}
    tenants: dict[int, list[Block]] = {}
    for block, old, shift in sorted(reuse, key=lambda choice: blocks[choice.block].start):
        root, distance = where[old]
        where[block] = (root, distance + shift)
        inside = tenants.setdefault(root, [blocks[root]])
        for other in inside:
            apart = where[other.number][1] - distance - shift
            if -other.nbytes < apart < blocks[block].nbytes and (
                other.stop is None or other.stop > blocks[block].start
            ):
                raise ValueError(f"block {block} would lie on block {other.number}, which is in use")
        inside.append(blocks[block])
    return where
