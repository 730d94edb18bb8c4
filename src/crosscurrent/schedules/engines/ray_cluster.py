"""The machines of a Ray cluster; an extra, imported only when used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from crosscurrent.errors import WrongUseError
from crosscurrent.schedules.engines.counting import EVERY, Count
from crosscurrent.schedules.engines.worker import packed, work
from crosscurrent.schedules.explore import Exploration, Share
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.strategies import Strategy


class RayCluster:
    """The cluster that Ray is connected to; a local one is started, and stopped, if there is none.

    Raises ``WrongUseError`` if Ray is not installed. Workers need crosscurrent, and what registers the ops
    of the program.
    """

    def __init__(self, *, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._ray = _ray()
        self._started = not self._ray.is_initialized()
        if self._started:
            self._ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
        self.num_workers = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
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
        data = self._ray.put(packed(program))
        task = self._ray.remote(num_cpus=1)(work)
        tried = self._ray.remote(num_cpus=0)(_Tried).remote()
        hand_over = tried.add.remote
        pending = [task.remote(data, list(strategies), limit, share, hand_over) for share in shares]
        while told is not None and self._ray.wait(pending, num_returns=len(pending), timeout=EVERY)[1]:
            told(self._ray.get(tried.total.remote()) // len(shares))
        results: list[Exploration] = self._ray.get(pending)
        return results

    def close(self) -> None:
        """Stop the local cluster, if this started one."""
        if self._started:
            self._started = False
            self._ray.shutdown()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Tried:
    """What all workers count in."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, count: int) -> None:
        self._total += count

    def total(self) -> int:
        return self._total


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError:
        raise WrongUseError(
            "the engine 'ray' needs Ray, which is not installed: pip install 'crosscurrent[ray]'"
        ) from None
