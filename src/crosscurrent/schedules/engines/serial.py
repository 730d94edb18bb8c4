"""In this process, one share after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crosscurrent.schedules.engines.counting import Count, counted
from crosscurrent.schedules.explore import Exploration, Share, explore
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.strategies import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Serial:
    """This process."""

    num_workers: int = 1

    def run(
        self,
        program: Program,
        strategies: Sequence[Strategy],
        limit: int | None,
        shares: Sequence[Share],
        told: Count | None = None,
    ) -> list[Exploration]:
        """The shares' results, in their order."""
        so_far = 0

        def hand_over(count: int) -> None:
            nonlocal so_far
            so_far += count
            if told is not None:
                told(so_far // len(shares))

        strategies = counted(strategies, None if told is None else hand_over)
        return [explore(program, strategies, limit=limit, share=share) for share in shares]

    def close(self) -> None:
        """Nothing is held between searches."""
