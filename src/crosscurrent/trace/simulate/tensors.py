"""The methods of ``torch.Tensor`` that know about devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from crosscurrent.trace.arrays import watched
from crosscurrent.trace.simulate.memory import PINNED
from crosscurrent.trace.simulate.plans import EXPLICIT_CPU
from crosscurrent.trace.simulate.streams import running

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.simulation import Simulation

_base = torch._C.TensorBase
_CPU = torch.device("cpu")
_TO_NAMES = ("dtype", "non_blocking", "copy")


class _Move(torch.autograd.Function):
    """A copy to another device whose gradient travels back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        source: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool, layout: Any
    ) -> Tensor:
        return _copied(source, device, dtype, non_blocking, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.device, ctx.dtype = inputs[0].device, inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.device, ctx.dtype), None, None, None, None


class _ReturnTo(torch.autograd.Function):
    """The same tensor, whose gradient goes to the device that it came from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(source: Tensor) -> Tensor:
        return source.view_as(source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.device = inputs[0].device

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.device)


def _apply(function: Any, *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


def move(
    tensor: Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    layout: torch.memory_format | None = None,
) -> Tensor:
    """Copy a tensor to another device, as ``Tensor.to`` does."""
    running()
    if tensor.requires_grad and torch.is_grad_enabled():
        moved: Tensor = _apply(_Move, tensor, device, dtype, non_blocking, layout)
        return moved
    return _copied(tensor, device, dtype, non_blocking, layout)


def _copied(
    tensor: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool, layout: Any
) -> Tensor:
    options: dict[str, Any] = {"device": EXPLICIT_CPU if device.type == "cpu" else device}
    if dtype is not None:
        options["dtype"] = dtype
    if non_blocking:
        options["non_blocking"] = True
    if layout is not None:
        options["memory_format"] = layout
    copied: Tensor = torch.ops.aten._to_copy.default(tensor, **options)
    return copied


def tensor_methods(simulation: Simulation) -> dict[str, object]:
    """The replacements, by name, for the class ``torch.Tensor``."""
    return {
        **_properties(simulation),
        **_moves(simulation),
        **_host_views(simulation),
        **_factories(simulation),
        **_others(simulation),
    }


def _properties(simulation: Simulation) -> dict[str, object]:
    memory = simulation.memory
    devices = [torch.device("cuda", index) for index in range(simulation.num_devices)]
    real_device = _base.device.__get__

    def device(self: Tensor) -> torch.device:
        index = memory.device_of(self)
        return devices[index] if index >= 0 else real_device(self)

    def is_cuda(self: Tensor) -> bool:
        return memory.device_of(self) >= 0

    def is_cpu(self: Tensor) -> bool:
        return memory.device_of(self) < 0 and real_device(self).type == "cpu"

    def get_device(self: Tensor) -> int:
        return memory.device_of(self)

    return {
        "device": property(device),
        "is_cuda": property(is_cuda),
        "is_cpu": property(is_cpu),
        "get_device": get_device,
    }


def _moves(simulation: Simulation) -> dict[str, object]:
    real_to, real_copy = _base.to, _base.copy_

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function_unary(self):
            return handle_torch_function(Tensor.to, (self,), self, *args, **kwargs)
        device, rest, options = _parse_to(simulation, args, kwargs)
        if device is None or device == self.device or device.type not in ("cpu", "cuda"):
            if device is not None and device.type not in ("cpu", "cuda"):
                options["device"] = device
            return real_to(self, *rest, **options)
        names = dict(zip(_TO_NAMES, rest, strict=False)) | options
        layout = names.get("memory_format")
        return move(self, device, names.get("dtype"), bool(names.get("non_blocking")), layout)

    def cuda(
        self: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        target = torch.device("cuda", simulation.device_index(device))
        if target == self.device:
            return self
        return move(self, target, None, non_blocking, memory_format)

    def cpu(self: Tensor, memory_format: torch.memory_format | None = None) -> Tensor:
        if self.device.type == "cpu":
            return self if memory_format is None else self.contiguous(memory_format=memory_format)
        return move(self, _CPU, None, False, memory_format)

    def copy_(self: Tensor, src: Any, non_blocking: bool = False) -> Tensor:
        if (
            isinstance(src, Tensor)
            and src.requires_grad
            and torch.is_grad_enabled()
            and src.device != self.device
        ):
            src = _apply(_ReturnTo, src)
        return real_copy(self, src, non_blocking)

    def type_as(self: Tensor, tensor: Tensor) -> Tensor:
        return self.to(device=tensor.device, dtype=tensor.dtype)

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        block = simulation.memory.block_of(self)
        if block is not None and block.device == PINNED:
            return self
        simulation.check_thread()
        pinned: Tensor = torch.ops.aten._pin_memory.default(self)
        return pinned

    def is_pinned(self: Tensor, device: Any = None) -> bool:
        block = simulation.memory.block_of(self)
        return block is not None and block.device == PINNED

    return {
        "to": to,
        "cuda": cuda,
        "cpu": cpu,
        "copy_": copy_,
        "type_as": type_as,
        "pin_memory": pin_memory,
        "is_pinned": is_pinned,
    }


def _parse_to(
    simulation: Simulation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
    """The device that a call of ``to`` asks for, and its other arguments: ``dtype`` first."""
    options = dict(kwargs)
    other = options.pop("other", None)
    wanted: Any = options.pop("device", None)
    if args and isinstance(args[0], Tensor):
        other, args = args[0], args[1:]
    elif args and (args[0] is None or isinstance(args[0], (str, int, torch.device))):
        wanted, args = args[0], args[1:]
        if not args and "dtype" not in options:
            args = ()
    if other is not None:
        return other.device, (other.dtype, *args), options
    if args and args[0] is None:
        options.update(zip(_TO_NAMES[1:], args[1:], strict=False))
        args = ()
    return simulation.full_device(wanted), args, options


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
        told(self, "__dlpack__")
        return real_dlpack(self, *args, **kwargs)

    return {"numpy": numpy, "tolist": tolist, "__dlpack__": dlpack}


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
