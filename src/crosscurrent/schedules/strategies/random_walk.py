"""Random: at every step, one of the lanes that can run, each as likely as the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from crosscurrent.schedules.order import Frontier, Linear, PartialOrder
from crosscurrent.schedules.strategies.protocol import Proposal, Space


def random_walk(order: PartialOrder, seed: int) -> Linear:
    """The schedule of one seed; the same on every machine and every version of Python."""
    # Of the generator's methods, only random() is promised to stay the same across versions.
    draw = Random(seed).random
    frontier = Frontier(order)
    ready, run = frontier.ready, frontier.run
    linear = []
    while ready:
        node = ready[int(draw() * len(ready))] if len(ready) > 1 else ready[0]
        run(node)
        linear.append(node)
    return tuple(linear)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomWalk:
    """One schedule a seed, for the seeds ``start, start + 1, ...``, ``count`` of them."""

    count: int
    start: int = 0
    exhausts: bool = False

    def proposals(self, space: Space) -> Iterator[Proposal]:
        for seed in range(self.start, self.start + self.count):
            yield Proposal(random_walk(space.order, seed), f"random.{seed}")
