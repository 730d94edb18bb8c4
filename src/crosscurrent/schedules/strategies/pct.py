"""PCT: random priorities with few changes, which finds bugs of small depth with a known probability.

Burckhardt, Kothari, Musuvathi, Nagarakatte, "A Randomized Scheduler with Probabilistic Guarantees
of Finding Bugs", ASPLOS 2010. Every lane gets a random priority; the highest that can run runs. At
``depth - 1`` random steps, the lane about to run falls to a priority of that change point's own, below
all that were handed out at the start. A bug that needs ``depth`` ordering constraints is found by one
schedule with probability at least ``1 / (n * k ** (depth - 1))``, for ``n`` lanes and ``k`` steps.

A lane that waits is one that cannot run; apart from that, nothing differs from the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from crosscurrent.schedules.order import Frontier, Linear, PartialOrder
from crosscurrent.schedules.strategies.protocol import Proposal, Space


def bound(order: PartialOrder, depth: int) -> float:
    """The least probability with which one schedule finds a bug of this depth (theorem of the paper)."""
    return 1.0 / (max(1, len(order.lanes)) * float(max(1, len(order)) ** (depth - 1)))


def prioritized(order: PartialOrder, priorities: Sequence[int], changes: Sequence[int]) -> Linear:
    """The schedule of a permutation of the lanes (highest first) and of the steps where one falls."""
    priority = [0] * len(order.lanes)
    for rank, lane in enumerate(priorities):
        priority[lane] = len(priorities) - rank
    falls = {step: i - len(changes) for i, step in enumerate(changes)}  # step -> what to fall to
    frontier = Frontier(order)
    linear: list[int] = []
    while ready := frontier.ready:
        _, node = max((priority[order.lane[node]], node) for node in ready)
        if (fall := falls.pop(len(linear), None)) is not None:
            priority[order.lane[node]] = fall
            continue
        frontier.run(node)
        linear.append(node)
    return tuple(linear)


def pct(order: PartialOrder, seed: int, depth: int) -> Linear:
    """The schedule of one seed."""
    draw = Random(seed).random
    priorities = list(range(len(order.lanes)))
    for i in range(len(priorities) - 1, 0, -1):  # Fisher and Yates, on random() alone: see random_walk
        j = int(draw() * (i + 1))
        priorities[i], priorities[j] = priorities[j], priorities[i]
    return prioritized(order, priorities, [int(draw() * len(order)) for _ in range(depth - 1)])


@dataclass(frozen=True, kw_only=True, slots=True)
class PCT:
    """One schedule a seed, for the seeds ``start, start + 1, ...``, ``count`` of them."""

    count: int
    depth: int = 3
    """How many ordering constraints the bug needs. Nearly all known ones need one or two."""
    start: int = 0
    exhausts: bool = False

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")

    def proposals(self, space: Space) -> Iterator[Proposal]:
        for seed in range(self.start, self.start + self.count):
            yield Proposal(pct(space.order, seed, self.depth), f"pct.{seed}.{self.depth}")
