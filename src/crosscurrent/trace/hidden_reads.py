"""What PyTorch reads without an op: tensors that are printed, storages that are saved.

Printing disables all dispatch modes, and saving hands the memory of a storage to a writer in C++. Both are
wrapped here, for the simulation and for a real GPU alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor


class Listener(Protocol):
    """Who wants to know: a tracer."""

    def looked_at(self, tensor: Tensor, name: str) -> None:
        """The host looks at a tensor's content, and waits if it lies on a device."""


Listeners = Callable[[], Sequence[Listener]]


def hidden_reads(listeners: Listeners) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What to replace: owner, name, and what makes the replacement of what was there.

    ``listeners`` gives who wants to know at the time of each read.
    """
    return [
        (torch._tensor_str, "_str", lambda before: _str(listeners, before)),
        (torch._C.PyTorchFileWriter, "write_record", lambda before: _write_record(listeners, before)),
        (torch.UntypedStorage, "_write_file", lambda before: _write_file(listeners, before)),
        *((owner, name, lambda before: _by_address(listeners, before)) for owner, name in _safetensors()),
    ]


def _safetensors() -> list[tuple[Any, str]]:
    """The function, by its name in old and in new versions, that reads a tensor by its address."""
    try:
        module = importlib.import_module("safetensors.torch")
    except ImportError:
        return []
    return [(module, name) for name in ("_tobytes", "_to_ndarray") if hasattr(module, name)]


def _by_address(listeners: Listeners, before: Any) -> Any:
    @wraps(before)
    def read(tensor: Any, *args: Any) -> Any:
        if tensor.device.type == "cpu":  # others are copied, by a copy that is seen
            for listener in listeners():
                listener.looked_at(tensor, "save")
        return before(tensor, *args)

    return read


def _str(listeners: Listeners, before: Any) -> Any:
    @wraps(before)
    def show(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # What function transforms and tensor subclasses wrap has no memory of its own.
        if type(tensor) in (Tensor, torch.nn.Parameter) and not _is_wrapped(tensor):
            for listener in listeners():
                listener.looked_at(tensor, "print")
        return before(tensor, *args, **kwargs)

    return show


def _is_wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _write_record(listeners: Listeners, before: Any) -> Any:
    @wraps(before)
    def write_record(writer: Any, name: Any, data: Any, *args: Any) -> Any:
        if isinstance(data, torch.UntypedStorage):
            _saved(listeners, data)
        return before(writer, name, data, *args)

    return write_record


def _write_file(listeners: Listeners, before: Any) -> Any:
    @wraps(before)
    def write_file(storage: torch.UntypedStorage, *args: Any) -> Any:
        _saved(listeners, storage)
        return before(storage, *args)

    return write_file


def _saved(listeners: Listeners, storage: torch.UntypedStorage) -> None:
    """Device memory was copied to the host before, by a copy that is seen."""
    told = listeners()
    if told and not storage.is_cuda and storage.is_pinned():
        content = torch.empty(0, dtype=torch.uint8).set_(storage)
        for listener in told:
            listener.looked_at(content, "save")
