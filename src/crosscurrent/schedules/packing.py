"""Memory for large programs: blocks that can never be in use at the same time share a place.

A replay gives every block memory of its own, so that what a race leaves behind can be looked at, and only a
schedule's choice makes blocks share. For a program that allocates gigabytes in turn that is too much. Two
blocks can share in every schedule alike if all that is done to the one is ordered before all that is done to
the other; the later one is poisoned at its first use, as any block that takes over memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import le

from crosscurrent.schedules.order import PartialOrder, bounds
from crosscurrent.schedules.reuse import Block, Reuse, blocks_of
from crosscurrent.trace.records import Alloc, Free, Record

_CANDIDATES = 32
"""Freed blocks looked at for each allocation, the latest first: what ends on a lane is soon done there."""


def pack(records: Sequence[Record], order: PartialOrder, besides: Collection[int]) -> tuple[Reuse, ...]:
    """Which blocks can take the place of which, whatever the schedule; none of ``besides`` takes part."""
    first, last = bounds(order)
    blocks = blocks_of(records)
    free: dict[int, list[Block]] = {}
    chosen: list[Reuse] = []
    for record in records:
        if not isinstance(record, Alloc | Free) or record.block in besides or record.block not in first:
            continue
        block = blocks[record.block]
        same_size = free.setdefault(block.nbytes.bit_length(), [])
        if isinstance(record, Free):
            same_size.append(block)
        elif block.fresh:
            for old in reversed(same_size[-_CANDIDATES:]):
                if old.nbytes >= block.nbytes and all(map(le, last[old.number], first[block.number])):
                    same_size.remove(old)
                    chosen.append(Reuse(block.number, old.number))
                    break
    return tuple(chosen)
