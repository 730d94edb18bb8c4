"""Streams: the methods behind ``torch.cuda.Stream`` and ``torch.Stream``, and the generic classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from crosscurrent.trace.simulate.clock import QUERY
from crosscurrent.trace.simulate.cpp_classes import blank
from crosscurrent.trace.simulate.current import running
from crosscurrent.trace.simulate.events import EventMethods
from crosscurrent.trace.simulate.queues import HIGHEST_PRIORITY, Queue

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.simulation import Simulation

CUDA_DEVICE_TYPE = 1


class StreamMethods:
    """What the C++ base class of streams does, on a queue."""

    _queue: Queue

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        simulation = running()
        self = blank(cls)
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
        simulation.captures.refuse("cudaStreamQuery")
        done = simulation.poll(self._queue, self._queue.free_at)
        if done:
            for tracer in simulation.tracers:
                tracer.stream_queried_true(self._queue.device, self._queue.stream_id)
        return done

    def synchronize(self) -> None:
        """The host waits for all work of the stream."""
        simulation = running()
        simulation.captures.refuse("cudaStreamSynchronize")
        simulation.clock.wait_until(self._queue.free_at)
        for tracer in simulation.tracers:
            tracer.stream_synchronized(self._queue.device, self._queue.stream_id)

    def wait_event(self, event: Any) -> None:
        """Later work of this stream waits for the latest recording of the event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Later work of this stream waits for what the other one was given so far."""
        event = Event()
        event._record_on(stream._queue, "wait_stream")
        event._wait_on(self._queue, "wait_stream")

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
        thread.entered.append((self._queue, thread.device, thread.current[self._queue.device]))
        thread.device = self._queue.device
        simulation.switch_to(self._queue)
        return self

    def __exit__(self, *exc_info: object) -> None:
        simulation = running()
        thread = simulation.queues.thread
        if not thread.entered or thread.entered[-1][0] is not self._queue:
            raise RuntimeError("this stream is left before a stream that was entered later, or twice")
        _, device, queue = thread.entered.pop()
        simulation.switch_to(queue)
        thread.device = device

    def __repr__(self) -> str:
        return f"torch.Stream device_type=cuda, device_index={self.device_index}, stream_id={self.stream_id}"


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


def generic_stream(queue: Queue) -> Any:
    """A ``torch.Stream`` for a queue."""
    return Stream(stream_id=queue.stream_id, device_index=queue.device, device_type=CUDA_DEVICE_TYPE)


def query_cost(failures: int) -> int:
    """What the next query costs: doubling, so that a loop over ``query`` ends soon whatever it waits for."""
    return QUERY << min(failures, 40)


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
