"""Streams and events: the methods behind ``torch.cuda.Stream``, ``torch.Stream`` and their events.

On a CPU build the classes of ``torch.cuda`` derive from empty stand-ins of the C++ classes. A simulation
fills the stand-ins with the methods below, so that the classes themselves stay the same objects and
``from torch.cuda import Stream`` works however early it was written.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch

from crosscurrent.trace.simulate.clock import QUERY
from crosscurrent.trace.simulate.queues import HIGHEST_PRIORITY, Queue

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.simulation import Simulation

CUDA_DEVICE_TYPE = 1
_event_keys = itertools.count(1)


def running() -> Simulation:
    """The simulation that a stream or an event belongs to, which has to be active still."""
    from crosscurrent.trace.simulate.simulation import active

    simulation = active()
    if simulation is None:
        raise RuntimeError("this stream or event belongs to a simulation that has ended")
    simulation.check_thread()
    return simulation


class StreamMethods:
    """What the C++ base class of streams does, on a queue."""

    _queue: Queue

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        simulation = running()
        self = object.__new__(cls)
        self._queue = _queue_for(simulation, *args, **kwargs)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def stream_id(self) -> int:
        """PyTorch's number of the queue."""
        return self._queue.stream_id

    @property
    def device_index(self) -> int:
        """The index of the device."""
        return self._queue.device

    @property
    def device_type(self) -> int:
        """PyTorch's number for CUDA."""
        return CUDA_DEVICE_TYPE

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device("cuda", self._queue.device)

    @property
    def cuda_stream(self) -> int:
        """A number that stands for the stream's handle; it points at nothing."""
        return self._queue.handle

    native_handle = cuda_stream

    @property
    def priority(self) -> int:
        """0 is the lowest, lower numbers go first."""
        return self._queue.priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, HIGHEST_PRIORITY

    def query(self) -> bool:
        """Whether all work of the stream is done, by the model clock."""
        simulation = running()
        simulation.refuse_in_capture("cudaStreamQuery")
        done = simulation.poll(self._queue, self._queue.free_at)
        if done:
            for tracer in simulation.tracers:
                tracer.stream_queried_true(self._queue.device, self._queue.stream_id)
        return done

    def synchronize(self) -> None:
        """The host waits for all work of the stream."""
        simulation = running()
        simulation.refuse_in_capture("cudaStreamSynchronize")
        simulation.clock.wait_until(self._queue.free_at)
        for tracer in simulation.tracers:
            tracer.stream_synchronized(self._queue.device, self._queue.stream_id)

    def wait_event(self, event: Any) -> None:
        """Later work of this stream waits for the latest recording of the event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Later work of this stream waits for what the other one was given so far."""
        event = _new_event(running())
        EventMethods._record_on(event, stream._queue, "wait_stream")
        EventMethods._wait_on(event, self._queue, "wait_stream")

    def record_event(self, event: Any = None) -> Any:
        """Record an event, or a new one, on this stream."""
        if event is None:
            event = torch.Event(device=self.device)
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Whether a graph is being captured from this stream."""
        return self._queue.capture is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and other._queue is self._queue  # type: ignore[attr-defined]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self._queue.stream_id, self._queue.device))

    def __enter__(self) -> Any:
        simulation = running()
        simulation.settle()
        thread = simulation.queues.thread
        outer = self.__dict__.setdefault("_outer", [])
        outer.append((thread.device, thread.current[self._queue.device]))
        thread.device = self._queue.device
        simulation.switch_to(self._queue)
        return self

    def __exit__(self, *exc_info: object) -> None:
        simulation = running()
        device, queue = self.__dict__["_outer"].pop()
        simulation.switch_to(queue)
        simulation.queues.thread.device = device

    def __repr__(self) -> str:
        return f"torch.Stream device_type=cuda, device_index={self.device_index}, stream_id={self.stream_id}"


class EventMethods:
    """What the C++ base class of events does, on the model clock."""

    _key: int
    _timing: bool
    _queue: Queue | None
    _done_at: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        running()
        self = object.__new__(cls)
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
        module = sys.modules.get("crosscurrent.trace.simulate.simulation")
        simulation = module.active() if module is not None else None
        if simulation is not None and self.__dict__.get("_queue") is not None:
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
        simulation.not_captured(self._key)
        for tracer in simulation.tracers:
            tracer.event_recorded(self._key, queue.device, queue.stream_id, via)

    def wait(self, stream: Any = None) -> None:
        """Later work of the stream (default: the current one) waits for the latest recording."""
        self._wait_on(_queue_or_current(stream), "wait_event")

    def _wait_on(self, queue: Queue, via: str) -> None:
        simulation = running()
        if self._queue is not None and simulation.capture_wait(queue, self._key):
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
        simulation.refuse_in_capture("cudaEventQuery")
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
        simulation.refuse_in_capture("cudaEventSynchronize")
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


class _AlsoCuda(type):
    """Makes the CUDA class an instance of the generic one, as the C++ hierarchy does."""

    cuda_base: type

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, cls.cuda_base)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(cls, subclass) or issubclass(subclass, cls.cuda_base)


class Stream(StreamMethods, metaclass=_AlsoCuda):
    """Stands for ``torch.Stream``."""

    cuda_base = torch._C._CudaStreamBase


class Event(EventMethods, metaclass=_AlsoCuda):
    """Stands for ``torch.Event``."""

    cuda_base = torch._C._CudaEventBase


def stream_object(queue: Queue) -> Any:
    """A ``torch.cuda.Stream`` for a queue."""
    make: Any = torch.cuda.Stream
    return make(stream_id=queue.stream_id, device_index=queue.device, device_type=CUDA_DEVICE_TYPE)


def generic_stream(queue: Queue) -> Any:
    """A ``torch.Stream`` for a queue."""
    return Stream(stream_id=queue.stream_id, device_index=queue.device, device_type=CUDA_DEVICE_TYPE)


def query_cost(failures: int) -> int:
    """What the next query costs: doubling, so that a loop over ``query`` ends soon whatever it waits for."""
    return QUERY << min(failures, 40)


def methods_of(cls: type) -> dict[str, object]:
    """The attributes of a class that belong onto a stand-in."""
    left_out = {"__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "__annotations__"}
    return {name: value for name, value in vars(cls).items() if name not in left_out}


def _new_event(simulation: Simulation) -> EventMethods:
    event: EventMethods = Event()
    return event


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


def _queue_for(
    simulation: Simulation,
    device: Any = None,
    priority: int = 0,
    *,
    stream_id: int | None = None,
    device_index: int | None = None,
    device_type: int | None = None,
    stream_ptr: int | None = None,
) -> Queue:
    if stream_ptr:
        raise NotImplementedError("simulated CUDA cannot wrap a stream of another library (ExternalStream)")
    if stream_id is not None and device_index is not None:
        return simulation.queues.by_id(device_index, stream_id)
    index = simulation.queues.thread.device if device is None else simulation.device_index(device)
    return simulation.queues.take(index, priority)
