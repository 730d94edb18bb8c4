"""Where a search runs: in this process, in several, or on the machines of a Ray cluster.

The work is divided by the number of each schedule, not by time or by who is free, so that every engine
finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crosscurrent.schedules.engines.counting import Count
from crosscurrent.schedules.engines.processes import Processes
from crosscurrent.schedules.engines.protocol import Engine
from crosscurrent.schedules.engines.ray_cluster import RayCluster
from crosscurrent.schedules.engines.serial import Serial
from crosscurrent.schedules.explore import Exploration, Share, merge
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.strategies import Strategy

__all__ = ["Engine", "Processes", "RayCluster", "Serial", "engine_of", "spread"]

_ENGINES: dict[str, Callable[[int | None], Engine]] = {
    "serial": lambda workers: Serial(),
    "processes": lambda workers: Processes(workers=workers),
    "ray": lambda workers: RayCluster(workers=workers),
}


def engine_of(name: str, workers: int | None = None) -> Engine:
    """The engine of a name; ``workers`` None takes what there is. Raises ``ValueError`` for another name."""
    if name not in _ENGINES:
        raise ValueError(f"there is no engine {name!r}; there are {', '.join(_ENGINES)}")
    return _ENGINES[name](workers)


def spread(
    program: Program,
    strategies: Sequence[Strategy],
    engine: Engine,
    *,
    limit: int | None = None,
    told: Count | None = None,
) -> Exploration:
    """Like ``explore``, on an engine: the same schedules, the same findings.

    ``told`` is called now and then, meanwhile, with how many schedules were dealt with.
    """
    shares = [Share(index=index, of=engine.num_workers) for index in range(engine.num_workers)]
    return merge(engine.run(program, strategies, limit, shares, told))
