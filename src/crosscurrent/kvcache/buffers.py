"""The tensors of one layer's cache, as they are or packed.

Usage:

    buffer = make_buffer(BufferKind.QUANTIZED8, (B, G, L, D), dtype=x.dtype, device=x.device)

    # A column of tokens at once, all of its evictions known (see `gradient.windows`):
    pool = buffer.pool(k_BGTD, v_BGTD, filled)           # what it holds, then what is new: quantized, once
    values_NGPD = buffer.unpack(pool)                    # what is read back

    # Or chunk by chunk:
    column = buffer.open(k_BGTD, v_BGTD, filled)
    k_BGSD, v_BGSD = column.place(eviction, tokens)      # with the chunk placed, to attend to

A buffer is a tuple of tensors [N, G, L, X], `parts`, with a row for each slot. New entries have the same
parts, with a row for each token. Whatever the parts are, entries are moved from slot to slot, and computed
with only when they come in and when they are read.

Note [Packed caches]
    The forward pass has the caches of all layers at once, so there a packed kind holds codes, and the
    midpoints and scales that they belong to. For attention, one layer at a time has its filled slots as
    values: with the column's new entries behind them, where the evictions are known beforehand; else in a
    copy of the cache, in which chunks are placed as they are in the packed parts, so that nothing is unpacked
    chunk by chunk. When the attention is done, the next layer can have that memory.

    A cell of the backward pass has the caches of a few layers, and autograd. There the default kind serves
    for all: `PlainKVBuffer` with a quantizer sends new entries through it once, and lets the gradient pass
    straight through. Rows are quantized each by itself, so that both read the same values, to the bit.

Legend: B batch, G query groups, L cache length, T tokens of a column, C tokens of a chunk, S filled slots,
D head size, X size of a part's rows, N = 2 B: the keys of the batch, then its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from crosscurrent.kvcache.names import BufferKind
from crosscurrent.kvcache.placement import Eviction
from crosscurrent.kvcache.quantize import Packed, Plain, Quantizer, empty_packed, make_quantizer, round_trip

Shape = tuple[int, int, int, int]

_SCRATCH_BYTES = 64 << 20
"""Working memory of the quantizer. Tensors that need more are packed and unpacked in several pieces."""


@dataclass(frozen=True, slots=True)
class OpenColumn:
    """A cache in which the chunks of a column are placed one after the other."""

    values_NGLD: Tensor
    moves: tuple[tuple[Tensor, Tensor], ...]
    """Tensors with a row for each slot, and what comes in, with a row for each token of the column."""

    def place(self, eviction: Eviction, tokens: slice) -> tuple[Tensor, Tensor]:
        """Place the next chunk, these tokens of the column; the keys and values [B, G, S, D] to attend to."""
        for held_NGLX, new_NGTX in self.moves:
            eviction.place_(held_NGLX, new_NGTX[:, :, tokens])
        return halves(self.values_NGLD[:, :, : eviction.filled_after])


class KVBuffer(Protocol):
    """One layer's cache."""

    @property
    def parts(self) -> Packed:
        """What holds the entries: [N, G, L, X] each."""

    def pool(self, k_BGTD: Tensor, v_BGTD: Tensor, filled: int) -> Packed:
        """The filled slots, then new entries as the buffer holds them: [N, G, filled + T, X] a part."""

    def unpack(self, parts: Packed) -> Tensor:
        """The values of entries: [N, G, S, D]. They may share memory with the parts."""

    def open(self, k_BGTD: Tensor, v_BGTD: Tensor, filled: int) -> OpenColumn:
        """The buffer, with so many slots filled, and a column's new entries, to be placed chunk by chunk."""


@dataclass(frozen=True, slots=True)
class PlainKVBuffer:
    """The default kind: entries as they are, and the gradient with respect to them where one is needed."""

    entries_NGLD: Tensor
    grads_NGLD: Tensor | None
    """Float32 for half precision: thousands of chunks add to the entries that are never evicted."""
    quantizer: Quantizer
    """What entries go through once, when they come in; their gradient passes straight through."""

    @staticmethod
    def empty(
        shape_BGLD: Shape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantizer: Quantizer | None = None,
        with_gradient: bool = False,
    ) -> PlainKVBuffer:
        """An empty cache for a batch."""
        B, G, L, D = shape_BGLD
        # Zeros and not garbage: a slot that was never filled is read by nothing but a whole-buffer copy, and
        # should not carry NaN into it.
        entries = torch.zeros(2 * B, G, L, D, dtype=dtype, device=device)
        wide = torch.promote_types(dtype, torch.float32)
        grads = torch.zeros(2 * B, G, L, D, dtype=wide, device=device) if with_gradient else None
        return PlainKVBuffer(entries, grads, Plain() if quantizer is None else quantizer)

    @property
    def parts(self) -> Packed:
        return (self.entries_NGLD,)

    def pool(self, k_BGTD: Tensor, v_BGTD: Tensor, filled: int) -> Packed:
        # Each straight to its place: keys and values come transposed, which concatenation is slow with.
        N, G, _, D = self.entries_NGLD.shape
        pool_NGPD = self.entries_NGLD.new_empty(N, G, filled + k_BGTD.shape[2], D)
        pool_NGPD[:, :, :filled].copy_(self.entries_NGLD[:, :, :filled])
        new_NGTD = pool_NGPD[:, :, filled:]
        if self.quantizer.kind is BufferKind.DEFAULT:
            for part, new in zip(halves(new_NGTD), (k_BGTD, v_BGTD), strict=True):
                part.copy_(new)
        else:
            new_NGTD.copy_(round_trip(self.quantizer, torch.cat([k_BGTD, v_BGTD])))
        return (pool_NGPD,)

    def unpack(self, parts: Packed) -> Tensor:
        return parts[0]

    def open(self, k_BGTD: Tensor, v_BGTD: Tensor, filled: int) -> OpenColumn:
        (new_NGTD,) = self.pool(k_BGTD, v_BGTD, 0)
        return OpenColumn(self.entries_NGLD, ((self.entries_NGLD, new_NGTD),))


class PackedKVBuffer:
    """A packed kind, for the forward pass. See Note [Packed caches]."""

    def __init__(
        self, quantizer: Quantizer, shape_BGLD: Shape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        B, self._num_groups, self._length, self._head_size = shape_BGLD
        self._batch_size = 2 * B
        self._quantizer = quantizer
        self._dtype = dtype
        self._device = device
        self.parts: Packed = self._empty_parts(self._length)

    def pool(self, k_BGTD: Tensor, v_BGTD: Tensor, filled: int) -> Packed:
        new = self._pack(k_BGTD, v_BGTD)
        held = (part[:, :, :filled] for part in self.parts)
        return tuple(torch.cat(pair, dim=2) for pair in zip(held, new, strict=True)) if filled else new

    def _pack(self, k_BGTD: Tensor, v_BGTD: Tensor) -> Packed:
        new_NGTD = torch.cat([k_BGTD, v_BGTD])
        packed = self._empty_parts(new_NGTD.shape[2])
        for slots, blocks, scratch in self._pieces(packed):
            self._quantizer.quantize_(new_NGTD[:, :, slots], blocks, scratch)
        return packed

    def unpack(self, parts: Packed) -> Tensor:
        values_NGSD = self._empty_values(parts[0].shape[2])
        self._unpack_to(parts, values_NGSD)
        return values_NGSD

    def open(self, k_BGTD: Tensor, v_BGTD: Tensor, filled: int) -> OpenColumn:
        values_NGLD = self._empty_values(self._length)
        self._unpack_to(tuple(part[:, :, :filled] for part in self.parts), values_NGLD)
        new = self._pack(k_BGTD, v_BGTD)
        moves = (values_NGLD, self.unpack(new)), *zip(self.parts, new, strict=True)
        return OpenColumn(values_NGLD, moves)

    def _unpack_to(self, parts: Packed, out_NGLD: Tensor) -> None:
        """Write values to the first slots."""
        for slots, blocks, scratch in self._pieces(parts):
            self._quantizer.dequantize_(blocks, out_NGLD[:, :, slots], scratch)

    def _pieces(self, parts: Packed) -> Iterator[tuple[slice, Packed, Tensor | None]]:
        """Ranges of slots, the parts there as the quantizer wants them, and its scratch."""
        num_slots = parts[0].shape[2]
        shape = self._shape(1)
        slot_bytes = shape.numel() * torch.promote_types(self._dtype, torch.float32).itemsize
        step = min(num_slots, max(1, _SCRATCH_BYTES // slot_bytes))
        layout = self._quantizer.packed_shapes(shape, self._dtype)
        # Rows are flat here, and in blocks there.
        blocks = [
            part.view(*part.shape[:3], *rows[3:]) for part, (rows, _) in zip(parts, layout, strict=True)
        ]
        scratch = self._quantizer.empty_scratch(self._shape(step), self._dtype, self._device)
        for start in range(0, num_slots, max(1, step)):
            slots = slice(start, min(start + step, num_slots))
            yield slots, tuple(block[:, :, slots] for block in blocks), scratch

    def _empty_parts(self, num_slots: int) -> Packed:
        packed = empty_packed(self._quantizer, self._shape(num_slots), self._dtype, device=self._device)
        return tuple(part.flatten(3) for part in packed)

    def _empty_values(self, num_slots: int) -> Tensor:
        return torch.empty(self._shape(num_slots), dtype=self._dtype, device=self._device)

    def _shape(self, num_slots: int) -> torch.Size:
        return torch.Size((self._batch_size, self._num_groups, num_slots, self._head_size))


def make_buffer(kind: BufferKind, shape_BGLD: Shape, *, dtype: torch.dtype, device: torch.device) -> KVBuffer:
    """An empty cache of a kind, for the forward pass."""
    if kind is BufferKind.DEFAULT:
        return PlainKVBuffer.empty(shape_BGLD, dtype=dtype, device=device)
    return PackedKVBuffer(make_quantizer(kind), shape_BGLD, dtype=dtype, device=device)


def halves(kv_NGXD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, in place."""
    batch_size = kv_NGXD.shape[0] // 2
    return kv_NGXD[:batch_size], kv_NGXD[batch_size:]
