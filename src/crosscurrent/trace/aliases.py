"""Pinned memory that goes from PyTorch to NumPy and back, and stays known on the way.

``torch.from_numpy(host.numpy())`` is the memory of ``host`` under another name: on a GPU it is pinned too,
and copies of it are asynchronous. So what is made of a watched array is put back into the storage that it
came from. ``np.asarray`` would strip a watched array of its class, and with it of all that is known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crosscurrent.trace.arrays import WatchedArray, touch, watched

_FROM_ARRAYS = ("from_numpy", "frombuffer", "as_tensor", "asarray", "tensor")


def aliases() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What to replace: owner, name, and what makes the replacement of what was there."""
    return [
        *((torch, name, _from_array) for name in _FROM_ARRAYS),
        (torch, "from_dlpack", _from_dlpack),
        (np, "asarray", _as_array),
        (np, "ascontiguousarray", _as_array),
        (np, "array", _array),
        (np, "frombuffer", _from_buffer),
    ]


def _source(data: Any) -> WatchedArray | None:
    """The watched array that an array or a buffer is a view of, if it is one."""
    while data is not None and not isinstance(data, WatchedArray):
        if isinstance(data, np.ndarray):
            data = data.base
        elif isinstance(data, memoryview):
            data = data.obj
        else:
            return None
    return data


def _from_array(before: Any) -> Any:
    @wraps(before)
    def make(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = before(data, *args, **kwargs)
        source = _source(data)
        if source is None or source._memory is None:
            return made
        if made.device.type != "cpu" or not source._memory.start <= made.data_ptr() < source._memory.stop:
            touch(source, False, before.__name__)  # a copy
            return made
        return _put_back(made, source._memory.tensor.untyped_storage())

    return make


def _put_back(made: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """The same tensor in the storage that its memory belongs to."""
    offset, rest = divmod(made.data_ptr() - storage.data_ptr(), made.element_size())
    if rest:
        raise NotImplementedError(
            f"an array of {made.dtype} that does not start at a multiple of its size cannot be watched; "
            "copy it before it becomes a tensor"
        )
    there = torch.empty(0, dtype=made.dtype).set_(storage, offset, made.shape, made.stride())
    return there.requires_grad_(made.requires_grad)


def _from_dlpack(before: Any) -> Any:
    @wraps(before)
    def from_dlpack(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if type(data) is Tensor and not args and not kwargs and data.device.type == "cpu":
            return data.detach()
        made: Tensor = before(data, *args, **kwargs)
        return made

    return from_dlpack


def _as_array(before: Any) -> Any:
    @wraps(before)
    def as_array(data: Any, *args: Any, **kwargs: Any) -> Any:
        if type(data) is Tensor and data.device.type == "cpu" and data.is_pinned() and not data.requires_grad:
            data = data.numpy()
        made = before(data, *args, **kwargs)
        if not isinstance(data, WatchedArray) or data._memory is None:
            return made
        if np.may_share_memory(made, data.view(np.ndarray)):
            return watched(made, data._memory.tensor, data._memory.listeners)
        touch(data, False, before.__name__)
        return made

    return as_array


def _array(before: Any) -> Any:
    as_array = _as_array(before)

    @wraps(before)
    def array(data: Any, *args: Any, **kwargs: Any) -> Any:
        # Copies of everything else, tensors too, are seen where their memory is handed out.
        return (
            as_array(data, *args, **kwargs)
            if isinstance(data, WatchedArray)
            else before(data, *args, **kwargs)
        )

    return array


def _from_buffer(before: Any) -> Any:
    @wraps(before)
    def from_buffer(buffer: Any, *args: Any, **kwargs: Any) -> Any:
        made = before(buffer, *args, **kwargs)
        source = _source(buffer)
        if source is None or source._memory is None:
            return made
        return watched(made, source._memory.tensor, source._memory.listeners)

    return from_buffer
