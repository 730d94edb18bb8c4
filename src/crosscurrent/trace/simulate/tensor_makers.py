"""Methods of ``torch.Tensor`` that make tensors, or hand their memory to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crosscurrent.trace.arrays import ALIAS, watched
from crosscurrent.trace.simulate.memory import PINNED
from crosscurrent.trace.simulate.tensors import move

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.simulation import Simulation

_base = torch._C.TensorBase
_CPU = torch.device("cpu")


def maker_methods(simulation: Simulation) -> dict[str, object]:
    """The replacements, by name, for the class ``torch.Tensor``."""
    return {**_host_views(simulation), **_factories(simulation), **_others(simulation)}


def _host_views(simulation: Simulation) -> dict[str, object]:
    """What hands the memory of a tensor to the host, or reads it there."""
    memory = simulation.memory
    real_numpy, real_tolist, real_dlpack = _base.numpy, _base.tolist, Tensor.__dlpack__

    def told(tensor: Tensor, name: str) -> bool:
        block = memory.block_of(tensor) if simulation.tracers else None
        if block is None or block.device != PINNED:
            return False
        for tracer in simulation.tracers:
            tracer.host_access(tensor, False, name)
        return True

    def numpy(self: Tensor, *, force: bool = False) -> Any:
        if memory.device_of(self) >= 0:
            if not force:
                raise TypeError(
                    f"can't convert {self.device} device type tensor to numpy. "
                    "Use Tensor.cpu() to copy the tensor to host memory first."
                )
            self = self.cpu()
        array = real_numpy(self, force=force)
        return watched(array, self, lambda: simulation.tracers) if told(self, "numpy") else array

    def tolist(self: Tensor) -> Any:
        if memory.device_of(self) >= 0:
            self = self.detach().cpu()
        told(self, "tolist")
        return real_tolist(self)

    def dlpack(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if memory.device_of(self) >= 0:
            raise NotImplementedError("simulated CUDA cannot share device memory (Tensor.__dlpack__)")
        if told(self, "__dlpack__"):
            for tracer in simulation.tracers:
                tracer.unknown("Tensor.__dlpack__", ALIAS)
        return real_dlpack(self, *args, **kwargs)

    def for_the_host_only(name: str) -> Callable[..., Tensor]:
        real: Callable[..., Tensor] = getattr(_base, name)

        def method(self: Tensor, *args: Any) -> Tensor:
            if memory.device_of(self) >= 0:
                raise TypeError(f"{name} is only implemented on CPU tensors")
            told(self, name)
            return real(self, *args)

        return method

    each = {name: for_the_host_only(name) for name in ("apply_", "map_", "map2_")}
    return each | {"numpy": numpy, "tolist": tolist, "__dlpack__": dlpack}


def _factories(simulation: Simulation) -> dict[str, object]:
    """``new_tensor`` and the old ``new``; the other ``new_`` methods reach the dispatcher as they are."""
    real_new_tensor = _base.new_tensor

    def on_int_device(name: str) -> Callable[..., Tensor]:
        real: Callable[..., Tensor] = getattr(_base, name)

        def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if type(kwargs.get("device")) is int:
                kwargs["device"] = torch.device("cuda", kwargs["device"])
            return real(self, *args, **kwargs)

        method.__name__ = name
        return method

    def new_tensor(
        self: Tensor,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        **options: Any,
    ) -> Tensor:
        target = self.device if device is None else simulation.full_device(device)
        made = real_new_tensor(self, data, dtype=dtype, device=_CPU, **options)
        if target is not None and target.type == "cuda":
            made = move(made.detach(), target)
        elif pin_memory:
            made = made.pin_memory()
        return made.requires_grad_(requires_grad)

    def new(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if memory_of(self) < 0:
            return _base.new(self, *args, **kwargs)
        if len(args) == 1 and not isinstance(args[0], int):
            if isinstance(args[0], torch.Size):
                return self.new_empty(args[0])
            return self.new_tensor(args[0], dtype=self.dtype)
        return self.new_empty(args)

    memory_of = simulation.memory.device_of
    names = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
    return {name: on_int_device(name) for name in names} | {"new_tensor": new_tensor, "new": new}


def _others(simulation: Simulation) -> dict[str, object]:
    memory = simulation.memory
    real_type = _base.type
    real_share: Any = Tensor.share_memory_
    real_is_shared: Any = Tensor.is_shared

    def record_stream(self: Tensor, s: Any) -> None:
        if memory.device_of(self) < 0:
            raise NotImplementedError(
                "record_stream is only for tensors on a CUDA device, this one is on the CPU"
            )
        if not isinstance(s, torch.Stream):
            raise TypeError(f"record_stream(): expected a stream, got {type(s).__name__}")
        for tracer in simulation.tracers:
            tracer.stream_used(self, s.device_index, s.stream_id)

    def type_(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name = real_type(self)
            return name.replace("torch.", "torch.cuda.", 1) if memory.device_of(self) >= 0 else name
        if isinstance(dtype, torch.dtype):
            return self.to(dtype, non_blocking=non_blocking)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        plain = name.replace("torch.cuda.", "torch.", 1)
        wanted = torch.empty(0, device=_CPU).type(plain).dtype if plain == name else _dtype_of(plain)
        device = _CPU if plain == name else torch.device("cuda", simulation.device_index(None))
        return self.to(device, wanted, non_blocking=non_blocking)

    def share_memory_(self: Tensor) -> Tensor:
        return self if memory.device_of(self) >= 0 else real_share(self)

    def is_shared(self: Tensor) -> bool:
        return memory.device_of(self) >= 0 or real_is_shared(self)

    return {
        "record_stream": record_stream,
        "type": type_,
        "share_memory_": share_memory_,
        "is_shared": is_shared,
    }


def _dtype_of(name: str) -> torch.dtype:
    return real_dtype(torch.empty(0, device=_CPU), name)


def real_dtype(tensor: Tensor, name: str) -> torch.dtype:
    """The dtype that a name such as ``torch.FloatTensor`` stands for."""
    dtype: torch.dtype = _base.type(tensor, name).dtype
    return dtype
