"""How far a search has come, told while it runs, wherever that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from crosscurrent.schedules.strategies import Proposal, Space, Strategy

EVERY: Final = 0.2
"""Seconds between two tellings: often enough to look at, seldom enough to cost nothing."""

Count: TypeAlias = Callable[[int], None]
"""Called now and then with how many schedules were dealt with so far."""


class Counted:
    """A strategy of which each proposal is counted."""

    def __init__(self, strategy: Strategy, count: Callable[[], None]) -> None:
        self._strategy = strategy
        self._count = count

    @property
    def exhausts(self) -> bool:
        """As the strategy says."""
        return self._strategy.exhausts

    def proposals(self, space: Space) -> Iterator[Proposal]:
        """Those of the strategy."""
        for proposal in self._strategy.proposals(space):
            self._count()
            yield proposal


class Tally:
    """Hands over what was counted, in batches."""

    def __init__(self, hand_over: Callable[[int], object]) -> None:
        self._hand_over = hand_over
        self._count = 0
        self._last = time.monotonic()

    def __call__(self) -> None:
        self._count += 1
        if time.monotonic() - self._last >= EVERY:
            self._hand_over(self._count)
            self._count, self._last = 0, time.monotonic()


def counted(strategies: Sequence[Strategy], hand_over: Callable[[int], object] | None) -> Sequence[Strategy]:
    """The strategies, with all of their proposals counted; as they are where nobody wants to know."""
    if hand_over is None:
        return strategies
    tally = Tally(hand_over)
    return [Counted(strategy, tally) for strategy in strategies]
