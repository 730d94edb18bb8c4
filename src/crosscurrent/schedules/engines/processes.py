"""Several processes of this machine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from typing import Any

from crosscurrent.cores import num_cores
from crosscurrent.schedules.engines.counting import EVERY, Count
from crosscurrent.schedules.engines.worker import packed, work
from crosscurrent.schedules.explore import Exploration, Share
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.strategies import Strategy


class Processes:
    """As many processes as there are cores, or as many as said."""

    def __init__(self, *, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.num_workers = workers or num_cores()
        """How many shares run at a time."""

    def run(
        self,
        program: Program,
        strategies: Sequence[Strategy],
        limit: int | None,
        shares: Sequence[Share],
        told: Count | None = None,
    ) -> list[Exploration]:
        """The shares' results, in their order."""
        data = packed(program)
        # A fork would copy locks that threads of PyTorch hold.
        spawn = multiprocessing.get_context("spawn")
        tried = spawn.Value("Q", 0)
        with ProcessPoolExecutor(
            max_workers=self.num_workers, mp_context=spawn, initializer=_count_in, initargs=(tried,)
        ) as pool:
            futures = [pool.submit(work, data, list(strategies), limit, share, _add) for share in shares]
            while told is not None and wait(futures, timeout=EVERY).not_done:
                told(tried.value // len(shares))
            return [future.result() for future in futures]

    def close(self) -> None:
        """Nothing is held between searches."""


_tried: Any = None
"""In a worker: what all workers count in."""


def _count_in(tried: Any) -> None:
    global _tried
    _tried = tried


def _add(count: int) -> None:
    with _tried.get_lock():
        _tried.value += count
