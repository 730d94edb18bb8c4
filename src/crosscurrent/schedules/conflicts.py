"""Which pairs of operations can change the values when they run the other way round.

Two operations conflict when they share a byte, at least one of them writes it, and the order leaves
open which comes first. Where a block was handed the memory of another, anything done to the old one
conflicts with anything done to the new one: the first access takes the memory over.
"""

from __future__ import annotations

from collections.abc import Mapping

from crosscurrent.races.regions import Overlap, overlap
from crosscurrent.schedules.order import PartialOrder
from crosscurrent.trace.records import Access

Conflicts = tuple[tuple[int, int], ...]
"""Pairs of nodes, the earlier one in program order first; sorted."""


def conflicts(order: PartialOrder, place: Mapping[int, int] | None = None) -> Conflicts:
    """The open conflicts of an order. ``place`` says which place a block lies at (its own, if absent)."""
    place = place or {}
    by_place: dict[int, list[tuple[int, Access]]] = {}
    for node, op in enumerate(order.ops):
        for access in op.accesses:
            by_place.setdefault(place.get(access.block, access.block), []).append((node, access))
    found: set[tuple[int, int]] = set()
    for accesses in by_place.values():
        for i, (first, one) in enumerate(accesses):
            for second, other in accesses[i + 1 :]:
                if (
                    order.lane[first] != order.lane[second]
                    and (first, second) not in found
                    and not order.before(first, second)
                    and _touch(one, other)
                ):
                    found.add((first, second))
    return tuple(sorted(found))


def _touch(one: Access, other: Access) -> bool:
    if one.block != other.block:
        return True
    # An overlap that could not be excluded counts: one class too many is a schedule more, no error.
    return (one.write or other.write) and overlap(one.region, other.region) is not Overlap.NO
