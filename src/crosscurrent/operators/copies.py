"""Copies within the device by a kernel.

`Tensor.copy_` of contiguous memory is the driver's own copy: to go to a copy engine and back leaves the
device idle for some microseconds, which is as long as such a copy takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = torch.int16


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors one by one: where they lie alike, all in one kernel."""
    pairs = list(zip(targets, sources, strict=True))
    if len({target.dtype for target, _ in pairs}) > 1:
        pairs = [_as_words(target, source) for target, source in pairs]
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        alike = by_dtype.setdefault(target.dtype, ([], []))
        alike[0].append(target)
        alike[1].append(source)
    for alike in by_dtype.values():
        torch._foreach_copy_(*alike)


def _as_words(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """A pair as words of two bytes, if that copies the same: one kernel takes one dtype.

    Of two bytes and not more, since a kernel's blocks take a number of elements each, and large copies need
    many blocks.
    """
    if not (
        target.dtype == source.dtype
        and target.shape == source.shape
        and target.itemsize % _WORD.itemsize == 0
        and target.is_contiguous()
        and source.is_contiguous()
    ):
        return target, source
    return target.detach().view(-1).view(_WORD), source.detach().view(-1).view(_WORD)
