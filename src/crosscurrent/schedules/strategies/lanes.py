"""Latest and earliest per lane: one lane as slow, or as fast, as the order lets it be.

The two oldest ways to find a missing wait by hand: make one stream sleep, or let it overtake
everybody. All other lanes keep to program order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from crosscurrent.schedules.order import Frontier, Linear, PartialOrder
from crosscurrent.schedules.strategies.protocol import Proposal, Space


def latest(order: PartialOrder, lane: int) -> Linear:
    """``lane`` (its number in the trace) runs only when nothing else can."""
    return _by_lane(order, lane, eager=False)


def earliest(order: PartialOrder, lane: int) -> Linear:
    """``lane`` (its number in the trace) runs whenever it can."""
    return _by_lane(order, lane, eager=True)


def _by_lane(order: PartialOrder, lane: int, *, eager: bool) -> Linear:
    chosen = order.lanes.index(lane)
    frontier = Frontier(order)
    linear = []
    while ready := frontier.ready:
        preferred = [node for node in ready if (order.lane[node] == chosen) == eager]
        node = preferred[0] if preferred else ready[0]
        frontier.run(node)
        linear.append(node)
    return tuple(linear)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatestAndEarliest:
    """Every lane in turn as late and as early as it can be."""

    exhausts: bool = False

    def proposals(self, space: Space) -> Iterator[Proposal]:
        for lane in sorted(space.order.lanes):
            yield Proposal(latest(space.order, lane), f"latest.{lane}")
            yield Proposal(earliest(space.order, lane), f"earliest.{lane}")
