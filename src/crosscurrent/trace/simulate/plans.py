"""Which ops need more than "run it on the CPU, on the device of its tensors", and what they need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from crosscurrent.trace.simulate import transfers
from crosscurrent.trace.simulate.autograd import device_of_running_function
from crosscurrent.trace.simulate.generators import check_on_host
from crosscurrent.trace.simulate.kernels import KERNELS
from crosscurrent.trace.simulate.memory import ON_HOST, PINNED, UNDETERMINED

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.dispatch import SimulatedDispatch

Plan = Callable[["SimulatedDispatch", Any, tuple[Any, ...], dict[str, Any]], Any]

CPU = torch.device("cpu")

WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_aten = torch.ops.aten
_RUNS_ON_BOTH = {
    "copy_",
    "_foreach_copy_",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
    "_ctc_loss",
    "_cudnn_ctc_loss",
    "_ctc_loss_backward",
    "tensor_split",
    "set_",
}
"""Ops of which CUDA takes some arguments from the host, by the name of their packet."""


_PYTORCH = {"aten", "prims", "prim", "inductor", "quantized", "torchvision"}
"""Operators in these namespaces are C++: below the simulation they ask no Python where a tensor is."""


def plan_for(func: Any) -> Plan | None:
    """What to do for an op, or None for the common case."""
    if not isinstance(func, torch._ops.OpOverload):
        return _higher_order
    if func.namespace not in _PYTORCH:
        return _foreign
    if func in KERNELS:
        return partial(_kernel, kernel=KERNELS[func])
    if _is_made_of_others(func._name):
        return composite
    packet = func._overloadpacket
    name = func._schema.name.removeprefix("aten::")
    if packet is _aten._to_copy:
        return transfers.to_copy
    if packet is _aten._pin_memory:
        return transfers.pin_memory
    if packet is _aten.is_pinned:
        return transfers.is_pinned
    if packet is _aten.record_stream:
        return _record_stream
    if packet is _aten.resize_ or packet is _aten.resize_as_:
        return _resize
    if packet is _aten._pack_padded_sequence:
        return _pack_sequence
    if name in _RUNS_ON_BOTH:
        return _mixed
    arguments = {argument.name for argument in func._schema.arguments}
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    if "device" in arguments:
        return partial(_factory, seeded=seeded)
    if seeded:
        return _random
    if WAITING & set(func.tags):
        return _waiting
    if name.startswith("_foreach_") or "TensorList" in str(func._schema.arguments[0].type):
        return _lists
    return None


def device_error(func: Any, one: int, other: int) -> RuntimeError:
    """The error of an op whose tensors lie on two devices, in the words of CUDA."""
    names = ["cpu" if index < 0 else f"cuda:{index}" for index in (one, other)]
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, "
        f"{names[0]} and {names[1]}! (when running {func})"
    )


def writes_to(func: Any, args: Any, kwargs: Any, tensor: Tensor) -> bool:
    """Whether an op writes to this very argument: a scalar of the host can be read, not written."""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if value is tensor and argument.alias_info is not None and argument.alias_info.is_write:
            return True
    return False


def _is_made_of_others(name: str) -> bool:
    """Whether an op has no kernel of its own. Some have both, and then the kernel is what runs."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def composite(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    """An op made of others, which PyTorch does not take apart by itself under inference mode."""
    raise AssertionError("the dispatch mode takes it apart")


def _kernel(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any, *, kernel: Callable[..., Any]) -> Any:
    """A kernel that only GPUs have."""
    place = mode.place(func, args, kwargs)
    if place < 0:
        return mode.run_on(place, func, args, kwargs)
    mode.simulation.before_call(func, args, kwargs)
    out = kernel(*args, **kwargs)
    mode.tag_results(out, place)
    mode.report(place, func, args, kwargs, out)
    return out


def _pack_sequence(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    """Takes lengths from the host, and returns batch sizes there."""
    place = mode.place(func, args, kwargs, mixed=True)
    mode.simulation.before_call(func, args, kwargs)
    data, batch_sizes = func(*args, **kwargs)
    mode.tag_results(data, place)
    mode.report(place, func, args, kwargs, (data, batch_sizes))
    return data, batch_sizes


def _waiting(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    """An op whose result, or its shape, the host has to know: it waits for the stream."""
    place = mode.place(func, args, kwargs)
    simulation = mode.simulation
    if place >= 0:
        simulation.note_wait()
    out = mode.run_on(place, func, args, kwargs)
    if place >= 0:
        simulation.clock.wait_until(simulation.queues.thread.current[place].free_at)
    return out


def _foreign(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that somebody registered, implemented for the CPU: one step, seen from outside.

    Whether its tensors lie together is its own affair: PyTorch does not ask.
    """
    simulation = mode.simulation
    device = mode.place(func, args, kwargs, mixed=True)
    simulation.before_call(func, args, kwargs)
    with simulation.memory.laid_bare():
        out = func(*args, **kwargs)
    if device != ON_HOST:
        mode.tag_results(out, device)
    mode.report(device, func, args, kwargs, out)
    return out


def _mixed(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    if func is _aten.copy_.default:
        return transfers.copy(mode, func, args, kwargs)
    if "index" in func._schema.name:
        _check_indices(mode, args)
    return mode.run(func, args, kwargs, mixed=True)


def _check_indices(mode: SimulatedDispatch, args: Any) -> None:
    """Indices of the host can select from a device, not the other way round."""
    device_of = mode.simulation.memory.device_of
    here = device_of(args[0])
    for index in args[1]:
        there = device_of(index) if isinstance(index, Tensor) else ON_HOST
        if there not in (ON_HOST, here):
            name = "cpu" if here == ON_HOST else f"cuda:{here}"
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({name})"
            )
    values = args[2] if len(args) > 2 and isinstance(args[2], Tensor) else None
    if values is not None and values.dim() and device_of(values) != here:
        raise device_error("index_put_", here, device_of(values))


def _record_stream(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    raise NotImplementedError("simulated CUDA has record_stream as a method of tensors only")


def _resize(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    out = mode.run(func, args, kwargs)
    memory = mode.simulation.memory
    storage = args[0].untyped_storage()
    block = memory.blocks.get(storage._cdata)
    if block is not None:
        memory.retag(storage, block.device)
    return out


def _factory(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any, *, seeded: bool) -> Any:
    """An op that takes a device.

    The Python bindings always say ``pin_memory``, C++ code that wants "the same device" never does. So
    without it, the CPU means the device of the arguments, or is left open.
    """
    simulation = mode.simulation
    wanted: torch.device | None = kwargs.get("device")
    by_user = "pin_memory" in kwargs
    here = mode.place(func, args, kwargs)
    if wanted is None:
        place = here
    elif wanted.type == "cuda":
        place = simulation.device_index(wanted)
    elif by_user or wanted.type != "cpu":
        place = ON_HOST
    else:
        place = here if here != ON_HOST else _place_of_helper()
    pinned = by_user and kwargs["pin_memory"]
    actual = shown = kwargs
    if pinned:
        if place >= 0:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        actual = {**kwargs, "pin_memory": False}
    elif wanted is not None and wanted.type == "cuda":
        actual = {**kwargs, "device": CPU}
        full = torch.device("cuda", place)
        if wanted != full:
            shown = {**kwargs, "device": full}
    if pinned:
        return _pinned_factory(mode, func, args, actual, shown)
    if seeded and place >= 0:
        with simulation.random.drawing(place, func, actual) as actual:
            return mode.run_on(place, func, args, actual, shown)
    if seeded:
        check_on_host(kwargs)
    return mode.run_on(place, func, args, actual, shown)


def _place_of_helper() -> int:
    """Where C++ code wants something that it makes from nothing."""
    device = device_of_running_function()
    return UNDETERMINED if device is None else device


def _pinned_factory(mode: SimulatedDispatch, func: Any, args: Any, actual: Any, shown: Any) -> Any:
    mode.simulation.before_call(func, args, shown)
    out = func(*args, **actual)
    mode.simulation.memory.tag(out.untyped_storage(), PINNED)
    mode.report(ON_HOST, func, args, shown, out)
    return out


def _random(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    place = mode.place(func, args, kwargs)
    if place < 0:
        check_on_host(kwargs)
        return mode.run_on(place, func, args, kwargs)
    with mode.simulation.random.drawing(place, func, kwargs) as actual:
        return mode.run_on(place, func, args, actual, kwargs)


def _lists(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    """An op over lists of tensors. If they lie on several devices it runs once per tensor, as in CUDA."""
    memory = mode.simulation.memory
    first = args[0]
    if func._schema.name.startswith("aten::_foreach_") and isinstance(first, (list, tuple)):
        places = {memory.device_of(tensor) for tensor in first if isinstance(tensor, Tensor)}
        if len(places) > 1:
            return _one_by_one(mode, func, args, kwargs)
    return mode.run(func, args, kwargs)


def _one_by_one(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    results: list[Any] = []
    count = len(args[0])
    for i in range(count):
        each = [[value[i]] if isinstance(value, (list, tuple)) else value for value in args]
        result = mode.run(func, tuple(each), kwargs)
        if result is not None:
            results.extend(result)
    return results if results else None


def _higher_order(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    """A higher-order op: its inner ops are not seen, its results belong where its tensors are."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    memory = mode.simulation.memory
    place = max((memory.device_of(tensor) for tensor in tensors), default=ON_HOST)
    mode.simulation.before_call(func, args, kwargs)
    with memory.laid_bare():
        out = func(*args, **kwargs)
    if place >= 0:
        for leaf in tree_leaves(out):
            mode.tag_results(leaf, place)
    mode.report(place, func, args, kwargs, out)
    return out
