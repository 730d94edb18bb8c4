"""Directed at a finding: run its two accesses the other way round, and as little else as possible.

Between the two, in program order, lie operations that must come after the first, operations that
must come before the second, and others. Either the first waits, with all that must follow it, or
the second comes forward, with all that it needs. Both keep every other pair as it was, except those
that these two moves drag along; the one that drags along fewer conflicts is tried first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from crosscurrent.schedules.order import Frontier, Linear, PartialOrder, inverse
from crosscurrent.schedules.strategies.protocol import Proposal, Space


def held_back(order: PartialOrder, first: int, second: int) -> Linear:
    """``first``, and what must follow it, waits until ``second`` has run."""
    window = range(first, second + 1)
    held = [node for node in window if node == first or order.before(first, node)]
    waits = set(held)
    early = [node for node in window if node not in waits]
    return (*range(first), *early, *held, *range(second + 1, len(order)))


def brought_forward(order: PartialOrder, first: int, second: int) -> Linear:
    """``second``, and what it needs, runs just before ``first``."""
    window = range(first, second + 1)
    needed = [node for node in window if node == second or order.before(node, second)]
    forward = set(needed)
    late = [node for node in window if node not in forward]
    return (*range(first), *needed, *late, *range(second + 1, len(order)))


def at_random(order: PartialOrder, first: int, second: int, seed: int) -> Linear:
    """A random walk in which ``first`` has to wait until ``second`` has run."""
    draw = Random(seed).random
    frontier = Frontier(order)
    linear: list[int] = []
    waiting = True
    while ready := frontier.ready:
        allowed = [node for node in ready if node != first] if waiting else ready
        node = allowed[int(draw() * len(allowed))]
        waiting = waiting and node != second
        frontier.run(node)
        linear.append(node)
    return tuple(linear)


@dataclass(frozen=True, kw_only=True, slots=True)
class Directed:
    """Reverse one pair, ``first`` before ``second`` in program order."""

    first: int
    second: int
    more: int = 0
    """How many random schedules with the pair reversed to propose after the two directed ones."""

    exhausts: bool = False

    def proposals(self, space: Space) -> Iterator[Proposal]:
        order = space.order
        first, second = sorted((self.first, self.second))
        if order.before(first, second):
            raise ValueError(
                f"operations {first} ({order.ops[first].name}) and {second} ({order.ops[second].name}) "
                "are ordered: no schedule runs them the other way round"
            )

        def dragged(linear: Linear) -> int:
            when = inverse(linear)
            return sum(when[early] > when[late] for early, late in space.conflicts)

        both = {held_back(order, first, second), brought_forward(order, first, second)}
        for linear in sorted(both, key=lambda linear: (dragged(linear), linear)):
            yield Proposal(linear)
        for seed in range(self.more):
            yield Proposal(at_random(order, first, second, seed))
