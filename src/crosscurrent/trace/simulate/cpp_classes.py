"""The classes of ``torch.cuda`` that are C++ below: ``Stream``, ``Event``, ``CUDAGraph``.

A CPU build of PyTorch has empty stand-ins in the place of the C++ classes, which are filled for the time of
a simulation. In a build with CUDA the C++ classes of streams and events cannot be changed, so that the Python
classes on top of them get the methods; that of graphs can, but not its objects, in whose place others come.
Either way the classes stay the same objects, so that ``from torch.cuda import Stream`` works however early it
was written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from crosscurrent.trace.simulate.current import running
from crosscurrent.trace.simulate.refusals import refuse

if TYPE_CHECKING:
    from crosscurrent.trace.patches import Patches

IN_CPP = issubclass(torch._C._CudaStreamBase, torch.Stream)
"""Whether this build of PyTorch has the C++ classes (CUDA and ROCm builds), not stand-ins."""

_cpp_event: Any = torch._C._CudaEventBase
_allocator = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_ssize_t)
_allocate = _allocator(("PyType_GenericAlloc", ctypes.pythonapi))

_ON_TOP = {"wait_event", "record_event", "__hash__", "__repr__"}
"""Methods that the Python classes have in terms of the others, if they have them."""


def blank(cls: type) -> Any:
    """An object of a class, of which C++ has initialized nothing.

    ``object.__new__`` refuses classes with a C++ base, and the constructor of streams asks the driver for
    the current device. An object of zeros is what such a constructor starts from, and its destructor finds
    nothing to give back.
    """
    if not IN_CPP or not issubclass(cls, (torch._C._CudaStreamBase, _cpp_event)):
        return object.__new__(cls)
    if issubclass(cls, _cpp_event):
        return _cpp_event.__new__(cls)  # asks nobody before it is recorded
    return _allocate(cls, 0)


def methods_of(cls: type) -> dict[str, object]:
    """The attributes of a class that belong onto a stand-in."""
    left_out = {"__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "__annotations__"}
    return {name: value for name, value in vars(cls).items() if name not in left_out}


def install_classes(patches: Patches, streams: type, events: type, graphs: type) -> None:
    """Give the methods of these three classes to those of ``torch.cuda``."""
    cuda: Any = torch.cuda
    if IN_CPP:
        patches.update(cuda.Stream, _on_python_class(cuda.Stream, streams) | _stream_extras(streams))
        patches.update(cuda.Event, _on_python_class(cuda.Event, events) | _event_extras(events))
        patches.update(torch._C._CUDAGraph, _in_place_of_cpp(methods_of(graphs), vars(graphs)["_clear"]))
    else:
        patches.update(torch._C._CudaStreamBase, methods_of(streams))
        patches.update(torch._C._CudaEventBase, methods_of(events))
        patches.update(torch._C._CUDAGraph, methods_of(graphs))
    # The Python class would make the wait from a record and a wait of its own: one call, one name.
    patches.set(cuda.Stream, "wait_stream", vars(streams)["wait_stream"])


def _on_python_class(cls: type, methods: type) -> dict[str, object]:
    kept = _ON_TOP & vars(cls).keys()
    return {name: value for name, value in methods_of(methods).items() if name not in kept}


def _stream_extras(methods: Any) -> dict[str, object]:
    """What the Python class of streams does before it calls C++."""

    def new(cls: Any, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if device is None or ("stream_id" in kwargs and "device_index" in kwargs):
            return methods.__new__(cls, priority=priority, **kwargs)
        with torch.cuda.device(device):
            return methods.__new__(cls, priority=priority, **kwargs)

    def equal(self: Any, other: object) -> bool:
        return isinstance(other, torch.cuda.Stream) and methods.__eq__(self, other)

    return {"__new__": new, "__eq__": equal}


def _event_extras(methods: Any) -> dict[str, object]:
    """What the Python class of events does: it takes its options by position, too."""

    def new(
        cls: Any,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Any:
        return methods.__new__(
            cls, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess, external=external
        )

    return {"__new__": new}


def _in_place_of_cpp(methods: dict[str, object], prepare: Callable[..., None]) -> dict[str, object]:
    """What the C++ class of graphs has for now: the methods, no others, and stand-ins for its objects.

    The Python class on top is left as it is: what its methods take, and do before they call these, differs
    from release to release.
    """
    cpp = torch._C._CUDAGraph
    others = [name for name in vars(cpp) if not name.startswith("_") and name not in methods]
    refused = {name: refuse(f"torch.cuda.CUDAGraph.{name}") for name in others}
    return methods | refused | {"__new__": _graph_maker(prepare)}


def _stand_in_for_graphs(real: Any) -> type:
    """A class for graphs: C++ insists on initializing those of its own class.

    Its objects say that they are of the real class, and have the methods which that has at the time.
    """

    class Graph:
        __class__ = property(lambda self: real)

        def __getattr__(self, name: str) -> Any:
            for cls in real.__mro__[:-1]:
                if name in vars(cls):
                    value = vars(cls)[name]
                    return value.__get__(self, real) if hasattr(value, "__get__") else value
            raise AttributeError(f"'CUDAGraph' object has no attribute {name!r}")

    return Graph


def _graph_maker(prepare: Callable[..., None]) -> Callable[..., Any]:
    real: Any = torch.cuda.CUDAGraph
    stand_in = _stand_in_for_graphs(real)

    def new(cls: Any, keep_graph: bool = False) -> Any:
        if cls is not real:
            raise NotImplementedError(
                f"simulated CUDA has no subclasses of torch.cuda.CUDAGraph ({cls.__qualname__}) in builds of "
                "PyTorch with CUDA; use CUDAGraph itself, or a CPU build"
            )
        running()
        graph = stand_in()
        prepare(graph)
        return graph

    return new
