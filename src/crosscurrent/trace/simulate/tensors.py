"""The methods of ``torch.Tensor`` that know about devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from crosscurrent.trace.simulate.current import running
from crosscurrent.trace.simulate.memory import PINNED
from crosscurrent.trace.simulate.transfers import EXPLICIT_CPU

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
    }


def _properties(simulation: Simulation) -> dict[str, object]:
    memory = simulation.memory
    devices = [torch.device("cuda", index) for index in range(simulation.num_devices)]
    real_device = _base.device.__get__
    get_mode, fake = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE

    def device(self: Tensor) -> torch.device:
        if get_mode(fake) is not None:
            return real_device(self)  # a tracer makes fake tensors, for which the CPU is what there is
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
        if device is not None and device.type not in ("cpu", "cuda"):
            return real_to(self, device, *rest, **options)
        if device is None or device == self.device:
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
    if other is not None:
        return other.device, (other.dtype, *args), options
    if args and args[0] is None:
        options.update(zip(_TO_NAMES[1:], args[1:], strict=False))
        args = ()
    return simulation.full_device(wanted), args, options
