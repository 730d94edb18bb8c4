"""The tensors of one layer's cache, as they are or packed.

Usage:

    buffer = make_buffer(BufferKind.DEFAULT, (B, G, L, D), dtype=x.dtype, device=x.device)
    overwritten = buffer.write(eviction, k_BGCD, v_BGCD)
    keys_BGSD, values_BGSD = buffer.view(eviction.filled_after)
    buffer.unwrite(eviction, overwritten)          # the exact reverse

`KVBuffer(keys, values)` wraps tensors that somebody else owns. `PackedKVBuffer` keeps codes: an
entry is quantized once, when it is written, and only ever moved from then on; `view` dequantizes
what is filled into memory that the next `view` reuses, so it is for the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from crosscurrent.kvcache.names import BufferKind
from crosscurrent.kvcache.placement import Eviction
from crosscurrent.kvcache.quantize import Packed, Quantizer, empty_packed, make_quantizer


class Overwritten(NamedTuple):
    """What a write displaced, in the buffer's own form; `unwrite` needs it."""

    keys: Packed
    values: Packed


class Buffer(Protocol):
    """One layer's cache."""

    def write(self, eviction: Eviction, k_BGCD: Tensor, v_BGCD: Tensor) -> Overwritten:
        """Place the entries of a chunk; returns what they displaced."""

    def unwrite(self, eviction: Eviction, overwritten: Overwritten) -> None:
        """Undo the last write."""

    def view(self, filled: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, filled, D] to attend to; read-only, until the next call."""


class KVBuffer:
    """Keys and values as they are, in two tensors [B, G, L, D]."""

    def __init__(self, keys_BGLD: Tensor, values_BGLD: Tensor) -> None:
        if keys_BGLD.shape != values_BGLD.shape or keys_BGLD.dim() != 4:
            raise ValueError(
                f"keys and values must both be [batch, groups, slots, head size], got "
                f"{list(keys_BGLD.shape)} and {list(values_BGLD.shape)}"
            )
        self.keys_BGLD = keys_BGLD
        self.values_BGLD = values_BGLD

    def write(self, eviction: Eviction, k_BGCD: Tensor, v_BGCD: Tensor) -> Overwritten:
        eviction = eviction.widened()
        return Overwritten(
            (eviction.write_(self.keys_BGLD, k_BGCD),), (eviction.write_(self.values_BGLD, v_BGCD),)
        )

    def unwrite(self, eviction: Eviction, overwritten: Overwritten) -> None:
        eviction = eviction.widened()
        eviction.unwrite_(self.keys_BGLD, overwritten.keys[0])
        eviction.unwrite_(self.values_BGLD, overwritten.values[0])

    def view(self, filled: int) -> tuple[Tensor, Tensor]:
        return self.keys_BGLD[:, :, :filled], self.values_BGLD[:, :, :filled]


class PackedKVBuffer:
    """Keys and values as codes, with one dequantized copy that `view` fills."""

    def __init__(
        self,
        quantizer: Quantizer,
        shape_BGLD: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._quantizer = quantizer
        self._dtype = dtype
        self._keys = empty_packed(quantizer, shape_BGLD, dtype, device=device)
        self._values = empty_packed(quantizer, shape_BGLD, dtype, device=device)
        self._scratch = quantizer.empty_scratch(shape_BGLD, dtype, device)
        self._viewed = torch.empty(2, *shape_BGLD, dtype=dtype, device=device)

    def write(self, eviction: Eviction, k_BGCD: Tensor, v_BGCD: Tensor) -> Overwritten:
        eviction = eviction.widened()
        return Overwritten(
            self._write(eviction, self._keys, k_BGCD), self._write(eviction, self._values, v_BGCD)
        )

    def unwrite(self, eviction: Eviction, overwritten: Overwritten) -> None:
        eviction = eviction.widened()
        for parts, rows in ((self._keys, overwritten.keys), (self._values, overwritten.values)):
            for part, part_rows in zip(parts, rows, strict=True):
                eviction.unwrite_(part.flatten(3), part_rows)

    def view(self, filled: int) -> tuple[Tensor, Tensor]:
        keys, values = self._viewed[:, :, :, :filled]
        for parts, out in ((self._keys, keys), (self._values, values)):
            front = tuple(part[:, :, :filled] for part in parts)
            self._quantizer.dequantize_(front, out, self._scratch)
        return keys, values

    def _write(self, eviction: Eviction, parts: Packed, new_BGCD: Tensor) -> Packed:
        fresh = empty_packed(self._quantizer, new_BGCD.shape, new_BGCD.dtype, device=new_BGCD.device)
        self._quantizer.quantize_(new_BGCD, fresh, self._scratch)
        return tuple(
            eviction.write_(part.flatten(3), part_new.flatten(3))
            for part, part_new in zip(parts, fresh, strict=True)
        )


def make_buffer(
    kind: BufferKind, shape_BGLD: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Buffer:
    """An empty cache of a kind."""
    if kind is BufferKind.DEFAULT:
        keys_BGLD, values_BGLD = torch.zeros(2, *shape_BGLD, dtype=dtype, device=device)
        return KVBuffer(keys_BGLD, values_BGLD)
    return PackedKVBuffer(make_quantizer(kind), shape_BGLD, dtype=dtype, device=device)
