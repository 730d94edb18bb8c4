"""The simulation that streams, events and graphs belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.simulation import Simulation


def running() -> Simulation:
    """The simulation that a stream or an event belongs to, which has to be active still."""
    from crosscurrent.trace.simulate.simulation import active

    simulation = active()
    if simulation is None:
        raise RuntimeError("this stream or event belongs to a simulation that has ended")
    simulation.check_thread()
    return simulation
