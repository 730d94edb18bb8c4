"""The schedule that a plan of delays leads to: what ``delays`` does on a GPU, done to a recorded trace.

Every op starts as soon as what it must come after has ended, and its delay has passed; the host takes no time
to issue, as if it were far ahead of the device. Ops are ordered by when they start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from crosscurrent.schedules import Program, Replayer, Schedule
from crosscurrent.schedules.explore import Difference, memory_choices
from crosscurrent.schedules.order import Linear, PartialOrder
from crosscurrent.schedules.strategies import from_recipe
from crosscurrent.schedules.strategies.protocol import Proposal, Space
from crosscurrent.stress.lanes import roles_in
from crosscurrent.stress.plans import DelayConfig, How, Step
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


class SeededReplays:
    """Replays of one program, by seed: what stress comes to without a GPU.

    A seed is two schedules, each with and without reuse of memory: the one that its plan of delays leads to,
    and one of the explorer's own of the same kind, which keeps to no lanes and no times.
    """

    def __init__(self, program: Program, plan: Callable[[int], DelayConfig]) -> None:
        """``plan`` gives the plan of a seed. Raises ``NotReplayableError`` if the program cannot be run."""
        self._program = program
        self._plan = plan
        self._roles = roles_in(program.records, program.info.lanes)
        self._replayers = [Replayer(program, reuse) for reuse in memory_choices(program)]

    @property
    def unfaithful(self) -> tuple[str, ...]:
        """The recorded values that program order does not give again."""
        return self._replayers[0].unfaithful()

    def run(self, seed: int) -> Difference | None:
        """Run the schedules of a seed; the first that comes out otherwise than program order."""
        plan = self._plan(seed)
        for replayer in self._replayers:
            for linear, recipe in self._schedules(replayer.order, plan):
                outcome = replayer.run(linear)
                if not outcome.same:
                    schedule = Schedule(
                        program=self._program.fingerprint, linear=linear, reuse=replayer.reuse, recipe=recipe
                    )
                    return Difference(str(schedule), outcome.changes, outcome.failure)
        return None

    def close(self) -> None:
        """Give back all memory of the program."""
        self._replayers.clear()

    def _schedules(self, order: PartialOrder, plan: DelayConfig) -> Iterator[tuple[Linear, str]]:
        yield Delayed.of(self._program, plan).schedule(order, plan), ""
        for recipe in self._recipes(order, plan):
            yield from_recipe(order, recipe), recipe

    def _recipes(self, order: PartialOrder, plan: DelayConfig) -> list[str]:
        match plan.how:
            case How.RANDOM:
                return [f"random.{plan.seed}"]
            case How.PCT:
                return [f"pct.{plan.seed}.{plan.depth}"]
            case How.EVERYWHERE:
                late = plan.lanes[plan.seed % len(plan.lanes)]
                return [f"latest.{lane}" for lane in order.lanes if self._roles.get(lane) == late]
            case How.DIRECTED:
                return []
