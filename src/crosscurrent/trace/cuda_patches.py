"""What PyTorch's GPU trace has no callback for, wrapped at its Python class while a watch is entered."""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils._device import _device_constructors

from crosscurrent.trace.aliases import aliases
from crosscurrent.trace.arrays import ALIAS, watched
from crosscurrent.trace.hidden_reads import hidden_reads

if TYPE_CHECKING:
    from crosscurrent.trace.cuda import CudaSource
    from crosscurrent.trace.patches import Patches
    from crosscurrent.trace.recorder import Captured
    from crosscurrent.trace.tracer import Tracer

    Graphs: TypeAlias = weakref.WeakKeyDictionary[Any, "_Graph"]

_UNSEEN_KERNEL = "a Triton kernel: tell what it touches with crosscurrent.access"


def install(source: CudaSource, patches: Patches) -> None:
    """Wrap everything for ``source``."""
    patches.replace(torch.cuda.Event, "query", functools.partial(_event_query, source))
    patches.replace(torch.cuda.Event, "elapsed_time", functools.partial(_elapsed_time, source))
    patches.replace(torch.cuda.Stream, "query", functools.partial(_stream_query, source))
    patches.replace(torch.Tensor, "numpy", functools.partial(_numpy, source))
    patches.replace(torch.Tensor, "tolist", functools.partial(_tolist, source))
    patches.replace(torch.Tensor, "__dlpack__", functools.partial(_dlpack, source))
    patches.replace(torch.UntypedStorage, "resize_", functools.partial(_storage_resize, source))
    for owner, name, make in hidden_reads(functools.partial(_listeners, source)):
        patches.replace(owner, name, make)
    _device_constructors()  # kept for good at the first call, which has to see the real functions
    for owner, name, make in aliases():
        patches.replace_builtin(owner, name, make(getattr(owner, name)))
    graphs: Graphs = weakref.WeakKeyDictionary()
    patches.replace(torch.cuda.CUDAGraph, "capture_begin", functools.partial(_capture_begin, source))
    patches.replace(torch.cuda.CUDAGraph, "capture_end", functools.partial(_capture_end, source, graphs))
    patches.replace(torch.cuda.CUDAGraph, "replay", functools.partial(_graph_replay, source, graphs))
    patches.replace(torch.autograd, "_engine_run_backward", functools.partial(_backward, source))
    patches.replace(threading.Thread, "start", functools.partial(_thread_start, source))
    _watch_triton(source, patches)


def nobody_listens(registry: Any, patches: Patches) -> None:
    """Spare a registry without callbacks its loop over them, until there is one.

    Once PyTorch's GPU trace is on it stays on, and calls Python at each allocation and each free.
    """
    if registry.callback_list:
        return
    mine = vars(registry)

    def add_callback(callback: Callable[..., None]) -> None:
        listen()
        registry.add_callback(callback)

    def listen() -> None:
        mine.pop("fire_callbacks", None)
        mine.pop("add_callback", None)

    mine["fire_callbacks"] = "".format  # takes whatever it is given, does nothing, and is no Python code
    mine["add_callback"] = add_callback
    patches.callback(listen)


def _event_query(source: CudaSource, before: Any) -> Any:
    def query(event: Any) -> bool:
        done = bool(before(event))
        if done and source.tracer is not None and event.cuda_event:
            source.tracer.event_queried_true(event.cuda_event)
        return done

    return query


def _elapsed_time(source: CudaSource, before: Any) -> Any:
    def elapsed_time(event: Any, end_event: Any) -> float:
        time = float(before(event, end_event))  # raises unless both events are done
        if source.tracer is not None:
            source.tracer.event_queried_true(event.cuda_event)
            source.tracer.event_queried_true(end_event.cuda_event)
        return time

    return elapsed_time


def _stream_query(source: CudaSource, before: Any) -> Any:
    def query(stream: Any) -> bool:
        done = bool(before(stream))
        if done and source.tracer is not None:
            source.tracer.stream_queried_true(stream.device_index, stream.cuda_stream)
        return done

    return query


def _is_pinned(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_cuda and bool(tensor.is_pinned())
    )


def _listeners(source: CudaSource) -> list[Tracer]:
    return [] if source.tracer is None else [source.tracer]


def _numpy(source: CudaSource, before: Any) -> Any:
    def numpy(tensor: Any, *, force: bool = False) -> Any:
        array = before(tensor, force=force)
        if source.tracer is None or not _is_pinned(tensor):
            return array
        source.tracer.host_access(tensor, False, "numpy")
        return watched(array, tensor, functools.partial(_listeners, source))

    return numpy


def _tolist(source: CudaSource, before: Any) -> Any:
    def tolist(tensor: Any) -> Any:
        if source.tracer is not None and _is_pinned(tensor):
            source.tracer.host_access(tensor, False, "tolist")
        return before(tensor)

    return tolist


def _dlpack(source: CudaSource, before: Any) -> Any:
    def dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if source.tracer is not None:
            source.tracer.unknown("Tensor.__dlpack__", ALIAS)
        return before(tensor, *args, **kwargs)

    return dlpack


def _storage_resize(source: CudaSource, before: Any) -> Any:
    def resize_(storage: Any, size: Any) -> Any:
        result = before(storage, size)
        if source.tracer is not None:
            source.tracer.released(storage)
        return result

    return resize_


def _capture_begin(source: CudaSource, before: Any) -> Any:
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        before(graph, *args, **kwargs)
        if source.tracer is not None:
            source.tracer.capture_started()

    return capture_begin


def _capture_end(source: CudaSource, graphs: Graphs, before: Any) -> Any:
    def capture_end(graph: Any) -> None:
        captured = None if source.tracer is None else source.tracer.capture_ended()
        before(graph)
        if captured is not None:
            # A graph can be asked for its pool once it is there.
            graphs[graph] = _Graph(captured, source.environment.current_device(), graph.pool())

    return capture_end


@dataclass(slots=True)
class _Graph:
    """A captured graph, the pool that its memory comes from, and its latest launch."""

    captured: Captured
    device: int
    pool: Any
    launched: int | None = None


def _graph_replay(source: CudaSource, graphs: Graphs, before: Any) -> Any:
    def replay(graph: Any) -> None:
        before(graph)
        tracer = source.tracer
        if tracer is None:
            return
        this = graphs.get(graph)
        if this is not None:
            if sum(other.pool == this.pool for other in graphs.values()) > 1:
                tracer.pool_used(this.pool, this.device)
            this.launched = tracer.replayed(this.captured, this.device, this.launched)
        else:
            tracer.unknown(
                "CUDAGraph.replay", "a graph captured before the watch: what it touches is not known"
            )

    return replay


def _backward(source: CudaSource, before: Any) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if source.tracer is None:
            return before(*args, **kwargs)
        waiting = source.tracer.sites.waiting
        waiting.append(source.tracer.sites.here())
        try:
            return before(*args, **kwargs)
        finally:
            waiting.pop()

    return run_backward


def _thread_start(source: CudaSource, before: Any) -> Any:
    def start(thread: threading.Thread) -> None:
        run = thread.run

        def watched() -> None:
            vars(thread).pop("run", None)
            source.run_thread(run)

        thread.run = watched  # type: ignore[method-assign]
        before(thread)

    return start


def _watch_triton(source: CudaSource, patches: Patches) -> None:
    """List the launches of Triton kernels that no dispatcher sees: those outside of any operator."""
    try:
        knobs = importlib.import_module("triton.knobs")
    except ImportError:
        return
    hooks = getattr(knobs.runtime, "launch_enter_hook", None)
    if hooks is None or not hasattr(hooks, "add"):
        return

    def launched(metadata: Any) -> None:
        if source.tracer is not None and not source.in_op:
            name = metadata.get().get("name", "?") if hasattr(metadata, "get") else "?"
            source.tracer.unknown(f"triton {name}", _UNSEEN_KERNEL)

    hooks.add(launched)
    patches.callback(hooks.remove, launched)
