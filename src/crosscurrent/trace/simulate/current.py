"""The simulation that is active in this process, which streams, events and graphs belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.simulation import Simulation

_active: Simulation | None = None


def active() -> Simulation | None:
    """The simulation that is active in this process, if any."""
    return _active


def make_active(simulation: Simulation | None) -> None:
    """It is entered; or, with None, it is left."""
    global _active
    _active = simulation


def running() -> Simulation:
    """The simulation that a stream or an event belongs to, which has to be active still."""
    if _active is None:
        raise RuntimeError("this stream or event belongs to a simulation that has ended")
    _active.check_thread()
    return _active
