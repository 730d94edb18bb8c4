"""Exhaustive with partial-order reduction: one schedule of every class of schedules that agree.

Two schedules that run every conflicting pair in the same order give the same values (Mazurkiewicz).
Explorers of running threads (sleep sets, persistent sets, source sets) have to discover conflicts
as they go and cut off what turns out to be known. Here the trace is fixed, so that the pairs that
conflict and are left open are known beforehand, and the classes are the ways to decide them all
without a cycle. Deciding one pair at a time, in a partial order that is kept closed, never fails:
a pair that is still open can be decided either way, and one that is not is decided already. So
each class comes up exactly once, and no work is thrown away.

The order is kept as bit sets: for each operation, what is above it and what is below.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crosscurrent.schedules.order import Linear, PartialOrder
from crosscurrent.schedules.strategies.protocol import Proposal, Space


class _Closed:
    """A partial order, closed under what follows from it, to which edges can be added."""

    def __init__(self, above: list[int], below: list[int]) -> None:
        self.above, self.below = above, below

    @classmethod
    def of(cls, order: PartialOrder) -> _Closed:
        below = [0] * len(order)
        above = [0] * len(order)
        for node in order.program:
            for other in order.predecessors[node]:
                below[node] |= below[other] | (1 << other)
        for node in reversed(order.program):
            for other in order.successors[node]:
                above[node] |= above[other] | (1 << other)
        return cls(above, below)

    def before(self, first: int, second: int) -> bool:
        return bool(self.above[first] >> second & 1)

    def decide(self, first: int, second: int) -> _Closed:
        """The order in which, too, ``first`` runs before ``second``."""
        up = self.above[second] | (1 << second)
        down = self.below[first] | (1 << first)
        above, below = list(self.above), list(self.below)
        for node in _bits(down):
            above[node] |= up
        for node in _bits(up):
            below[node] |= down
        return _Closed(above, below)

    def linear(self, chains: Sequence[Sequence[int]]) -> Linear:
        """The schedule of this order that is closest to program order: always the first that can run."""
        heads = sorted((chain[0], lane, 0) for lane, chain in enumerate(chains) if chain)
        done = 0
        linear = []
        while heads:
            # One of them can run: a closed order has no cycle.
            place = next(i for i, (node, _, _) in enumerate(heads) if not self.below[node] & ~done)
            node, lane, position = heads.pop(place)
            linear.append(node)
            done |= 1 << node
            if position + 1 < len(chains[lane]):
                insort(heads, (chains[lane][position + 1], lane, position + 1))
        return tuple(linear)


def _bits(word: int) -> Iterator[int]:
    while word:
        low = word & -word
        yield low.bit_length() - 1
        word ^= low


@dataclass(frozen=True, kw_only=True, slots=True)
class Classes:
    """One schedule of each class, program order's first."""

    exhausts: bool = True

    def proposals(self, space: Space) -> Iterator[Proposal]:
        pending: list[tuple[int, _Closed]] = [(0, _Closed.of(space.order))]
        while pending:
            at, closed = pending.pop()
            while at < len(space.conflicts):
                first, second = space.conflicts[at]
                at += 1
                if not closed.before(first, second) and not closed.before(second, first):
                    pending.append((at, closed.decide(second, first)))
                    closed = closed.decide(first, second)
            yield Proposal(closed.linear(space.order.chains))
