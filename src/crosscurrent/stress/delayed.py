"""The schedule that a plan of delays leads to: what ``delays`` does on a GPU, done to a recorded trace.

Every op starts as soon as what it must come after has ended, and its delay has passed; the host takes no time
to issue, as if it were far ahead of the device. Ops are ordered by when they start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from crosscurrent.schedules import Program
from crosscurrent.schedules.order import Linear, PartialOrder
from crosscurrent.schedules.strategies.protocol import Proposal, Space
from crosscurrent.stress.lanes import roles_in
from crosscurrent.stress.plans import DelayConfig, Step
from crosscurrent.trace.records import Site

KERNEL_US = 5.0
"""How long each op takes. Only its relation to the delays matters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delayed:
    """One schedule a seed, for the seeds ``config.seed, config.seed + 1, ...``, ``count`` of them."""

    config: DelayConfig
    roles: Mapping[int, str]
    """By lane of the trace: its role."""

    sites: tuple[Site, ...]
    """The call sites of the trace."""

    count: int = 1
    exhausts: bool = False

    @classmethod
    def of(cls, program: Program, config: DelayConfig, *, count: int = 1) -> Delayed:
        """The strategy for one program."""
        info = program.info
        roles = roles_in(program.records, info.lanes)
        return cls(config=config, roles=roles, sites=tuple(info.sites), count=count)

    def proposals(self, space: Space) -> Iterator[Proposal]:
        for seed in range(self.config.seed, self.config.seed + self.count):
            yield Proposal(self.schedule(space.order, replace(self.config, seed=seed)))

    def schedule(self, order: PartialOrder, config: DelayConfig) -> Linear:
        """The schedule of one plan."""
        decide = config.start(len(order))
        starts: list[float] = []
        for node, op in enumerate(order.ops):
            ready = max((starts[below] for below in order.predecessors[node]), default=-KERNEL_US) + KERNEL_US
            site = self.sites[op.site] if 0 <= op.site < len(self.sites) else None
            # The host has no role, and no plan delays it.
            starts.append(ready + decide(Step(self.roles.get(op.lane, ""), node, op.name, site)))
        return tuple(sorted(range(len(order)), key=lambda node: (starts[node], node)))
