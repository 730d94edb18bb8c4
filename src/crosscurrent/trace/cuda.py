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
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.trace.access import Kind, signature
from crosscurrent.trace.cuda_patches import Patches, install, nobody_listens
from crosscurrent.trace.recorder import DEFAULT_STREAM
from crosscurrent.trace.records import MemoryKind
from crosscurrent.trace.segments import Segments
from crosscurrent.trace.subclasses import has_own_dispatch
from crosscurrent.trace.tracer import Tracer

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_KNOWS_ITS_WAITS = frozenset({Kind.COPY, Kind.TO_COPY, Kind.FOREACH_COPY, Kind.WAITS, Kind.INDEX, Kind.PIN})


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

    def device_of(self, tensor: Tensor) -> int:
        """The index of the CUDA device of a plain tensor; negative for any other."""
        return tensor.get_device() if tensor.is_cuda else -1

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


class _Way(NamedTuple):
    """How an op is run."""

    func: Any
    """The op; kept, so that its id is its own."""
    run: Callable[..., Any]
    is_composite: bool
    touches_nothing: bool
    knows_its_waits: bool


def _way(func: Any) -> _Way:
    # An overload does nothing when it is called but call this; it is one Python frame less for each op.
    run = func._op if type(func) is torch._ops.OpOverload else func
    sign = signature(func)
    kind = sign.kind
    touches_nothing = kind is Kind.NOTHING and not sign.may_move
    return _Way(func, run, _is_composite(func), touches_nothing, kind in _KNOWS_ITS_WAITS)


_Held: TypeAlias = tuple[Callable[[], None], ...]
_NOTHING_HELD: _Held = ()


class _Here:
    """The callbacks of one thread that are held back while an op runs; None outside of ops."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: _Held | None = None


class _Local(threading.local):
    """What belongs to one thread."""

    def __init__(self) -> None:
        self.here = _Here()


class CudaDispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each op to a tracer after it ran. One for each thread."""

    supports_higher_order_operators = True

    def __init__(self, source: CudaSource) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = source
        self._local = source.local
        self._ways: dict[int, _Way] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides a handler from the compiler costs more than the handler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(has_own_dispatch(kind) for kind in types):
            return NotImplemented  # a tensor subclass takes its ops apart first
        if kwargs is None:
            kwargs = {}
        way = self._ways.get(id(func))
        if way is None:
            way = self._ways[id(func)] = _way(func)
        _, run, is_composite, touches_nothing, knows_its_waits = way
        if is_composite:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        tracer = self._source.tracer
        if tracer is None:  # a thread that outlives the watch
            return func(*args, **kwargs)
        if tracer.observers:
            tracer.before(func, args, kwargs)
        elif touches_nothing:
            return run(*args, **kwargs)
        here = self._local.here
        outer, here.held = here.held, _NOTHING_HELD
        try:
            out = run(*args, **kwargs)
        finally:
            held, here.held = here.held, outer
        if held and not knows_its_waits:
            for report in held:
                report()
        tracer.op(func, args, kwargs, out)
        return out


class CudaSource:
    """Taps the process for one tracer, from ``attach`` to ``detach``."""

    def __init__(self) -> None:
        self.environment = CudaEnvironment()
        self.tracer: Tracer | None = None
        self._process = os.getpid()
        self.local = _Local()
        self._mode: CudaDispatch | None = None
        self._patches = Patches()
        self._callbacks: list[tuple[Any, Callable[..., None]]] = []
        self._wait_stream = torch.cuda.Stream.wait_stream.__code__

    def attach(self, tracer: Tracer) -> None:
        """Start to tell ``tracer`` what happens."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch._C._activate_gpu_trace()
        self.tracer = tracer
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
            self.tracer = None
            return
        try:
            if self._mode is not None:
                self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        finally:
            self._restore()

    def _restore(self) -> None:
        self.tracer = None
        self._mode = None
        self._patches.restore()
        for registry, callback in self._callbacks:
            registry.callback_list.remove(callback)
        self._callbacks.clear()

    # -- ops -------------------------------------------------------------------------------------------

    @property
    def in_op(self) -> bool:
        """Whether this thread is inside of an op, whose schema says what it touches."""
        return self.local.here.held is not None

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
        here = self.local.here
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


def _is_composite(func: Any) -> bool:
    """Whether an op is to be taken apart: under inference mode PyTorch does not do it by itself."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Some ops have a kernel of their own besides, and then that is what runs without a watch.
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CUDA")
