"""The one seam between a search and where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from crosscurrent.schedules.engines.counting import Count
from crosscurrent.schedules.explore import Exploration, Share
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.strategies import Strategy


class Engine(Protocol):
    """Runs the shares of one search."""

    @property
    def num_workers(self) -> int:
        """How many shares it can run at a time."""

    def run(
        self,
        program: Program,
        strategies: Sequence[Strategy],
        limit: int | None,
        shares: Sequence[Share],
        told: Count | None = None,
    ) -> list[Exploration]:
        """The shares' results, in their order. ``told`` hears how far each share has come, on average."""

    def close(self) -> None:
        """Give back what it holds between searches."""
