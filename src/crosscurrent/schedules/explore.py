"""Tries schedules, and says which ones came out otherwise than program order.

Memory comes first: no reuse at all, what the caching allocator would most likely do, and, for an
exhaustive search, every pair of blocks of which one may take over from the other, one pair at a time (see
``reuse``). For each choice, the strategies propose orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from crosscurrent.schedules.program import Program
from crosscurrent.schedules.replay import Failure, Replayer
from crosscurrent.schedules.reuse import Reuse, best_fit, candidates, places
from crosscurrent.schedules.schedule import Schedule
from crosscurrent.schedules.strategies import Strategy
from crosscurrent.schedules.values import Change


class Difference(NamedTuple):
    """A schedule whose values differ from program order, and in what."""

    schedule: str
    changes: tuple[Change, ...]
    failure: Failure | None = None
    number: int = 0
    """Its number in the search, which does not depend on how the work was divided."""

    @property
    def what(self) -> frozenset[str]:
        """What came out otherwise, as names."""
        if self.failure is not None:
            return frozenset({f"failure of operation {self.failure.node}"})
        return frozenset(change.name for change in self.changes)

    def __str__(self) -> str:
        said = [str(self.failure)] if self.failure is not None else [str(change) for change in self.changes]
        return "\n".join([self.schedule, *(f"  {line}" for line in said)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Exploration:
    """What a search found."""

    tried: int
    """How many schedules ran."""

    bounded: bool
    """Whether there was more to try: a limit was hit, or a strategy does not claim to see everything."""

    differences: tuple[Difference, ...]
    """The schedules that came out otherwise, at most one for each set of changed values; the first ones."""

    different: int = 0
    """How many schedules came out otherwise."""

    @property
    def same(self) -> bool:
        """Whether every schedule that ran gave the values of program order."""
        return self.different == 0

    def __str__(self) -> str:
        bound = " (bounded: there are more)" if self.bounded else " (all there are)"
        verdict = "all the same" if self.same else f"{self.different} different"
        return f"{self.tried} schedules{bound}: {verdict}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which part of a search one worker does: every ``of``-th schedule, from ``index`` on."""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"share {self.index} of {self.of} is none: it must be 0 to {self.of - 1}")


def memory_choices(program: Program, *, every: bool = False) -> Iterator[tuple[Reuse, ...]]:
    """The choices of memory to try: none, the likely one, and with ``every`` each possible pair alone."""
    yield ()
    likely = best_fit(program.records)
    if likely:
        yield likely
    if every:
        for pair in candidates(program.records, program.order()):
            if (pair,) != likely and _fits(program, pair):
                yield (pair,)


def explore(
    program: Program, strategies: Sequence[Strategy], *, limit: int | None = None, share: Share | None = None
) -> Exploration:
    """Run what the strategies propose for each choice of memory, at most ``limit`` schedules of each that
    would go on until there are no more. The others say themselves how many they propose.

    ``share`` runs only a part, for one of several workers; ``merge`` puts the parts together. Raises
    ``NotReplayableError`` if the program cannot be run again.
    """
    share = share or Share()
    fingerprint = program.fingerprint
    settled: dict[int, list[int]] = {}
    tried = different = at = 0
    bounded = not any(strategy.exhausts for strategy in strategies)
    found: dict[frozenset[str], Difference] = {}
    for reuse in memory_choices(program, every=not bounded):
        replayer = Replayer(program, reuse, settled=settled)
        for strategy in strategies:
            proposals = strategy.proposals(replayer.space)
            for proposal in islice(proposals, limit if strategy.exhausts else None):
                at += 1
                if at % share.of != share.index:
                    continue
                tried += 1
                outcome = replayer.run(proposal.linear)
                if not outcome.same:
                    different += 1
                    schedule = Schedule(
                        program=fingerprint, linear=outcome.linear, reuse=reuse, recipe=proposal.recipe
                    )
                    difference = Difference(str(schedule), outcome.changes, outcome.failure, at)
                    found.setdefault(difference.what, difference)
            if limit is not None and strategy.exhausts and next(proposals, None) is not None:
                bounded = True
    return Exploration(tried=tried, bounded=bounded, differences=tuple(found.values()), different=different)


def merge(parts: Iterable[Exploration]) -> Exploration:
    """The whole of a search from its parts: the same as if one worker had done it all."""
    parts = list(parts)
    found: dict[frozenset[str], Difference] = {}
    for difference in sorted((d for part in parts for d in part.differences), key=lambda d: d.number):
        found.setdefault(difference.what, difference)
    return Exploration(
        tried=sum(part.tried for part in parts),
        bounded=any(part.bounded for part in parts),
        differences=tuple(found.values()),
        different=sum(part.different for part in parts),
    )


def _fits(program: Program, pair: Reuse) -> bool:
    try:
        places(program.records, [pair])
    except ValueError:
        return False
    return True
