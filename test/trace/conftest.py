"""Fixtures of the trace tests: programs run on the simulation, or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.cuda import _gpu_trace

import crosscurrent
from crosscurrent.trace.cuda import CudaSource
from crosscurrent.trace.records import Op, Record
from crosscurrent.trace.segments import Segments
from crosscurrent.trace.tracer import Tracer


def _machine(devices: int) -> AbstractContextManager[Any]:
    return nullcontext() if torch.cuda.is_available() else crosscurrent.simulate(devices=devices)


class Driver:
    """Makes a simulation speak as the CUDA driver does: it fires PyTorch's GPU trace callbacks.

    Ops reach the tracer through the dispatch mode of ``CudaSource``. Those in which the host waits fire the
    stream's synchronization from inside, as on a GPU.
    """

    observers: tuple[()] = ()

    def __init__(self, simulation: Any, tracer: Tracer) -> None:
        self._simulation = simulation
        self._tracer = tracer

    def op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            device = self._simulation.environment.current_device()
            self.stream_synchronized(device, self._simulation.environment.current_stream(device))

    def event_recorded(self, event: int, device: int, stream: int, via: str = "record") -> None:
        _gpu_trace.EventRecordCallbacks.fire_callbacks(event, _handle(device, stream))

    def event_waited(self, event: int, device: int, stream: int, via: str = "wait_event") -> None:
        _gpu_trace.EventWaitCallbacks.fire_callbacks(event, _handle(device, stream))

    def event_synchronized(self, event: int, kind: str = "event") -> None:
        _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(event)

    def event_gone(self, event: int) -> None:
        _gpu_trace.EventDeletionCallbacks.fire_callbacks(event)

    def stream_synchronized(self, device: int, stream: int, kind: str = "synchronize") -> None:
        _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(_handle(device, stream))

    def device_synchronized(self, device: int) -> None:
        _gpu_trace.DeviceSynchronizationCallbacks.fire_callbacks()

    def stream_used(self, tensor: torch.Tensor, device: int, stream: int) -> None:
        # An op on a GPU, a method in the simulation.
        self._tracer.stream_used(tensor, device, _handle(device, stream))

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        """What ``CudaSource`` has wrapped itself."""

    event_queried_true = stream_queried_true = host_access = host_bytes = looked_at = nothing
    unknown = pool_used = released = before = failed = nothing


def _handle(device: int, stream: int) -> int:
    cuda = torch._C._autograd.DeviceType.CUDA.value
    handle: int = torch.cuda.Stream(stream_id=stream, device_index=device, device_type=cuda).cuda_stream
    return handle


def _segments(simulation: Any) -> list[dict[str, Any]]:
    """What PyTorch's allocator would tell of its segments, were each block one."""
    return [
        {
            "device": block.device,
            "address": block().data_ptr(),
            "total_size": block.nbytes,
            "stream": block.queue.handle,
        }
        for block in simulation.memory.blocks.values()
        if block.queue is not None
    ]


class _DrivenSource(CudaSource):
    """The taps for a real GPU, on a simulation that is driven by ``Driver``."""

    def __init__(self, simulation: Any) -> None:
        super().__init__()
        self._simulation = simulation
        self.environment.segments = Segments(
            partial(_segments, simulation), lambda device: int(simulation.memory.devices[device].num_frees)
        )

    def attach(self, tracer: Tracer) -> None:
        super().attach(tracer)
        self._driver = Driver(self._simulation, tracer)
        self._simulation.attach(self._driver)

    def detach(self, tracer: Tracer) -> None:
        self._simulation.detach(self._driver)
        super().detach(tracer)


@pytest.fixture
def run_by_callbacks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., crosscurrent.Watch]:
    """Run a program under the taps for a real GPU, and something ``before`` the watch; gives the watch.

    Where there is one, its callbacks are real."""

    def run(
        program: Callable[..., Any],
        *args: Any,
        before: Callable[[], None] = lambda: None,
        entered: Callable[[crosscurrent.Watch], None] | None = None,
    ) -> crosscurrent.Watch:
        with _machine(1) as simulation:
            before()
            if simulation is not None:
                source = _DrivenSource(simulation)
                monkeypatch.setattr("crosscurrent.races.watch._source", lambda: (source, source.environment))
            with crosscurrent.watch(trace=True) as watch:
                if entered is not None:
                    entered(watch)
                program(*args)
        return watch

    return run


@pytest.fixture
def run() -> Callable[..., crosscurrent.Watch]:
    """Run a program under ``watch(trace=True)``; gives the watch."""

    def run(
        program: Callable[..., Any],
        *args: Any,
        devices: int = 1,
        entered: Callable[[crosscurrent.Watch], None] | None = None,
        **options: Any,
    ) -> crosscurrent.Watch:
        with _machine(devices), crosscurrent.watch(trace=True, **options) as watch:
            if entered is not None:
                entered(watch)
            program(*args)
        return watch

    return run


@pytest.fixture
def machine() -> Callable[[int], AbstractContextManager[Any]]:
    """A context in which ``torch.cuda`` works."""
    return lambda devices=1: _machine(devices)


@pytest.fixture
def ops() -> Callable[[crosscurrent.Watch], list[tuple[str, str, str]]]:
    """What a watch's ops did: ``(op, lane, "r" or "w" for each access)``."""

    def ops(watch: crosscurrent.Watch) -> list[tuple[str, str, str]]:
        def line(op: Op) -> tuple[str, str, str]:
            uses = "".join("w" if access.write else "r" for access in op.accesses)
            return op.name.split(".")[1], watch.lanes[op.lane].name, uses

        return [line(record) for record in watch.records if isinstance(record, Op)]

    return ops


@pytest.fixture
def kinds() -> Callable[[list[Record]], list[str]]:
    """The names of the kinds of records."""
    return lambda records: [type(record).__name__ for record in records]
