"""Ops in the middle of which the host waits: values read back, and shapes that depend on values.

Such an op first computes what the host needs, waits for its stream, and then (if it makes tensors) goes on.
What it does after the wait is not covered by the wait, so it is two ``Op`` records with the wait between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crosscurrent.trace.access import Signature, base_name
from crosscurrent.trace.records import HOST, Op

if TYPE_CHECKING:
    from crosscurrent.trace.gather import Call
    from crosscurrent.trace.tracer import Tracer

_MASKS = (torch.bool, torch.uint8)


def emit(tracer: Tracer, sign: Signature, call: Call, wait: str | None) -> None:
    """The records of a call that waits in its middle (``wait`` None: it does not)."""
    if wait is None or call.on_device < 0:
        tracer.emit_call(sign.name, call)
        return
    site = tracer.site
    if call.host:
        tracer.put(Op, HOST, sign.name, site, tuple(call.host))
    lane = tracer.lane(call.on_device)
    reads = tuple(access for access in call.device if not access.write)
    if reads:
        tracer.put(Op, lane, sign.name, site, reads)
    tracer.host_wait(wait, (lane,), sign.name)
    if len(reads) < len(call.device):
        tracer.put(Op, lane, sign.name, site, tuple(call.device))


def reason(tracer: Tracer, func: Any, args: Any, kwargs: Any, call: Call) -> str | None:
    """Why the host waits in an op for which that depends on its arguments; None if it does not."""
    if call.on_device < 0:
        return None
    base = base_name(func)
    if base == "repeat_interleave":
        return "data-dependent shape" if kwargs.get("output_size") is None else None
    if base == "histc":
        low, high = (*args[2:4], 0, 0)[:2] if len(args) > 2 else (0, 0)
        return "item" if low == high else None
    if base == "normal":
        deviation = args[1] if len(args) > 1 else kwargs.get("std")
        return "item" if _on_device(tracer, deviation) else None
    if base in ("masked_fill", "masked_fill_"):
        return "item" if _on_device(tracer, args[2]) else None
    if base in ("index_fill", "index_fill_"):
        return "item" if _on_device(tracer, args[3]) else None
    return _indexing(tracer, base, args)


def _on_device(tracer: Tracer, value: Any) -> bool:
    block = tracer.block_of(value) if isinstance(value, Tensor) else None
    return block is not None and block.on_device


def _indexing(tracer: Tracer, base: str, args: Any) -> str | None:
    indices = [index for index in args[1] if index is not None]
    value = args[2] if "put" in base else None
    accumulate = len(args) > 3 and bool(args[3])
    if (
        len(indices) == 1
        and indices[0].dtype in _MASKS
        and _on_device(tracer, indices[0])
        and value is not None
        and value.numel() == 1
        and not _on_device(tracer, value)
        and not accumulate
    ):
        return None  # becomes a masked_fill_ with a number that the host knows
    if any(index.dtype in _MASKS and _on_device(tracer, index) for index in indices):
        return "data-dependent shape"
    # Indices, and a scalar to store, are copied to the device by a blocking copy.
    if any(not _on_device(tracer, index) for index in indices):
        return "blocking copy"
    if value is not None and value.dim() == 0 and not _on_device(tracer, value):
        return "blocking copy"
    return None
