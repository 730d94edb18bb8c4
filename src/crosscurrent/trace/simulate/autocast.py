"""``torch.autocast("cuda")``: the tensors really are on the CPU, so its autocast is switched along.

Two things differ from a GPU: inside such a region host tensors are cast as well, and which ops are cast
is decided by PyTorch's list for the CPU.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from crosscurrent.trace.patches import Patches


class _Kept(threading.local):
    """What the CPU's autocast was before that of CUDA was switched on; per thread, as autocast is."""

    def __init__(self) -> None:
        self.before: tuple[bool, torch.dtype] | None = None


def patch_autocast(patches: Patches) -> None:
    """Make the switches of CUDA's autocast move those of the CPU."""
    kept = _Kept()
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

    def switch(*args: Any) -> None:
        device, enabled = args if len(args) == 2 else ("cuda", *args)
        set_enabled(device, enabled)
        if device != "cuda":
            return
        if enabled and kept.before is None:
            kept.before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            set_enabled("cpu", True)
            set_dtype("cpu", torch.get_autocast_dtype("cuda"))
        elif not enabled and kept.before is not None:
            set_enabled("cpu", kept.before[0])
            set_dtype("cpu", kept.before[1])
            kept.before = None

    def choose(device: str, dtype: torch.dtype) -> None:
        set_dtype(device, dtype)
        if device == "cuda" and kept.before is not None:
            set_dtype("cpu", dtype)

    patches.set(torch, "set_autocast_enabled", switch)
    patches.set(torch, "set_autocast_dtype", choose)
    patches.set(torch, "set_autocast_gpu_dtype", lambda dtype: choose("cuda", dtype))
