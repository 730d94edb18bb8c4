"""Several processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from crosscurrent.schedules.engines.worker import packed, work
from crosscurrent.schedules.explore import Exploration, Share
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.strategies import Strategy


class Processes:
    """As many processes as there are cores, or as many as said."""

    def __init__(self, *, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.num_workers = workers or len(os.sched_getaffinity(0))
        """How many shares run at a time."""

    def run(
        self, program: Program, strategies: Sequence[Strategy], limit: int | None, shares: Sequence[Share]
    ) -> list[Exploration]:
        """The shares' results, in their order."""
        data = packed(program)
        # A fork would copy locks that threads of PyTorch hold.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=self.num_workers, mp_context=spawn) as pool:
            futures = [pool.submit(work, data, list(strategies), limit, share) for share in shares]
            return [future.result() for future in futures]
