"""Events: the methods behind ``torch.cuda.Event`` and ``torch.Event``, on the model clock."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from crosscurrent.trace.simulate.cpp_classes import blank
from crosscurrent.trace.simulate.current import active, running
from crosscurrent.trace.simulate.queues import Queue

_event_keys = itertools.count(1)


class EventMethods:
    """What the C++ base class of events does, on the model clock."""

    _key: int
    _timing: bool
    _queue: Queue | None
    _done_at: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        running()
        self = blank(cls)
        self._prepare(*args, **kwargs)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _prepare(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        if interprocess:
            raise NotImplementedError("simulated CUDA has no interprocess events (interprocess=True)")
        if external:
            raise NotImplementedError("simulated CUDA has no external events (external=True)")
        if device is not None:
            running().device_index(device)
        self._key = next(_event_keys)
        self._timing = enable_timing
        self._queue = None
        self._done_at = 0

    def __del__(self) -> None:
        simulation = active()
        if simulation is not None and self.__dict__.get("_queue") is not None:
            simulation.captures.forget(self._key)
            for tracer in simulation.tracers:
                tracer.event_gone(self._key)

    @property
    def event_id(self) -> int:
        """A number that stands for the event's handle; 0 until it is recorded."""
        return self._key if self._queue is not None else 0

    cuda_event = event_id

    @property
    def device(self) -> torch.device | None:
        """The device that the event was first recorded on."""
        return None if self._queue is None else torch.device("cuda", self._queue.device)

    def record(self, stream: Any = None) -> None:
        """Mark what the stream (default: the current one) was given so far."""
        self._record_on(_queue_or_current(stream), "record")

    def _record_on(self, queue: Queue, via: str) -> None:
        if self._queue is not None and self._queue.device != queue.device:
            raise RuntimeError(
                f"Event device {self._queue.device} does not match recording stream's device {queue.device}."
            )
        simulation = running()
        self._queue = queue
        self._done_at = max(queue.free_at, simulation.clock.now)
        capture = queue.capture
        if capture is not None:
            capture.record(queue, self._key)
            return
        simulation.captures.forget(self._key)
        for tracer in simulation.tracers:
            tracer.event_recorded(self._key, queue.device, queue.stream_id, via)

    def wait(self, stream: Any = None) -> None:
        """Later work of the stream (default: the current one) waits for the latest recording."""
        self._wait_on(_queue_or_current(stream), "wait_event")

    def _wait_on(self, queue: Queue, via: str) -> None:
        simulation = running()
        if self._queue is not None and simulation.captures.wait(queue, self._key):
            return
        if self._queue is not None:
            queue.free_at = max(queue.free_at, self._done_at)
        for tracer in simulation.tracers:
            tracer.event_waited(self._key, queue.device, queue.stream_id, via)

    def query(self) -> bool:
        """Whether the recorded work is done, by the model clock; True if nothing was recorded."""
        if self._queue is None:
            return True
        simulation = running()
        simulation.captures.refuse("cudaEventQuery")
        done = simulation.poll(self, self._done_at)
        if done:
            for tracer in simulation.tracers:
                tracer.event_queried_true(self._key)
        return done

    def synchronize(self) -> None:
        """The host waits for the recorded work."""
        if self._queue is None:
            return
        simulation = running()
        simulation.captures.refuse("cudaEventSynchronize")
        simulation.clock.wait_until(self._done_at)
        for tracer in simulation.tracers:
            tracer.event_synchronized(self._key)

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds of the model clock between two recordings."""
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._queue is None or end_event._queue is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(self._done_at, end_event._done_at) > running().clock.now:
            raise ValueError("Both events must be completed before calculating elapsed time.")
        milliseconds: float = (end_event._done_at - self._done_at) / 1e6
        return milliseconds

    def ipc_handle(self) -> Any:
        """Not simulated."""
        raise NotImplementedError("simulated CUDA has no interprocess events (Event.ipc_handle)")

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Any:
        """Not simulated."""
        raise NotImplementedError("simulated CUDA has no interprocess events (Event.from_ipc_handle)")

    def __repr__(self) -> str:
        return f"torch.Event device_type=cuda, event_id={self.event_id}"


def _queue_or_current(stream: Any) -> Queue:
    if stream is None:
        simulation = running()
        simulation.settle()
        thread = simulation.queues.thread
        return thread.current[thread.device]
    if not isinstance(stream, torch.Stream):
        raise TypeError(f"expected a torch.cuda.Stream or torch.Stream, got {type(stream).__name__}")
    queue: Queue = stream._queue  # type: ignore[attr-defined]
    return queue
