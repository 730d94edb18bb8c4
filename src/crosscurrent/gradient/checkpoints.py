"""What is kept in CPU memory between the passes: formats in bytes, buffers, and the budget.

Three kinds, each one buffer per cell, so that a cell's checkpoint is one contiguous copy:

    record         the input of a row's layers for one column, and behind it the slots that these layers'
                   caches evicted there (h2o only; other policies decide on the host). The topmost record
                   is the input of the head.
    head gradient  the gradient at a row's top for one column, overwritten by that at its bottom.
    KV checkpoint  the caches of the current row at the left edge of one column.

Note [Which KV checkpoints there are]
    At the left edge of column 0 the caches are empty. At the left edge of the last column they are still
    on the device when the row's replay ends, and the last column is the first to need them. So columns
    1 .. J-2 of J have one.

Legend: B batch, T tokens of a column, E hidden size, G query groups, S filled slots, D head size, N = 2 B.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.plan import Column, Plan, Row
from crosscurrent.kvcache.buffers import PlainKVBuffer
from crosscurrent.kvcache.names import CacheConfig, PolicyKind
from crosscurrent.kvcache.quantize import make_quantizer
from crosscurrent.operators.rows import slot_dtype

# What every dtype is aligned to, and what copy engines and vector loads like best.
_ALIGNMENT = 256


class Kind(enum.Enum):
    """The kinds of checkpoints."""

    RECORD = "record"
    HEAD_GRADIENT = "head gradient"
    KV = "KV checkpoint"


class CellKey(NamedTuple):
    """Which buffer: its kind and cell. Head gradients and KV checkpoints are those of the current row."""

    kind: Kind
    row: int
    column: int


def record_key(row: int, column: Column) -> CellKey:
    """The record of a row, or of the head, which is the row above the topmost."""
    return CellKey(Kind.RECORD, row, column.index)


def head_gradient_key(column: Column) -> CellKey:
    """The head gradient of a column."""
    return CellKey(Kind.HEAD_GRADIENT, 0, column.index)


def kv_key(column: Column) -> CellKey:
    """The KV checkpoint at the left edge of a column."""
    return CellKey(Kind.KV, 0, column.index)


@dataclass(frozen=True)
class Layout:
    """Tensors that lie one behind the other in the bytes of a buffer."""

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all parts, aligned."""
        return sum(_padded(shape, dtype) for shape, dtype in self.parts)

    @cached_property
    def _places(self) -> list[slice]:
        places, start = [], 0
        for shape, dtype in self.parts:
            places.append(slice(start, start + math.prod(shape) * dtype.itemsize))
            start += _padded(shape, dtype)
        return places

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The parts as tensors that share the memory of a uint8 buffer."""
        return tuple(
            buffer[place].view(dtype).view(shape)
            for place, (shape, dtype) in zip(self._places, self.parts, strict=True)
        )


def _padded(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The sizes of a model and a batch that decide how many bytes there are."""

    batch_size: int
    embed_size: int
    num_groups: int
    head_size: int
    cache_lengths: tuple[int, ...]
    dtype: torch.dtype


class CheckpointFormat:
    """The layouts of all checkpoints of one plan, and how tensors get into them and out again.

    Packing and unpacking run on `main`, and only there, so that one scratch does for both quantizers.
    """

    def __init__(self, plan: Plan, shapes: Shapes, cache: CacheConfig, args: GradientArgs) -> None:
        self.plan = plan
        self.shapes = shapes
        self.logs_slots = cache.policy is PolicyKind.H2O
        self._layer_quantizer = make_quantizer(args.layercp_kind)
        self._cache_quantizer = make_quantizer(args.cachecp_kind)
        # Asked for again and again, by every step: the host has better things to do than to count bytes.
        self._layouts: dict[tuple[str, int, int], Layout] = {}

    def top(self, column: Column) -> Layout:
        """The head's input."""
        shape, dtype = self._hidden(column), self.shapes.dtype
        return self._once(
            ("top", 0, column.index), lambda: Layout(self._layer_quantizer.packed_shapes(shape, dtype))
        )

    def record(self, row: Row, column: Column) -> Layout:
        """A row's input, and the slots that its layers evicted, which are the last part."""

        return self._once(
            ("record", row.index, column.index),
            lambda: Layout((*self.top(column).parts, *self.slots(row, column).parts)),
        )

    def slots(self, row: Row, column: Column) -> Layout:
        """The slots alone: the record of a row that nothing is computed from again."""

        def make() -> Layout:
            dtype = slot_dtype(max(self.shapes.cache_lengths))
            return Layout((((self._num_slots(row, column),), dtype),))

        return self._once(("slots", row.index, column.index), make)

    def head_gradient(self, column: Column) -> Layout:
        """The gradient at the top or bottom of a cell."""
        parts = ((self._hidden(column), self.shapes.dtype),)
        return self._once(("head gradient", 0, column.index), lambda: Layout(parts))

    def kv(self, row: Row, column: Column) -> Layout:
        """The filled part of the row's caches at the column's left edge."""

        def make() -> Layout:
            shapes = self._filled_shapes(row, column)
            parts = (self._cache_quantizer.packed_shapes(shape, self.shapes.dtype) for shape in shapes)
            return Layout(tuple(itertools.chain.from_iterable(parts)))

        return self._once(("kv", row.index, column.index), make)

    def _once(self, key: tuple[str, int, int], make: Callable[[], Layout]) -> Layout:
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = make()
        return layout

    def kv_columns(self) -> tuple[Column, ...]:
        """The columns that have a KV checkpoint. See Note [Which KV checkpoints there are]."""
        return self.plan.columns[1:-1]

    def make_scratch(self, device: torch.device) -> Tensor | None:
        """Working memory of the quantizers for any tensor of this plan, on one lane."""
        hidden = math.prod((self.shapes.batch_size, self.plan.longest_column, self.shapes.embed_size))
        cache = 2 * self.shapes.batch_size * self.shapes.num_groups * self.shapes.head_size
        candidates = [
            self._layer_quantizer.empty_scratch((hidden,), self.shapes.dtype, device),
            self._cache_quantizer.empty_scratch(
                (cache * max(self.shapes.cache_lengths),), self.shapes.dtype, device
            ),
        ]
        return max((c for c in candidates if c is not None), key=Tensor.numel, default=None)

    def pack_input(self, x_BTE: Tensor, layout: Layout, buffer: Tensor, scratch: Tensor | None) -> None:
        """Write a layer input to the front of a record or a head's input."""
        self._layer_quantizer.quantize_(x_BTE, self._input_parts(layout, buffer), scratch)

    def unpack_input(self, layout: Layout, buffer: Tensor, scratch: Tensor | None) -> Tensor:
        """A layer input [B, T, E]; it shares the buffer's memory where nothing has to be unpacked."""
        packed = self._input_parts(layout, buffer)
        if len(packed) == 1:
            return packed[0]
        rows = packed[0].shape[:2]
        x_BTE = torch.empty(*rows, self.shapes.embed_size, dtype=self.shapes.dtype, device=buffer.device)
        self._layer_quantizer.dequantize_(packed, x_BTE, scratch)
        return x_BTE

    def pack_caches(
        self,
        caches: Sequence[PlainKVBuffer],
        row: Row,
        column: Column,
        buffer: Tensor,
        scratch: Tensor | None,
    ) -> None:
        """Write the row's caches, as they are at the column's left edge, to a KV checkpoint."""
        for filled_NGSD, packed in self._pairs(caches, row, column, buffer):
            self._cache_quantizer.quantize_(filled_NGSD, packed, scratch)

    def unpack_caches(
        self,
        caches: Sequence[PlainKVBuffer],
        row: Row,
        column: Column,
        buffer: Tensor,
        scratch: Tensor | None,
    ) -> None:
        """Set the row's caches to what they were at the column's left edge."""
        for filled_NGSD, packed in self._pairs(caches, row, column, buffer):
            self._cache_quantizer.dequantize_(packed, filled_NGSD, scratch)

    def sizes(self) -> dict[CellKey, int]:
        """Bytes of every checkpoint of the plan."""
        sizes: dict[CellKey, int] = {}
        for column in self.plan.columns:
            for row in self.plan.rows:
                sizes[record_key(row.index, column)] = self.record(row, column).num_bytes
            sizes[record_key(len(self.plan.rows), column)] = self.top(column).num_bytes
            sizes[head_gradient_key(column)] = self.head_gradient(column).num_bytes
        for column in self.kv_columns():
            sizes[kv_key(column)] = max(self.kv(row, column).num_bytes for row in self.plan.rows)
        return sizes

    def _pairs(
        self, caches: Sequence[PlainKVBuffer], row: Row, column: Column, buffer: Tensor
    ) -> Iterable[tuple[Tensor, tuple[Tensor, ...]]]:
        parts = self.kv(row, column).views(buffer)
        each = len(parts) // len(caches)
        for i, (cache, shape) in enumerate(zip(caches, self._filled_shapes(row, column), strict=True)):
            yield cache.entries_NGLD[:, :, : shape[2]], parts[i * each : (i + 1) * each]

    def _input_parts(self, layout: Layout, buffer: Tensor) -> tuple[Tensor, ...]:
        num_parts = len(
            self._layer_quantizer.packed_shapes((1, 1, self.shapes.embed_size), self.shapes.dtype)
        )
        return layout.views(buffer)[:num_parts]

    def _hidden(self, column: Column) -> tuple[int, int, int]:
        return self.shapes.batch_size, column.length, self.shapes.embed_size

    def _filled_shapes(self, row: Row, column: Column) -> list[tuple[int, int, int, int]]:
        s = self.shapes
        lengths = [min(s.cache_lengths[layer], column.start) for layer in row.layers]
        return [(2 * s.batch_size, s.num_groups, length, s.head_size) for length in lengths]

    def _num_slots(self, row: Row, column: Column) -> int:
        if not self.logs_slots:
            return 0
        evicted = 0
        for length in (self.shapes.cache_lengths[layer] for layer in row.layers):
            # Tokens beyond the cache's length: each has displaced one.
            evicted += max(0, column.stop - length) - max(0, column.start - length)
        return self.shapes.batch_size * self.shapes.num_groups * evicted
