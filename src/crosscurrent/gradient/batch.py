"""A batch is checked on the host before anything is computed, and brought to the device.

Note [Ids out of range]
    Ids in CPU memory are checked there: an error names the offender. Ids that are on the GPU already could
    only be checked by making the host wait for it. They are clamped there instead, so that nothing is read
    out of bounds, and an id out of range turns the loss and every gradient of its batch into NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crosscurrent.gradient.transfer import Uploads
from crosscurrent.model.loss import IGNORE_INDEX, align_targets, count_targets


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Ids and targets on the device."""

    ids_BT: Tensor
    targets_BT: Tensor
    """As long as the inputs; -100 where there is no target."""
    first_target: int
    count: Tensor
    """The number of targets, a floating point scalar on the device; NaN if some id is out of range."""


def load_batch(
    ids_BT: Tensor, targets: Tensor, *, vocab_size: int, uploads: Uploads, dtype: torch.dtype
) -> Batch:
    """Check a batch and bring it to the device without a wait. `dtype` is that of the loss.

    Raises ValueError for what is wrong with it; ids on the GPU: see Note [Ids out of range].
    """
    _check_shapes(ids_BT, targets)
    valid = _check_ids(ids_BT, "input_ids", vocab_size), _check_ids(targets, "targets", vocab_size)
    first_target = ids_BT.shape[1] - targets.shape[1]
    targets_BT = _on_device(align_targets(targets, ids_BT.shape[1]), uploads)
    count = count_targets(targets_BT).to(dtype)
    ids_BT = _on_device(ids_BT, uploads)
    for flag in valid:
        if flag is not None:
            count = torch.where(flag, count, torch.nan)
    if valid[0] is not None:
        ids_BT = ids_BT.clamp(0, vocab_size - 1)
    if valid[1] is not None:
        targets_BT = torch.where(targets_BT == IGNORE_INDEX, targets_BT, targets_BT.clamp(0, vocab_size - 1))
    return Batch(ids_BT=ids_BT, targets_BT=targets_BT, first_target=first_target, count=count)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""What PyTorch can compare. Not its other unsigned integers."""


def _check_shapes(ids_BT: Tensor, targets: Tensor) -> None:
    for name, tensor in (("input_ids", ids_BT), ("targets", targets)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor of integers, got {type(tensor).__name__}")
        if tensor.dim() != 2 or tensor.dtype not in _INTEGERS:
            raise ValueError(
                f"{name} must be integers of shape [batch, tokens], got {tensor.dtype} of shape "
                f"{list(tensor.shape)}; the dtypes are {', '.join(map(str, _INTEGERS))}"
            )
        if tensor.numel() == 0:
            raise ValueError(f"{name} is empty: shape {list(tensor.shape)}; pass at least one token")
    if ids_BT.shape[0] != targets.shape[0]:
        raise ValueError(
            f"input_ids and targets must be of one batch size, got {ids_BT.shape[0]} and {targets.shape[0]}"
        )
    if targets.shape[1] > ids_BT.shape[1]:
        raise ValueError(
            f"targets are longer than inputs: {targets.shape[1]} targets, {ids_BT.shape[1]} inputs; they "
            "align on the right, so drop the first targets or pass the inputs that they belong to"
        )


def _check_ids(ids: Tensor, name: str, vocab_size: int) -> Tensor | None:
    """Raise for a bad id in CPU memory; for ids on the GPU return whether all are good, to be seen there."""
    good = (ids >= 0) & (ids < vocab_size)
    if name == "targets":
        good |= ids == IGNORE_INDEX
    if ids.device.type != "cpu":
        return good.all()
    bad = (~good).nonzero()
    if len(bad):
        where = tuple(bad[0].tolist())
        expected = f"0 .. {vocab_size - 1}" + (f" or {IGNORE_INDEX}" if name == "targets" else "")
        raise ValueError(
            f"{name}{list(where)} is {int(ids[where])}, expected {expected} ({len(bad)} such ids in all); is "
            "this the tokenizer that the model was made for?"
        )
    return None


def _on_device(ids: Tensor, uploads: Uploads) -> Tensor:
    return uploads.upload(ids) if ids.device.type == "cpu" else ids.to(uploads.device).long()
