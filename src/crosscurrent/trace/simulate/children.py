"""Processes that a program starts inside of a simulation find simulated CUDA there, too.

On a machine with a GPU a spawned process finds the GPU. Without one it would find nothing, and fail: often
while it imports the program, or in the initializer of a pool, and a pool starts such a worker again for
ever. So a description of the simulation travels along with what every spawned process is told first, and
makes one there when it is unpickled. Nobody watches what such a process does. (A forked process cannot
use CUDA at all, real or simulated.)
"""

from __future__ import annotations

import multiprocessing.spawn
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crosscurrent.trace.simulate.current import active

if TYPE_CHECKING:
    from crosscurrent.trace.patches import Patches
    from crosscurrent.trace.simulate.simulation import Simulation

_here: Simulation | None = None
"""The simulation that this process was started with. It lasts as long as the process."""


def patch_children(simulation: Simulation, patches: Patches) -> None:
    """Tell processes that are spawned from now on what to simulate."""
    real: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        # First of all: what follows makes the process import the program.
        return {"crosscurrent": _Start(simulation), **real(name)}

    patches.set(multiprocessing.spawn, "get_preparation_data", get_preparation_data)


class _Start:
    """Becomes a simulation where it is unpickled."""

    def __init__(self, simulation: Simulation) -> None:
        self._settings = type(simulation), simulation.num_devices, simulation.capacity

    def __reduce__(self) -> tuple[Callable[..., None], tuple[type[Simulation], int, int]]:
        return _start, self._settings


def _start(make: type[Simulation], devices: int, capacity: int) -> None:
    global _here
    if active() is None:  # a server of forks may unpickle it more than once
        _here = make(devices, capacity)
        _here.__enter__()
