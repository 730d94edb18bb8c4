"""Copies within the device by a kernel.

`Tensor.copy_` of contiguous memory is the driver's own copy: to go to a copy engine and back leaves the
device idle for some microseconds, which is as long as such a copy takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors one by one: where they lie alike, all of a dtype in one kernel."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        alike = by_dtype.setdefault(target.dtype, ([], []))
        alike[0].append(target)
        alike[1].append(source)
    for alike in by_dtype.values():
        torch._foreach_copy_(*alike)
