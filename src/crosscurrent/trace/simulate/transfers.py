"""Copies between memories: ``copy_``, ``to`` and pinning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crosscurrent.trace.simulate.clock import COPY_BYTES_PER_NANOSECOND, KERNEL
from crosscurrent.trace.simulate.memory import ON_HOST, PINNED

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.dispatch import SimulatedDispatch

CPU = torch.device("cpu")
EXPLICIT_CPU = torch.device("cpu", 0)
"""How a copy to the host is asked for. Plain ``cpu`` is what C++ code says when it means "no change"."""

_aten = torch.ops.aten


def copy(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    device = mode.place(func, args, kwargs, mixed=True)
    _check_capture(mode, args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    mode.simulation.before_call(func, args, kwargs)
    out = func(*args, **kwargs)
    _finish_copy(mode, device, func, args, kwargs, source=args[1], target=out)
    return out


def _finish_copy(
    mode: SimulatedDispatch, device: int, func: Any, args: Any, kwargs: Any, *, source: Tensor, target: Tensor
) -> None:
    """Account for a copy that has run: its time, and whether the host waits for it."""
    memory = mode.simulation.memory
    ends = memory.block_of(source), memory.block_of(target)
    devices = [block.device for block in ends if block is not None and block.device >= 0]
    crosses = len(devices) == 1
    cost = KERNEL + (target.nbytes // COPY_BYTES_PER_NANOSECOND if crosses else 0)
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    mode.report(device, func, args, kwargs, target, cost)
    if len(set(devices)) == 2:
        queues = [mode.simulation.queues.thread.current[index] for index in devices]
        both_free_at = max(queue.free_at for queue in queues)
        for queue in queues:
            queue.free_at = both_free_at
    pinned = any(block is not None and block.device == PINNED for block in ends)
    if crosses and not (non_blocking and pinned):
        simulation = mode.simulation
        simulation.note_wait()
        simulation.clock.wait_until(simulation.queues.thread.current[devices[0]].free_at)


def _check_capture(mode: SimulatedDispatch, target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """A copy between host and device that makes the host wait cannot be captured."""
    memory = mode.simulation.memory
    blocks = memory.block_of(target), memory.block_of(source)
    places = [ON_HOST if block is None else block.device for block in blocks]
    if sum(place >= 0 for place in places) == 1:
        pinned = any(block is not None and block.device == PINNED for block in blocks)
        _refuse_wait(mode, non_blocking and pinned, _aten.copy_.default)


def _refuse_wait(mode: SimulatedDispatch, harmless: bool, func: Any) -> None:
    capture = mode.simulation.captures.current() if mode.simulation.attention else None
    if capture is not None and not harmless:
        capture.refuse(f"{func} that the host waits for")


def to_copy(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    simulation = mode.simulation
    wanted: torch.device | None = kwargs.get("device")
    here = mode.place(func, args, {}, mixed=True)
    if wanted is None or (wanted == CPU and here >= 0):
        return mode.run_on(here, func, args, kwargs)
    if wanted.type not in ("cpu", "cuda"):
        return mode.run_on(ON_HOST, func, args, kwargs)
    there = ON_HOST if wanted.type == "cpu" else simulation.device_index(wanted)
    if there == ON_HOST and here < 0:
        return mode.run_on(here, func, args, {**kwargs, "device": CPU})
    if there == ON_HOST or here < 0:
        pinned = is_pinned(mode, func, args, kwargs) or there == ON_HOST
        _refuse_wait(mode, pinned and kwargs.get("non_blocking", False), func)
    simulation.before_call(func, args, kwargs)
    out = func(*args, **{**kwargs, "device": CPU, "pin_memory": False})
    if there >= 0:
        mode.tag_results(out, there)
    elif kwargs.get("pin_memory") or kwargs.get("non_blocking"):
        mode.tag_results(out, PINNED)  # a copy that nobody waits for gets page-locked memory by itself
    shown = {**kwargs, "device": CPU if there == ON_HOST else torch.device("cuda", there)}
    _finish_copy(mode, there if there >= 0 else here, func, args, shown, source=args[0], target=out)
    return out


def pin_memory(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    source: Tensor = args[0]
    place = mode.place(func, args, kwargs)
    if place >= 0 or source.layout != torch.strided:
        raise RuntimeError(f"cannot pin '{source.type()}' only dense CPU tensors can be pinned")
    mode.simulation.before_call(func, args, kwargs)
    out = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype)
    out.copy_(source)
    mode.simulation.memory.tag(out.untyped_storage(), PINNED)
    mode.report(ON_HOST, func, args, kwargs, out)
    return out


def is_pinned(mode: SimulatedDispatch, func: Any, args: Any, kwargs: Any) -> Any:
    block = mode.simulation.memory.block_of(args[0])
    return block is not None and block.device == PINNED
