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
    # By place and lane: what was done there so far, in order.
    done: dict[int, dict[int, list[tuple[int, Access]]]] = {}
    found: set[tuple[int, int]] = set()
    for node, op in enumerate(order.ops):
        clock = order.clocks[node]
        for access in op.accesses:
            lanes = done.setdefault(place.get(access.block, access.block), {})
            for lane, earlier in lanes.items():
                if lane == order.lane[node]:
                    continue
                for other, theirs in reversed(earlier):
                    if order.position[other] < clock[lane]:
                        break  # ordered before this one, and so is all that its lane did earlier
                    if _touch(theirs, access):
                        found.add((other, node))
            lanes.setdefault(order.lane[node], []).append((node, access))
    return tuple(sorted(found))


def _touch(one: Access, other: Access) -> bool:
    if one.block != other.block:
        return True
    # An overlap that could not be excluded counts: one class too many is a schedule more, no error.
    return (one.write or other.write) and overlap(one.region, other.region) is not Overlap.NO
