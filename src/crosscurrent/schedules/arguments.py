"""Looking at the arguments of an op from outside: which tensors there are, and copies of their content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from crosscurrent.schedules.bound import flat, same_values
from crosscurrent.schedules.program import View
from crosscurrent.trace.access import Signature, Use
from crosscurrent.trace.recorder import Recorder
from crosscurrent.trace.simulate import active

__all__ = [
    "Before",
    "NotKeptError",
    "bytes_of",
    "convert",
    "flat",
    "has_real_cuda",
    "is_real_cuda",
    "kept",
    "quiet",
    "random_state",
    "reproduces",
    "same_storage",
    "tensors_in",
    "written",
]

_CPU = torch.device("cpu")


class NotKeptError(Exception):
    """A tensor whose content cannot be kept as a strided view."""


@dataclass(slots=True)
class Before:
    """What was seen before a call."""

    random: Tensor | None
    """The state of the generator, if the op draws from one."""

    blocks: set[int] = field(default_factory=set)
    """The blocks of its arguments."""

    pageable: dict[int, Tensor] = field(default_factory=dict)
    """The content of the host's own tensors that the op writes, by identity."""

    host_wrote: tuple[tuple[View, Tensor], ...] = ()
    """What the host wrote to its blocks since anybody looked."""


class quiet:  # noqa: N801 (used like a function)
    """A context out of reach of autograd, of whoever simulates around us, and of the tracer itself.

    On a real GPU copies to the host wait for it, and these waits are no part of the program.
    """

    __slots__ = ("_grad", "_modes", "_muted", "_tracer")

    def __init__(self, tracer: Recorder) -> None:
        self._tracer = tracer

    def __enter__(self) -> None:
        self._muted, self._tracer.muted = self._tracer.muted, True
        self._modes: Any = None
        if torch._C._len_torch_dispatch_stack():
            self._modes = _disable_current_modes()
            self._modes.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        self._tracer.muted = self._muted
        torch._C._set_grad_enabled(self._grad)
        if self._modes is not None:
            self._modes.__exit__(*error)


def has_real_cuda() -> bool:
    """Whether there is a real device. A simulation calls CPU memory "cuda", and works beside no real one."""
    return active() is None and torch.cuda.is_available()


def is_real_cuda(tensor: Tensor) -> bool:
    """Whether a tensor lies on a real device, whatever a simulation says."""
    return active() is None and tensor.is_cuda


def kept(tensor: Tensor) -> Tensor:
    """A copy of a tensor's content on the CPU, contiguous."""
    if tensor.layout is not torch.strided:
        raise NotKeptError
    copy = torch.ops.aten.empty.memory_format(tensor.shape, dtype=tensor.dtype, device=_CPU)
    torch.ops.aten.copy_.default(copy, tensor.detach())
    assert isinstance(copy, Tensor)
    return copy


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, as they lie."""
    device = storage.device if active() is None else _CPU
    empty = torch.ops.aten.empty.memory_format([0], dtype=torch.uint8, device=device)
    view: Tensor = empty.set_(storage, 0, (storage.nbytes(),), (1,))
    return view


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def written(sign: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an op writes."""
    for use, value in zip(sign.positional, args, strict=False):
        if use & Use.WRITE:
            yield from tensors_in(value)
    for name, value in kwargs.items():
        if sign.by_name.get(name, 0) & Use.WRITE:
            yield from tensors_in(value)


def convert(value: Any, tensor: Callable[[Tensor], Any]) -> Any:
    """Arguments with every tensor replaced. A generator is left out: its state is kept instead."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise NotKeptError
        return tensor(value)
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, dict):
        return {name: convert(item, tensor) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(convert(item, tensor) for item in value)
    return value


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def random_state(func: Any) -> Tensor | None:
    """The state that an op is about to draw from; None if it draws nothing."""
    tags = getattr(func, "tags", ())
    return torch.default_generator.get_state() if torch.Tag.nondeterministic_seeded in tags else None


def reproduces(func: Any, args: Any, kwargs: Any, out: Any, state: Tensor) -> bool:
    """Whether an op that draws gives the same values again from the same state of the CPU's generator."""
    schema = func._schema
    if any(argument.alias_info is not None for argument in schema.arguments):
        return False
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    try:
        plain = {n: v for n, v in kwargs.items() if n not in ("device", "pin_memory", "generator")}
        again = func(*args, **plain)
    except Exception:  # whatever it wanted, it is not to be had
        return False
    finally:
        torch.default_generator.set_state(before)
    pairs = zip(flat(again), flat(out), strict=True)
    return all(not isinstance(o, Tensor) or (a.shape == o.shape and same_values(a, o)) for a, o in pairs)
