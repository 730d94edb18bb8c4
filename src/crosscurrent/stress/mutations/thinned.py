"""A trace without what cannot matter to any mutant of its edges: same verdict, a tenth of the records.

Most memory of a program is used by one lane alone, from its allocation to its end. Such a block is in no race
but by reuse: what another lane left in freed memory meets the block's first access, or what the block's own
lane left in it meets a block that another lane uses. Between two records that order lanes, or that touch
memory which lanes share, nothing changes for such blocks but their number. So of all that a pool hands out in
such a stretch, the one that is accessed first and the one that is written first stand for the rest; of all
that it is given back, the one that was read last and the one that was written last. Their other accesses go.

Whether there is a race stays the same for every change of sync records; how often, and its first example, may
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crosscurrent.races.blocks import pool_of
from crosscurrent.trace.records import Access, Alloc, DropEvent, Free, MemoryKind, Op, Record, UseStream

_NEVER = 1 << 62
_Pool = tuple[int, bool]


@dataclass(slots=True)
class _Private:
    """A block that only the lane of its pool uses."""

    pool: _Pool
    made_in: int
    freed_in: int = -1
    first: int = _NEVER
    first_write: int = _NEVER
    last_read: int = -1
    last_write: int = -1

    @property
    def ends(self) -> set[int]:
        """The accesses that can matter, as positions in the trace."""
        return {self.first, self.first_write, self.last_read, self.last_write}


def thinned(records: Sequence[Record]) -> list[Record]:
    """The records that can matter; those kept keep their numbers."""
    private = _private_blocks(records)
    blocks = _follow(records, private)
    keep = _representatives(blocks)
    ends = {(block, position) for block in keep for position in blocks[block].ends}
    kept: list[Record] = []
    for position, record in enumerate(records):
        if isinstance(record, Op):
            accesses = tuple(
                access
                for access in record.accesses
                if access.block not in private or (access.block, position) in ends
            )
            if accesses:
                kept.append(record._replace(accesses=accesses))
        elif isinstance(record, Alloc | Free):
            if record.block not in private or record.block in keep:
                kept.append(record)
        elif not isinstance(record, DropEvent):
            kept.append(record)
    return kept


def _private_blocks(records: Sequence[Record]) -> set[int]:
    owners = {r.block: r.lane for r in records if isinstance(r, Alloc) and r.memory is MemoryKind.DEVICE}
    for record in records:
        if isinstance(record, Op):
            for access in record.accesses:
                if owners.get(access.block, record.lane) != record.lane:
                    del owners[access.block]
        elif isinstance(record, UseStream):
            owners.pop(record.block, None)
    return set(owners)


def _follow(records: Sequence[Record], private: set[int]) -> dict[int, _Private]:
    """What happens to the private blocks, and in which stretch."""
    blocks: dict[int, _Private] = {}
    stretch = 0
    for position, record in enumerate(records):
        if isinstance(record, Op):
            shared = False
            for access in record.accesses:
                if access.block in private:
                    _touch(blocks[access.block], access, position)
                else:
                    shared = True
            stretch += shared
        elif isinstance(record, Alloc) and record.block in private:
            blocks[record.block] = _Private(pool_of(record), stretch)
        elif isinstance(record, Free) and record.block in private:
            blocks[record.block].freed_in = stretch
        elif not isinstance(record, DropEvent):
            stretch += 1
    return blocks


def _touch(block: _Private, access: Access, position: int) -> None:
    block.first = min(block.first, position)
    if access.write:
        block.first_write = min(block.first_write, position)
        block.last_write = position
    else:
        block.last_read = position


def _representatives(blocks: dict[int, _Private]) -> set[int]:
    first: dict[tuple[str, _Pool, int], tuple[int, int]] = {}
    last: dict[tuple[str, _Pool, int], tuple[int, int]] = {}
    for number, block in blocks.items():
        made, freed = (block.pool, block.made_in), (block.pool, block.freed_in)
        for what, when in (("access", block.first), ("write", block.first_write)):
            key = what, *made
            first[key] = min(first.get(key, (_NEVER, number)), (when, number))
        if block.freed_in >= 0:
            for what, when in (("read", block.last_read), ("write", block.last_write)):
                key = what, *freed
                last[key] = max(last.get(key, (-1, number)), (when, number))
    return {number for _, number in (*first.values(), *last.values())}
