"""Attention through a bounded cache for a whole column: one autograd function, many chunks a kernel.

Usage, for one layer and one column:

    cache = PlainKVBuffer.empty((B, G, L, D), dtype=x.dtype, device=x.device, with_gradient=True)
    windows = make_windows(evictions, slot_bytes=..., device=x.device)
    out_BHTD = pass_column(q_BHTD, k_BGTD, v_BGTD, cache, windows)     # no gradient; the cache moves on
    advance_column(k_BGTD, v_BGTD, cache, windows)                     # the same without attention
    out_BHTD = attend_column(q_BHTD, k_BGTD, v_BGTD, cache, windows)   # known to autograd; see the note

Note [Versions of a cache are lists of rows]
    Plain autograd would keep every version of the cache: one per chunk. But once the evictions are known, a
    version is no tensor. Put the cache at the column's left edge and the column's new entries one behind the
    other in a pool. What a chunk sees is then a list of the pool's rows: a few bytes a slot in place of whole
    keys and values. The list of the next chunk follows from that of the last by the same moves that the
    eviction makes in a cache.

    So a column's forward pass is: make the lists, take the rows, attend. Chunks that are equally long and see
    equally many slots (all of them, once the cache is full) make one batch for the attention kernel, which
    would leave most of a GPU idle with a single chunk. Its backward pass takes the rows again, and adds the
    gradients that come back to the rows of the pool's gradient. To that it first adds the gradient of the
    cache at the column's right edge, through the list of the last chunk. In the end, the front of the pool's
    gradient is the gradient of the cache at the left edge, which the column to the left starts with, and the
    rest is that of the new entries. The cache itself is not written: it stays at the left edge.

    A packed cache has a pool of codes, and one of scales. Attention reads the values of that pool, and the
    cache at the right edge gets rows of codes and scales: entries are packed once, and then only moved.

    Memory for a layer: the cache, the pool (cache and column), the same for gradients, and the rows of one
    batch of chunks, which `_WINDOW_BYTES` bounds.

Legend: B batch, H query heads, G query groups, T tokens of a column, C tokens of a chunk, n chunks of a
group, L cache length, S slots that a chunk sees, P rows of a pool, D head size, X size of a part's rows,
N = 2 B: the keys of the batch, then its values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crosscurrent.kvcache.buffers import KVBuffer, PlainKVBuffer, halves
from crosscurrent.kvcache.placement import Eviction
from crosscurrent.kvcache.quantize import Packed
from crosscurrent.model.attention import attend, attend_backward
from crosscurrent.operators.copies import copy_all
from crosscurrent.operators.rows import add_rows_, follow_rows, take_rows

_WINDOW_BYTES = 128 << 20
"""Keys and values of one batch of chunks. Enough for several chunks of any cache that is small on a GPU."""
_WINDOW_BYTES_BACKWARD = _WINDOW_BYTES // 2
"""The same where there is a backward pass, which has several times as much beside them: gradients of the keys
and values, for some kernels even those of every head."""


def advance_column(k_BGTD: Tensor, v_BGTD: Tensor, cache: KVBuffer, windows: Windows) -> None:
    """Place a column's keys and values, without attention."""
    _move_on(cache, cache.pool(k_BGTD, v_BGTD, windows.filled), windows)


@torch.no_grad()
def pass_column(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, cache: KVBuffer, windows: Windows) -> Tensor:
    """Attend with each chunk [B, H, T, D], and leave the cache at the column's right edge."""
    pool = cache.pool(k_BGTD, v_BGTD, windows.filled)
    pool_NGPD = cache.unpack(pool)
    outs = [view.by_chunk(attend(view.chunks(q_BHTD), *view.take(pool_NGPD))[0]) for view in windows.views]
    _move_on(cache, pool, windows)
    return join_tokens(outs)


def attend_column(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, cache: PlainKVBuffer, windows: Windows
) -> Tensor:
    """Attend with each chunk: [B, H, T, D], known to autograd. The cache stays at the column's left edge.

    The cache must be at the left edge, and its gradient be that at the right edge when the backward pass
    begins; the backward pass turns it into that at the left edge.
    """
    out = _ColumnAttention.apply(q_BHTD, k_BGTD, v_BGTD, cache, windows)  # type: ignore[no-untyped-call]
    return out  # type: ignore[no-any-return]


class _ColumnAttention(torch.autograd.Function):
    """See Note [Versions of a cache are lists of rows]."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        cache: PlainKVBuffer,
        windows: Windows,
    ) -> Tensor:
        (pool_NGPD,) = cache.pool(k_BGTD, v_BGTD, windows.filled)
        views = windows.views
        attended = [attend(view.chunks(q_BHTD), *view.take(pool_NGPD)) for view in views]
        out_BHTD = join_tokens([view.by_chunk(out) for view, (out, _) in zip(views, attended, strict=True)])
        lses = [lse for _, lse in attended]
        ctx.save_for_backward(q_BHTD, out_BHTD, pool_NGPD, *lses)
        ctx.cache, ctx.views = cache, views
        return out_BHTD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, out_BHTD, pool_NGPD, *lses = ctx.saved_tensors
        cache: PlainKVBuffer = ctx.cache
        views: tuple[_View, ...] = ctx.views
        assert cache.grads_NGLD is not None, "a cache under autograd has a gradient"
        grads_NGPD = torch.zeros_like(pool_NGPD, dtype=cache.grads_NGLD.dtype)
        last = views[-1].last()
        last.add_(grads_NGPD, cache.grads_NGLD[:, :, : last.num_slots].unsqueeze(1))
        dqs: list[Tensor] = []
        for view, lse in zip(reversed(views), reversed(lses), strict=True):
            grad, q, out = (view.chunks(x) for x in (grad_out_BHTD, q_BHTD, out_BHTD))
            dq, dkv = attend_backward(grad, q, *view.take(pool_NGPD), out, lse)
            dqs.insert(0, view.by_chunk(dq))
            # [2, B * n, ...] and [2 B, n, ...] are the same memory.
            view.add_(grads_NGPD, dkv.view(-1, view.num_chunks, *dkv.shape[2:]))
        filled = pool_NGPD.shape[2] - q_BHTD.shape[2]
        cache.grads_NGLD[:, :, :filled] = grads_NGPD[:, :, :filled]
        return join_tokens(dqs), *halves(grads_NGPD[:, :, filled:].to(q_BHTD.dtype)), None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """What n chunks of one length see of a pool, each as many slots."""

    start: int
    """The first token, within the column."""
    num_chunks: int
    chunk_length: int
    num_slots: int
    rows_BnGS: Tensor | None
    """Rows of the pool; 1 in place of B and G if they are the same for all. None: the pool's first S."""

    def take(self, pool_NGPD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B * n, G, S, D]."""
        keys, values = halves(self.rows_of(pool_NGPD))
        return keys.flatten(0, 1), values.flatten(0, 1)

    def rows_of(self, pool_NGPX: Tensor) -> Tensor:
        """The rows [N, n, G, S, X]; where nothing was moved yet, the pool itself."""
        if self.rows_BnGS is None:
            return pool_NGPX[:, None, :, : self.num_slots]
        windows_NnGSX: Tensor = take_rows(pool_NGPX, self.rows_BnGS)
        return windows_NnGSX

    def add_(self, grads_NGPD: Tensor, windows_NnGSD: Tensor) -> None:
        """Add gradients to the rows that they belong to; N may be the keys' or the values' half."""
        if self.rows_BnGS is None:
            grads_NGPD[:, :, : self.num_slots].add_(windows_NnGSD[:, 0])
        else:
            add_rows_(grads_NGPD, self.rows_BnGS, windows_NnGSD)

    def last(self) -> _View:
        """The last chunk alone."""
        rows = None if self.rows_BnGS is None else self.rows_BnGS[:, -1:]
        return _View(
            start=self.start + (self.num_chunks - 1) * self.chunk_length,
            num_chunks=1,
            chunk_length=self.chunk_length,
            num_slots=self.num_slots,
            rows_BnGS=rows,
        )

    def chunks(self, x_BHTD: Tensor) -> Tensor:
        """The chunks' tokens as a batch [B * n, H, C, D]: a view where the strides allow it."""
        B, H, _, D = x_BHTD.shape
        tokens = slice(self.start, self.start + self.num_chunks * self.chunk_length)
        x_BTHD = x_BHTD[:, :, tokens].transpose(1, 2)
        return x_BTHD.reshape(B * self.num_chunks, self.chunk_length, H, D).transpose(1, 2)

    def by_chunk(self, x_MHCD: Tensor) -> Tensor:
        """What belongs to `chunks`, token by token: [B, H, n * C, D]."""
        M, H, C, D = x_MHCD.shape
        num_tokens = self.num_chunks * C
        return x_MHCD.transpose(1, 2).reshape(M // self.num_chunks, num_tokens, H, D).transpose(1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """What the chunks of a column see of its pool."""

    filled: int
    """Occupied slots of the cache at the column's left edge: the pool's first rows."""
    views: tuple[_View, ...]


def join_tokens(parts_BHTD: Sequence[Tensor]) -> Tensor:
    """The parts of a column [B, H, T, D]. In memory it lies as [B, T, H, D], as the projections have it."""
    if len(parts_BHTD) == 1:
        return parts_BHTD[0]
    return torch.cat([part.transpose(1, 2) for part in parts_BHTD], dim=1).transpose(1, 2)


def _move_on(cache: KVBuffer, pool: Packed, windows: Windows) -> None:
    """Leave the cache at the column's right edge."""
    last = windows.views[-1].last()
    for part_NGLX, pool_NGPX in zip(cache.parts, pool, strict=True):
        copy_all([part_NGLX[:, :, : last.num_slots]], [last.rows_of(pool_NGPX)[:, 0]])


def make_windows(
    evictions: Sequence[Eviction], *, slot_bytes: int, device: torch.device, backward: bool = False
) -> Windows:
    """What the chunks of a column see: as few views as their shapes and `_WINDOW_BYTES` allow.

    `slot_bytes` is what one slot of the cache holds, for the whole batch and all groups, as values;
    `backward`: they are for `attend_column`.
    """
    window_bytes = _WINDOW_BYTES_BACKWARD if backward else _WINDOW_BYTES
    filled = evictions[0].filled_before
    rows = _Rows(filled + sum(eviction.chunk_length for eviction in evictions), device, evictions)
    views: list[_View] = []
    start = 0
    for (chunk_length, num_slots, num_moved), same in itertools.groupby(evictions, _shape):
        alike = list(same)
        most = max(1, window_bytes // (slot_bytes * num_slots)) if num_moved else 1
        for first in range(0, len(alike), most):
            members = alike[first : first + most]
            view = _View(
                start=start,
                num_chunks=len(members),
                chunk_length=chunk_length,
                num_slots=num_slots,
                rows_BnGS=rows.after(members) if num_moved else None,
            )
            views.append(view)
            start += chunk_length * len(members)
    return Windows(filled=filled, views=tuple(views))


def _shape(eviction: Eviction) -> tuple[int, int, int]:
    """Chunks with the same can be one batch: their tokens, the slots they see, the entries that move.

    Once entries have moved the cache is full, so that they move for every later chunk, too.
    """
    return eviction.chunk_length, eviction.filled_after, eviction.num_evicted


class _Rows:
    """The pool's row of each slot, as the chunks of a column are placed one after the other."""

    def __init__(self, num_rows: int, device: torch.device, evictions: Sequence[Eviction]) -> None:
        # Without moves, slot s holds row s; a chunk's new rows are the pool's last, chunk by chunk.
        self._all_P = torch.arange(num_rows, dtype=torch.int32, device=device)
        self._rows_BGL = self._all_P[: evictions[0].cache_length].expand(1, 1, -1)
        # Chunks that fit without moving anything come first, and are not asked for.
        self._next = num_rows - sum(eviction.chunk_length for eviction in evictions if eviction.num_evicted)

    def after(self, evictions: Sequence[Eviction]) -> Tensor:
        """The rows of the slots, all of them occupied, after each of the next chunks: [B, n, G, L]."""
        length = evictions[0].chunk_length
        slots_BnGm = evictions[0].stack_slots(evictions, self._all_P)
        # From the first slots that differ by sequence and group on, the rows do, too.
        rows_BGL = self._rows_BGL.expand(slots_BnGm.shape[0], slots_BnGm.shape[2], -1)
        lists_BnGL: Tensor = follow_rows(rows_BGL, slots_BnGm, self._next, length)
        self._rows_BGL = lists_BnGL[:, -1]
        self._next += length * len(evictions)
        return lists_BnGL
