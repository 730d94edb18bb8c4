"""The source of a trace on a real GPU: a dispatch mode for ops, and taps for streams and events.

PyTorch's GPU trace callbacks tell of events (made, recorded, waited for, synchronized, destroyed) and of
stream and device synchronization, wherever in PyTorch they come from. What has no callback is wrapped at
its Python class: ``query``, ``numpy``, ``tolist``, storage resizing, graphs, starting threads. Streams are
named by their CUDA handle, which callbacks and ops have in common; the default stream's is 0 on every
device, and callbacks fire while its device is current.

Callbacks that fire inside of an op are PyTorch's own. For ops whose waits ``copies`` and ``waits`` know they
are dropped, lest they count twice; for all others they are taken in before the op, so that they order
what came before it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.trace.cuda_patches import install, nobody_listens
from crosscurrent.trace.handler import Handler, Here, Tap
from crosscurrent.trace.patches import Patches
from crosscurrent.trace.recorder import DEFAULT_STREAM
from crosscurrent.trace.records import MemoryKind
from crosscurrent.trace.segments import Segments
from crosscurrent.trace.subclasses import has_own_dispatch
from crosscurrent.trace.tracer import Tracer

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def _cuda_device_of(tensor: Tensor) -> int:
    return tensor.get_device() if tensor.is_cuda else -1


class CudaEnvironment:
    """The real machine."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], str] = {}
        self._num_streams: dict[int, int] = {}
        # Called for each op, so it is PyTorch's own function; builds without CUDA have none.
        self.current_stream: Callable[[int], int] = getattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: DEFAULT_STREAM
        )
        """Gives the handle of the calling thread's current stream; autograd's threads set theirs, too."""
        # For each result: PyTorch's own as well, where no other accelerator's tensors have indices.
        accelerator = torch.accelerator.current_accelerator()
        is_cuda_only = accelerator is None or accelerator.type == "cuda"
        self.device_of: Callable[[Tensor], int] = Tensor.get_device if is_cuda_only else _cuda_device_of
        """The index of the CUDA device of a plain tensor; negative for any other."""
        self.segments = Segments()

    def classify(self, tensor: Tensor) -> tuple[MemoryKind, int] | None:
        """Device memory, pinned memory, or None. Fake tensors and wrappers have no memory of their own."""
        if type(tensor) not in _PLAIN_TENSORS and has_own_dispatch(type(tensor)):
            return None
        if tensor.is_cuda:
            return MemoryKind.DEVICE, tensor.get_device()
        if tensor.device.type == "cpu" and tensor.is_pinned():
            return MemoryKind.PINNED, -1
        return None

    def allocated_on(self, device: int, storage: torch.UntypedStorage) -> int:
        """The stream that memory was allocated on, of which nothing was seen."""
        return self.segments.stream_of(device, storage.data_ptr())

    def current_device(self) -> int:
        """The calling thread's current device."""
        return int(torch._C._cuda_getDevice())

    def stream_name(self, device: int, stream: int) -> str:
        """``cuda:0 default``, or ``cuda:0 stream 3``, numbered as they appear."""
        if stream == 0:
            return f"cuda:{device} default"
        name = self._names.get((device, stream))
        if name is None:
            number = self._num_streams[device] = self._num_streams.get(device, 0) + 1
            name = self._names[device, stream] = f"cuda:{device} stream {number}"
        return name

    def stream_key(self, stream: Any) -> tuple[int, int]:
        """The device and the handle of a ``torch.Stream``."""
        real = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        return real.device_index, real.cuda_stream


class CudaDispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each op to a tracer after it ran. One for each thread."""

    supports_higher_order_operators = True

    def __init__(self, source: CudaSource) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Found before the method of the class. PyTorch insists on a method of this very object.
        self.__torch_dispatch__ = MethodType(  # type: ignore[method-assign]
            Handler(source.tap).handle, self
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides a handler from the compiler costs more than the handler


class _Local(threading.local):
    """What belongs to one thread."""

    def __init__(self) -> None:
        self.here = Here()


class CudaSource:
    """Taps the process for one tracer, from ``attach`` to ``detach``."""

    def __init__(self) -> None:
        self.environment = CudaEnvironment()
        self.tap = Tap(_Local())
        self._process = os.getpid()
        self._mode: CudaDispatch | None = None
        self._patches = Patches()
        self._callbacks: list[tuple[Any, Callable[..., None]]] = []
        self._wait_stream = torch.cuda.Stream.wait_stream.__code__

    @property
    def tracer(self) -> Tracer | None:
        """Whom it tells what happens, while it does."""
        return self.tap.tracer

    def attach(self, tracer: Tracer) -> None:
        """Start to tell ``tracer`` what happens."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch._C._activate_gpu_trace()
        self.tap.tracer = tracer
        try:
            self._register()
            install(self, self._patches)
            self._mode = CudaDispatch(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._restore()
            raise

    def detach(self, tracer: Tracer) -> None:
        """Tell it nothing any more, and put everything back; the child of a fork leaves it as it is."""
        assert tracer is self.tracer, "a source belongs to one tracer"
        if os.getpid() != self._process:
            self.tap.tracer = None
            return
        try:
            if self._mode is not None:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        finally:
            self._restore()

    def _restore(self) -> None:
        self.tap.tracer = None
        self._mode = None
        self._patches.close()
        for registry, callback in self._callbacks:
            registry.callback_list.remove(callback)
        self._callbacks.clear()

    # -- ops -------------------------------------------------------------------------------------------

    @property
    def in_op(self) -> bool:
        """Whether this thread is inside of an op, whose schema says what it touches."""
        return self.tap.here().held is not None

    def run_thread(self, run: Callable[[], None]) -> None:
        """Run a new thread's work under the watch: dispatch modes are per thread."""
        if self.tracer is None:
            run()
            return
        with CudaDispatch(self):
            run()

    # -- streams and events ----------------------------------------------------------------------------

    def _register(self) -> None:
        for registry, handler in (
            (_gpu_trace.EventCreationCallbacks, self._event_gone),
            (_gpu_trace.EventDeletionCallbacks, self._event_gone),
            (_gpu_trace.EventRecordCallbacks, self._event_recorded),
            (_gpu_trace.EventWaitCallbacks, self._event_waited),
            (_gpu_trace.EventSynchronizationCallbacks, self._event_synchronized),
            (_gpu_trace.StreamSynchronizationCallbacks, self._stream_synchronized),
            (_gpu_trace.DeviceSynchronizationCallbacks, self._device_synchronized),
        ):
            registry.add_callback(handler)  # type: ignore[arg-type]
            self._callbacks.append((registry, handler))
        for unused in (_gpu_trace.MemoryAllocationCallbacks, _gpu_trace.MemoryDeallocationCallbacks):
            nobody_listens(unused, self._patches)

    def report(self, tap: Callable[..., None], *args: Any) -> None:
        """Pass something on, now or (inside of an op) once it is known what it belongs to."""
        if self.tracer is not None and self.tracer.muted:
            return
        here = self.tap.here()
        if here.held is None:
            tap(*args)
        else:
            here.held = (*here.held, partial(tap, *args))

    def _via(self, otherwise: str) -> str:
        """``wait_stream`` if that is where an event is recorded or waited for, four frames up at most."""
        frame = sys._getframe(2)
        for _ in range(5):
            if frame.f_code is self._wait_stream:
                return "wait_stream"
            if frame.f_back is None:
                break
            frame = frame.f_back
        return otherwise

    def _event_gone(self, event: int) -> None:
        # A handle that is made, or destroyed, says nothing any more about an earlier event.
        if self.tracer is not None:
            self.report(self.tracer.event_gone, event)

    def _event_recorded(self, event: int, stream: int) -> None:
        if self.tracer is not None:
            device = self.environment.current_device()
            self.report(self.tracer.event_recorded, event, device, stream, self._via("record"))

    def _event_waited(self, event: int, stream: int) -> None:
        if self.tracer is not None:
            device = self.environment.current_device()
            self.report(self.tracer.event_waited, event, device, stream, self._via("wait_event"))

    def _event_synchronized(self, event: int) -> None:
        if self.tracer is not None:
            self.report(self.tracer.event_synchronized, event)

    def _stream_synchronized(self, stream: int) -> None:
        if self.tracer is not None:
            self.report(self.tracer.stream_synchronized, self.environment.current_device(), stream)

    def _device_synchronized(self) -> None:
        if self.tracer is not None:
            self.report(self.tracer.device_synchronized, self.environment.current_device())
