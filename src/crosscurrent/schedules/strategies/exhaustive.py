"""Exhaustive: every schedule there is, in lexicographic order. For the smallest traces, and to count.

Neighbours share long prefixes, which the replay makes use of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from crosscurrent.schedules.order import Linear, PartialOrder
from crosscurrent.schedules.strategies.protocol import Proposal, Space


def linear_extensions(order: PartialOrder) -> Iterator[Linear]:
    """Every schedule once, program order first. Two lanes of n free operations have binomial(2n, n)."""
    total = len(order)
    missing = [len(below) for below in order.predecessors]
    path: list[int] = []
    choices = [iter([node for node in range(total) if not missing[node]])]
    ready = {node for node in range(total) if not missing[node]}
    while choices:
        if len(path) == len(choices):  # back from below: undo
            node = path.pop()
            for above in order.successors[node]:
                if not missing[above]:
                    ready.discard(above)
                missing[above] += 1
            ready.add(node)
        step = next(choices[-1], None)
        if len(path) == total:
            yield tuple(path)
        if step is None:
            choices.pop()
            continue
        path.append(step)
        ready.discard(step)
        for above in order.successors[step]:
            missing[above] -= 1
            if not missing[above]:
                ready.add(above)
        choices.append(iter(sorted(ready)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exhaustive:
    """Every schedule once."""

    exhausts: bool = True

    def proposals(self, space: Space) -> Iterator[Proposal]:
        for linear in linear_extensions(space.order):
            yield Proposal(linear)
