"""The makespans that the sync edges of a program allow, and the waits that hold it up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from crosscurrent.report.makespan import Step, Stop, Work, play
from crosscurrent.schedules.countdown import Countdown
from crosscurrent.trace.records import HOST, Site

MAX_OBSTACLES = 8
"""Waits for which the makespan without them is worked out."""

MAX_PASSES = 2 + MAX_OBSTACLES
"""How often the program is played, at most."""


class Obstacle(NamedTuple):
    """A wait on the critical path, and what the makespan would lose without it."""

    call: str
    site: Site | None
    gain: int


class Bounds(NamedTuple):
    """Makespans of the same work: ``busiest <= edges <= `` what it took.

    ``edges``: every operation as early as program order on its lane and the sync edges allow, host waits
    included, and issuing for free: the critical path. ``device_edges``: without the host waits.
    ``busiest``: the work of one kind on the one lane that has most of it; nothing can be faster.
    """

    edges: int
    device_edges: int
    busiest: int
    busiest_name: str
    obstacles: tuple[Obstacle, ...]


def bounds(
    program: Sequence[Step],
    waits: Sequence[tuple[str, Site | None] | None],
    countdown: Countdown | None = None,
) -> Bounds:
    """The makespans that the sync edges of a program allow, and which waits hold it up.

    ``countdown`` counts the passes over the program.
    """
    countdown = countdown or Countdown()
    run = play(program, host_is_free=True)
    countdown.take()
    stops = {i for i, step in enumerate(program) if isinstance(step, Stop)}
    on_path = list(dict.fromkeys(waits[edge] for edge in run.edges))[:MAX_OBSTACLES]
    countdown.skip(MAX_OBSTACLES - len(on_path))
    obstacles = []
    for wait in on_path:
        with countdown.part(1):
            if wait is None:
                continue
            same = {i for i, other in enumerate(waits) if other == wait}
            shorter = play(program, host_is_free=True, dropped=same).makespan
            countdown.take()
            obstacles.append(Obstacle(*wait, run.makespan - shorter))
    obstacles.sort(key=lambda obstacle: -obstacle.gain)
    device_edges = play(program, host_is_free=True, dropped=stops).makespan
    countdown.take()
    busiest = max(_totals(program).items(), key=lambda item: item[1], default=((HOST, ""), 0))
    return Bounds(
        edges=run.makespan,
        device_edges=device_edges,
        busiest=busiest[1],
        busiest_name=busiest[0][1] or "the host",
        obstacles=tuple(obstacles),
    )


def _totals(program: Iterable[Step]) -> dict[tuple[int, str], int]:
    """Work by lane and kind."""
    totals: dict[tuple[int, str], int] = {}
    for step in program:
        if isinstance(step, Work):
            key = (step.lane, step.kind)
            totals[key] = totals.get(key, 0) + step.duration
    return totals
