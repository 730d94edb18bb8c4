"""The CPU buffers of all checkpoints, and how much memory they take.

The buffers are made once and reused by every step; they only grow, when a longer or wider batch comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.checkpoints import CellKey, Kind
from crosscurrent.gradient.transfer import HostBuffer, reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedBudget:
    """CPU memory for the checkpoints of one batch, in bytes, known before anything runs."""

    layer_inputs: int
    """Layer inputs and the head's input, with h2o's replay log."""
    head_gradients: int
    kv_checkpoints: int
    token_ids: int
    """Token ids and targets on their way to the device: always pinned, and again for each batch that the host
    is ahead of the device. 0 for a model in CPU memory."""
    pinned: int
    """What PyTorch's pinned allocator reserves: it rounds each buffer up to a power of two. 0 if none is."""

    @property
    def total(self) -> int:
        """Bytes asked for by checkpoints, pinned or not."""
        return self.layer_inputs + self.head_gradients + self.kv_checkpoints

    def rows(self) -> list[tuple[str, int]]:
        """What there is to print, with names that a user knows."""
        return [
            ("layer inputs and replay log", self.layer_inputs),
            ("head gradients", self.head_gradients),
            ("KV checkpoints", self.kv_checkpoints),
            ("total", self.total),
            ("token ids on their way", self.token_ids),
            ("pinned memory reserved", self.pinned),
        ]


def is_pinned(kind: Kind, args: GradientArgs, device: torch.device) -> bool:
    """Whether checkpoints of a kind are in pinned memory. For a model in CPU memory it has no use."""
    wanted = args.cachecp_pin_memory if kind is Kind.KV else args.layercp_pin_memory
    return wanted and device.type == "cuda"


def pinned_budget(
    sizes: Mapping[CellKey, int], args: GradientArgs, device: torch.device, *, num_ids: int
) -> PinnedBudget:
    """Add up the sizes of all checkpoints by kind. ``num_ids``: the token ids of a batch."""
    totals = dict.fromkeys(Kind, 0)
    staged = 2 * [num_ids * torch.int64.itemsize] if device.type == "cuda" else []
    pinned = sum(map(reserved, staged))
    for key, size in sizes.items():
        totals[key.kind] += size
        if is_pinned(key.kind, args, device):
            pinned += reserved(size)
    return PinnedBudget(
        layer_inputs=totals[Kind.RECORD],
        head_gradients=totals[Kind.HEAD_GRADIENT],
        kv_checkpoints=totals[Kind.KV],
        token_ids=sum(staged),
        pinned=pinned,
    )


class CheckpointStore:
    """The CPU buffers of all cells."""

    def __init__(self, args: GradientArgs, device: torch.device) -> None:
        self._args = args
        self.device = device
        self._buffers: dict[CellKey, HostBuffer] = {}

    def __getitem__(self, key: CellKey) -> HostBuffer:
        return self._buffers[key]

    @property
    def pinned_bytes(self) -> int:
        """The pinned memory that is reserved for all buffers."""
        return sum(buffer.pinned_bytes for buffer in self._buffers.values())

    def reserve(self, sizes: Mapping[CellKey, int]) -> None:
        """Make room for a whole plan. Raises torch.OutOfMemoryError, with the sizes, if there is none."""
        for key, size in sizes.items():
            try:
                if key not in self._buffers:
                    self._buffers[key] = HostBuffer(pinned=is_pinned(key.kind, self._args, self.device))
                self._buffers[key].reserve(size)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"{error}: the {key.kind.value} of column {key.column}, one of {len(sizes)} buffers with "
                    f"{sum(sizes.values())} bytes together. Use a shorter sequence or a smaller batch, "
                    "quantized checkpoints (grad.layercp_qname, grad.cachecp_qname) or more "
                    "grad.layers_per_cell"
                ) from error
