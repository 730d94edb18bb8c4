"""A simulation to test in, and a tracer that only listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from crosscurrent.trace.simulate import Simulation, simulate


class Listener:
    """Writes down what a simulation tells a tracer, as plain tuples."""

    observers: tuple[object, ...] = ()

    def __init__(self, simulation: Simulation) -> None:
        self._environment = simulation.environment
        self.heard: list[tuple[Any, ...]] = []

    def op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.heard.append(("op", str(func), self._environment.current_stream(0)))

    def event_recorded(self, event: Any, device: int, stream: int, via: str = "record") -> None:
        self.heard.append(("recorded", event, device, stream, via))

    def event_waited(self, event: Any, device: int, stream: int, via: str = "wait_event") -> None:
        self.heard.append(("waited", event, device, stream, via))

    def event_gone(self, event: Any) -> None:
        pass  # nobody counts on when objects die

    def event_synchronized(self, event: Any, kind: str = "event") -> None:
        self.heard.append(("event synchronized", event))

    def event_queried_true(self, event: Any) -> None:
        self.heard.append(("event done", event))

    def stream_synchronized(self, device: int, stream: int) -> None:
        self.heard.append(("stream synchronized", device, stream))

    def stream_queried_true(self, device: int, stream: int) -> None:
        self.heard.append(("stream done", device, stream))

    def device_synchronized(self, device: int) -> None:
        self.heard.append(("device synchronized", device))

    def stream_used(self, tensor: Any, device: int, stream: int) -> None:
        self.heard.append(("used", tuple(tensor.shape), device, stream))

    def host_access(self, tensor: Any, write: bool, name: str) -> None:
        self.heard.append(("host", name, write))

    def unknown(self, name: str, reason: str) -> None:
        self.heard.append(("unknown", name))

    def pool_used(self, pool: Any, device: int) -> None:
        self.heard.append(("pool", device))

    def looked_at(self, tensor: Any, name: str) -> None:
        self.heard.append(("looked at", name))

    def failed(self, func: Any, args: Any, kwargs: Any) -> None:
        self.heard.append(("failed", str(func)))

    def released(self, storage: Any, name: str = "resize_") -> None:
        self.heard.append(("released", storage.nbytes()))

    def ops(self) -> list[tuple[str, int]]:
        """The ops so far, without views, by short name and stream."""
        names = [(what[1].split(".")[1], what[2]) for what in self.heard if what[0] == "op"]
        return [(name, stream) for name, stream in names if name not in ("detach", "expand", "view_as", "t")]

    def orders(self) -> list[tuple[int, int]]:
        """Which stream waits for which, as (producer, consumer), in the order of the waits."""
        recorded: dict[int, int] = {}
        pairs: list[tuple[int, int]] = []
        for what in self.heard:
            if what[0] == "recorded":
                recorded[what[1]] = what[3]
            elif what[0] == "waited" and what[1] in recorded:
                pairs.append((recorded[what[1]], what[3]))
        return pairs


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    """One simulated device."""
    with simulate() as simulation:
        yield simulation


@pytest.fixture
def two_devices() -> Iterator[Simulation]:
    """Two simulated devices."""
    with simulate(devices=2) as simulation:
        yield simulation


@pytest.fixture
def listener(simulation: Simulation) -> Iterator[Listener]:
    """A listener on the one-device simulation."""
    listener = Listener(simulation)
    simulation.attach(listener)
    yield listener
    simulation.detach(listener)


@pytest.fixture
def listen() -> Callable[[Simulation], Listener]:
    """Makes listeners."""

    def attach(simulation: Simulation) -> Listener:
        listener = Listener(simulation)
        simulation.attach(listener)
        return listener

    return attach
