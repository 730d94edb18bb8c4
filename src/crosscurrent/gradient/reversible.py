"""Attention through a bounded cache, chunk by chunk, whose backward walks the cache back in place.

Usage, for one layer and one column:

    cache = make_cache((B, G, L, D), dtype=x.dtype, device=x.device, with_gradient=True)
    out_BHTD = attend_column(q_BHTD, k_BGTD, v_BGTD, cache, evictions)   # known to autograd
    advance_column(k_BGTD, v_BGTD, cache, evictions)                     # the cache only

Note [Reversible cache]
    Plain autograd would keep every version of the cache. Here one autograd function covers all chunks of
    a column. It saves what is as long as the column: queries, outputs, log-sum-exps, and the entries that
    each chunk overwrote. Its backward visits the chunks from the last to the first. For each it computes
    the gradients of attention with the cache as it stands, adds those of the keys and values to the
    cache's gradient, takes the new entries' share out of there, and puts the old entries back. After it,
    cache and gradient are those at the column's left edge: the gradient is what the column to the left
    starts with. Nothing is matched or looked up: chunks are in order because they are in one loop.

The keys and values of a layer lie behind each other in one buffer, so that one kernel moves both.

Legend: B batch, H query heads, G query groups, T tokens of a column, C tokens of a chunk, L cache length,
S filled slots, D head size, N = 2 B: the keys of the batch, then its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from crosscurrent.kvcache.placement import Eviction, GroupedEviction
from crosscurrent.model.attention import attend, attend_backward

RoundTrip = Callable[[Tensor], Tensor]
"""What storing entries does to them. The gradient passes straight through."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's live cache, and the gradient with respect to its entries where one is needed."""

    entries_NGLD: Tensor
    grads_NGLD: Tensor | None
    """Float32 for half precision: thousands of chunks add to the entries that are never evicted."""
    round_trip: RoundTrip | None

    def keys_values(self, filled: int) -> tuple[Tensor, Tensor]:
        """The filled slots' keys and values [B, G, S, D], in place."""
        return _halves(self.entries_NGLD[:, :, :filled])

    def stack(self, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        """New entries [2 B, G, T, D], as the cache will hold them."""
        new_NGTD = torch.cat([k_BGTD, v_BGTD])
        return new_NGTD if self.round_trip is None else self.round_trip(new_NGTD)


def make_cache(
    shape_BGLD: tuple[int, int, int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    round_trip: RoundTrip | None = None,
    with_gradient: bool = False,
) -> LayerCache:
    """An empty cache for a batch."""
    B, G, L, D = shape_BGLD
    # Zeros and not garbage: a slot that was never filled is read by nothing but a whole-buffer copy, and
    # should not carry NaN into it.
    entries = torch.zeros(2 * B, G, L, D, dtype=dtype, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    grads = torch.zeros(2 * B, G, L, D, dtype=wide, device=device) if with_gradient else None
    return LayerCache(entries, grads, round_trip)


def for_keys_and_values(eviction: Eviction) -> Eviction:
    """The same eviction for a buffer that holds the values behind the keys."""
    if not isinstance(eviction, GroupedEviction):
        return eviction
    slots_BGm = eviction.slots_BGm.long()
    return replace(eviction, slots_BGm=torch.cat([slots_BGm, slots_BGm]))


def advance_column(k_BGTD: Tensor, v_BGTD: Tensor, cache: LayerCache, evictions: Sequence[Eviction]) -> None:
    """Place a column's keys and values, chunk by chunk, without attention and without a way back."""
    new_NGTD = cache.stack(k_BGTD, v_BGTD)
    start = 0
    for eviction in evictions:
        stop = start + eviction.chunk_length
        place_(cache, eviction, new_NGTD[:, :, start:stop])
        start = stop


def place_(cache: LayerCache, eviction: Eviction, new_NGCD: Tensor) -> None:
    """Place one chunk's entries without a way back."""
    if eviction.num_evicted:
        eviction.move_(cache.entries_NGLD)
    cache.entries_NGLD[:, :, eviction.tail].copy_(new_NGCD)


def attend_column(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, cache: LayerCache, evictions: Sequence[Eviction]
) -> Tensor:
    """Place a column's keys and values chunk by chunk and attend with each chunk: [B, H, T, D].

    Under autograd the backward walks the cache and its gradient back; it must run before the cache is used
    for anything else.
    """
    if torch.is_grad_enabled() and (q_BHTD.requires_grad or k_BGTD.requires_grad or v_BGTD.requires_grad):
        out = _ColumnAttention.apply(q_BHTD, k_BGTD, v_BGTD, cache, evictions)  # type: ignore[no-untyped-call]
        return out  # type: ignore[no-any-return]
    new_NGTD = cache.stack(k_BGTD, v_BGTD)
    out_BHTD = empty_tokens_first(q_BHTD)
    start = 0
    for eviction in evictions:
        chunk = slice(start, start + eviction.chunk_length)
        place_(cache, eviction, new_NGTD[:, :, chunk])
        out_BHTD[:, :, chunk] = attend(q_BHTD[:, :, chunk], *cache.keys_values(eviction.filled_after))[0]
        start = chunk.stop
    return out_BHTD


class _ColumnAttention(torch.autograd.Function):
    """See Note [Reversible cache]."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        cache: LayerCache,
        evictions: Sequence[Eviction],
    ) -> Tensor:
        new_NGTD = cache.stack(k_BGTD, v_BGTD)
        out_BHTD = empty_tokens_first(q_BHTD)
        saved: list[tuple[Eviction, Tensor, Tensor]] = []
        start = 0
        for eviction in evictions:
            chunk = slice(start, start + eviction.chunk_length)
            overwritten = eviction.write_(cache.entries_NGLD, new_NGTD[:, :, chunk])
            out, lse = attend(q_BHTD[:, :, chunk], *cache.keys_values(eviction.filled_after))
            out_BHTD[:, :, chunk] = out
            saved.append((eviction, overwritten, lse))
            start = chunk.stop
        ctx.save_for_backward(q_BHTD, out_BHTD)
        ctx.cache = cache
        ctx.chunks = saved
        return out_BHTD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, out_BHTD = ctx.saved_tensors
        cache: LayerCache = ctx.cache
        entries, grads = cache.entries_NGLD, cache.grads_NGLD
        assert grads is not None, "a cache under autograd has a gradient"
        dq_BHTD = empty_tokens_first(q_BHTD)
        dkv_NGTD = empty_tokens_first(entries, num_tokens=q_BHTD.shape[2])
        stop = q_BHTD.shape[2]
        while ctx.chunks:
            # Popped, so that each chunk's saves are freed as the walk goes on.
            eviction, overwritten, lse = ctx.chunks.pop()
            chunk, filled = slice(stop - eviction.chunk_length, stop), slice(0, eviction.filled_after)
            dq, *dkv = attend_backward(
                grad_out_BHTD[:, :, chunk],
                q_BHTD[:, :, chunk],
                *cache.keys_values(eviction.filled_after),
                out_BHTD[:, :, chunk],
                lse,
            )
            for half, grad in zip(_halves(grads), dkv, strict=True):
                half[:, :, filled].add_(grad)
            dq_BHTD[:, :, chunk] = dq
            dkv_NGTD[:, :, chunk] = eviction.unwrite_gradient_(grads)
            eviction.unwrite_(entries, overwritten)
            stop = chunk.start
        return dq_BHTD, *_halves(dkv_NGTD), None, None


def _halves(kv_NGXD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values."""
    batch_size = kv_NGXD.shape[0] // 2
    return kv_NGXD[:batch_size], kv_NGXD[batch_size:]


def empty_tokens_first(like_XYTD: Tensor, *, num_tokens: int | None = None) -> Tensor:
    """An uninitialised tensor of this shape that lies in memory as [X, T, Y, D].

    The output projection reads it without a copy, and fused kernels take such strides.
    """
    X, Y, T, D = like_XYTD.shape
    return like_XYTD.new_empty(X, T if num_tokens is None else num_tokens, Y, D).transpose(1, 2)
