"""NumPy arrays that tell what the host does to pinned memory through them.

``tensor.numpy()`` hands out memory, and what is done with it happens without PyTorch. For pinned tensors a
watched program gets an ``ndarray`` of this subclass: views of it stay watched and touch nothing; indexing,
assignment, ufuncs, NumPy's functions and methods are reads and writes of exactly the bytes that they name.

What cannot be seen: access through the buffer protocol (``memoryview(array)``), by C code, or through the
array's address. Tensors made of an array are followed by ``aliases``. Handing out the array in the
first place counts as a read of all of it, so that a missing wait shows at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from crosscurrent.trace.memory import region_of_loops
from crosscurrent.trace.records import Region

_READS = (
    "__bool__ __complex__ __contains__ __copy__ __deepcopy__ __float__ __index__ __int__ all any"
    " argmax argmin argpartition argsort astype choose clip compress copy cumprod cumsum diagonal dot"
    " dump dumps flatten item max mean min nonzero prod ravel repeat reshape round searchsorted"
    " squeeze std sum take tobytes tofile tolist trace var"
)
_WRITES = "fill partition put setfield sort"
_WRITING_FUNCTIONS = (np.copyto, np.put, np.place, np.putmask, np.fill_diagonal, np.put_along_axis)


ALIAS = "the memory is shared under another name: what is done to it there is not put together with the rest"
"""Why an exchange through DLPack is not understood."""


class Listener(Protocol):
    """Who wants to know: a tracer."""

    def host_bytes(
        self, tensor: Tensor, access: tuple[Region, tuple[int, ...], str], write: bool, name: str
    ) -> None:
        """The host touches a region of a tensor's storage, as an array of some shape and type."""


class _Memory:
    """The storage that arrays are views of, and who wants to know."""

    __slots__ = ("listeners", "start", "stop", "tensor")

    def __init__(self, tensor: Tensor, listeners: Callable[[], Sequence[Listener]]) -> None:
        storage = tensor.untyped_storage()
        self.tensor = tensor
        self.start = storage.data_ptr()
        self.stop = self.start + storage.nbytes()
        self.listeners = listeners


class WatchedArray(np.ndarray[Any, Any]):
    """An array in pinned memory."""

    _memory: _Memory | None = None

    def __array_finalize__(self, source: object) -> None:
        self._memory = getattr(source, "_memory", None)

    def __getitem__(self, key: Any) -> Any:
        result = super().__getitem__(key)
        if isinstance(result, WatchedArray):
            return self._settle(result, "getitem")
        touch(super().__getitem__((*key, ...) if isinstance(key, tuple) else (key, ...)), False, "getitem")
        return result

    def __setitem__(self, key: Any, value: Any) -> None:
        touch(value, False, "setitem")
        target = super().__getitem__((*key, ...) if isinstance(key, tuple) else (key, ...))
        touch(target if _is_ours(target) else self, True, "setitem")
        super().__setitem__(key, _plain(value))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        for place, value in enumerate(inputs):
            touch(value, False, ufunc.__name__)
            if method == "at" and place == 0:
                touch(value, True, ufunc.__name__)
        if out is not None:
            for target in out:
                touch(target, True, ufunc.__name__)
            options["out"] = _plain(out)
        result = getattr(ufunc, method)(*_plain(inputs), **options)
        if out is None:
            return result
        return out[0] if len(out) == 1 else out

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = func(*_plain(args), **_plain(kwargs))
        written = [kwargs["out"]] if kwargs.get("out") is not None else []
        if func in _WRITING_FUNCTIONS:
            written.append(args[0] if args else next(iter(kwargs.values())))
        views = [self._rewrap(each) for each in (result if isinstance(result, (list, tuple)) else [result])]
        if not any(isinstance(view, WatchedArray) for view in views):
            for value in _watched_in((args, kwargs)):
                if not any(value is target for target in written):
                    touch(value, False, func.__name__)
        for target in written:
            touch(target, True, func.__name__)
        return type(result)(views) if type(result) in (list, tuple) else views[0]

    def __reduce__(self) -> Any:
        touch(self, False, "reduce")
        return _plain(self).__reduce__()

    def _rewrap(self, result: Any) -> Any:
        """A plain result of NumPy in the memory of this array is watched, too."""
        if isinstance(result, np.ndarray) and self._memory is not None and _lies_in(result, self._memory):
            view = result.view(WatchedArray)
            view._memory = self._memory
            return view
        return result

    def _settle(self, result: Any, name: str) -> Any:
        """A view touches nothing; a copy was a read, and is an ordinary array."""
        if _is_ours(result):
            return result
        touch(self, False, name)
        return _plain(result)


def watched(array: Any, tensor: Tensor, listeners: Callable[[], Sequence[Listener]]) -> Any:
    """``tensor.numpy()``, watched. ``listeners`` gives who wants to know at the time of each access."""
    view = array.view(WatchedArray)
    view._memory = _Memory(tensor, listeners)
    return view


def _lies_in(array: np.ndarray[Any, Any], memory: _Memory) -> bool:
    address: int = array.__array_interface__["data"][0]
    return memory.start <= address < memory.stop


def _is_ours(value: Any) -> bool:
    return isinstance(value, WatchedArray) and value._memory is not None and _lies_in(value, value._memory)


def _plain(value: Any) -> Any:
    if isinstance(value, WatchedArray):
        return value.view(np.ndarray)
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items()}
    return value


def _watched_in(value: Any) -> list[WatchedArray]:
    if isinstance(value, WatchedArray):
        return [value]
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (list, tuple):
        return [found for each in value for found in _watched_in(each)]
    return []


def touch(value: Any, write: bool, name: str) -> None:
    """Tell the listeners about an access to an array, if it lies in memory that is watched."""
    if not _is_ours(value):
        return
    memory: _Memory = value._memory
    listeners = memory.listeners()
    if not listeners:
        return
    start = value.__array_interface__["data"][0] - memory.start
    region = region_of_loops(start, zip(value.shape, value.strides, strict=True), value.itemsize)
    if region is not None:
        for listener in listeners:
            listener.host_bytes(
                memory.tensor, (region, value.shape, str(value.dtype)), write, f"numpy.{name}"
            )


def _reading(name: str) -> Any:
    before = getattr(np.ndarray, name)

    def method(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("out")
        if target is not None:
            touch(self, False, name)
            touch(target, True, name)
            before(_plain(self), *_plain(args), **{**kwargs, "out": _plain(target)})
            return target
        return self._settle(self._rewrap(before(_plain(self), *_plain(args), **kwargs)), name)

    method.__name__ = name
    return method


def _writing(name: str) -> Any:
    before = getattr(np.ndarray, name)

    def method(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        touch(self, True, name)
        return before(_plain(self), *_plain(args), **_plain(kwargs))

    method.__name__ = name
    return method


for _name in _READS.split():
    setattr(WatchedArray, _name, _reading(_name))
for _name in _WRITES.split():
    setattr(WatchedArray, _name, _writing(_name))
