"""The methods of ``torch.UntypedStorage`` that know about devices.

Copies between storages go through byte tensors, so that they are ops like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from crosscurrent.trace.simulate.memory import PINNED, Block

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.simulation import Simulation

_CPU = torch.device("cpu")
_base: Any = torch._C.StorageBase


def storage_methods(simulation: Simulation) -> dict[str, object]:
    """The replacements, by name, for the class ``torch.UntypedStorage``."""
    return {**_queries(simulation), **_copies(simulation), **_elements(simulation)}


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=_CPU).set_(storage)


def _block_of(simulation: Simulation, storage: UntypedStorage) -> Block | None:
    return simulation.memory.blocks.get(storage._cdata)


def _queries(simulation: Simulation) -> dict[str, object]:
    real_device = _base.device.__get__

    def index(self: UntypedStorage) -> int:
        block = _block_of(simulation, self)
        return block.device if block is not None and block.device >= 0 else -1

    def device(self: UntypedStorage) -> torch.device:
        place = index(self)
        return torch.device("cuda", place) if place >= 0 else real_device(self)

    def is_cuda(self: UntypedStorage) -> bool:
        return index(self) >= 0

    def is_pinned(self: UntypedStorage, device: Any = "cuda") -> bool:
        block = _block_of(simulation, self)
        return block is not None and block.device == PINNED

    return {
        "device": property(device),
        "is_cuda": property(is_cuda),
        "get_device": index,
        "is_pinned": is_pinned,
    }


def _copies(simulation: Simulation) -> dict[str, object]:
    real_resize = _base.resize_

    def to(self: UntypedStorage, *, device: Any, non_blocking: bool = False) -> UntypedStorage:
        target = simulation.full_device(device)
        if target == self.device:
            return self
        return _bytes_of(self).to(target, non_blocking=non_blocking).untyped_storage()

    def cuda(self: UntypedStorage, device: Any = None, non_blocking: bool = False) -> UntypedStorage:
        return to(
            self, device=torch.device("cuda", simulation.device_index(device)), non_blocking=non_blocking
        )

    def cpu(self: UntypedStorage) -> UntypedStorage:
        return to(self, device=_CPU)

    def pin_memory(self: UntypedStorage, device: Any = "cuda") -> UntypedStorage:
        return _bytes_of(self).pin_memory().untyped_storage()

    def clone(self: UntypedStorage) -> UntypedStorage:
        return _bytes_of(self).clone().untyped_storage()

    def copy_(self: UntypedStorage, source: Any, non_blocking: bool | None = None) -> UntypedStorage:
        source = source if isinstance(source, UntypedStorage) else source.untyped()
        _bytes_of(self).copy_(_bytes_of(source), bool(non_blocking))
        return self

    def resize_(self: UntypedStorage, size: int) -> UntypedStorage:
        before = self.nbytes()
        real_resize(self, size)
        block = _block_of(simulation, self)
        if block is not None and size != before:
            simulation.memory.retag(self, block.device)
            for tracer in simulation.tracers:
                tracer.released(self)
        return self

    return {
        "to": to,
        "cuda": cuda,
        "cpu": cpu,
        "pin_memory": pin_memory,
        "clone": clone,
        "copy_": copy_,
        "resize_": resize_,
    }


def _refused(name: str) -> Any:
    def method(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"simulated CUDA cannot share device memory between processes (Storage.{name}): "
            "send `tensor.cpu()`"
        )

    return method


def _elements(simulation: Simulation) -> dict[str, object]:
    real_write = _base._write_file
    real_get, real_set, real_share = _base.__getitem__, _base.__setitem__, UntypedStorage.share_memory_

    def write_file(self: UntypedStorage, *args: Any) -> None:
        real_write(_bytes_of(self).cpu().untyped_storage() if self.is_cuda else self, *args)

    def fill_(self: UntypedStorage, value: int) -> UntypedStorage:
        _bytes_of(self).fill_(value)
        return self

    def tolist(self: UntypedStorage) -> list[int]:
        values: list[int] = _bytes_of(self).tolist()
        return values

    def getitem(self: UntypedStorage, index: Any) -> Any:
        if _block_of(simulation, self) is None or isinstance(index, slice):
            return real_get(self, index)
        return _bytes_of(self)[index].item()

    def setitem(self: UntypedStorage, index: Any, value: Any) -> None:
        if _block_of(simulation, self) is None:
            real_set(self, index, value)
        else:
            _bytes_of(self)[index] = value

    def share_memory_(self: UntypedStorage, *args: Any, **kwargs: Any) -> UntypedStorage:
        if self.is_cuda:
            return self
        shared: UntypedStorage = real_share(self, *args, **kwargs)
        return shared

    shares: tuple[str, ...] = ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda")
    return {name: _refused(name) for name in shares} | {
        "_write_file": write_file,
        "fill_": fill_,
        "tolist": tolist,
        "__getitem__": getitem,
        "__setitem__": setitem,
        "share_memory_": share_memory_,
    }
