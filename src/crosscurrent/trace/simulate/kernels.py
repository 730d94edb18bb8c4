"""GPU-only kernels that programs call by name, written with ordinary ops.

Flash attention (Dao 2023, arXiv:2307.08691) is the one that has no CPU version under its own name. Its
mask is lower-right causal, queries may be more than keys' groups, and the log-sum-exp is in float32. What
the arithmetic gives is right to rounding; it is not bit for bit what a GPU gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def flash_attention_forward(
    query_BCHD: Tensor,
    key_BSGD: Tensor,
    value_BSGD: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``aten._flash_attention_forward`` without dropout, windows or packed sequences."""
    _check(cum_seq_q, dropout_p, window_size_left, window_size_right, others)
    queries, keys, values = _heads(query_BCHD, key_BSGD, value_BSGD)
    scores = queries @ keys.mT * _scale(query_BCHD, scale) + _mask(query_BCHD, key_BSGD, is_causal)
    lse = scores.logsumexp(-1)
    out = torch.empty_like(query_BCHD)
    out.copy_(((scores - lse.unsqueeze(-1)).exp() @ values).transpose(1, 2))
    nothing = torch.empty(0, dtype=query_BCHD.dtype)
    states = torch.zeros(2, dtype=torch.int64)
    return out, lse, states, torch.zeros((), dtype=torch.int64), nothing


def flash_attention_backward(
    grad_out_BCHD: Tensor,
    query_BCHD: Tensor,
    key_BSGD: Tensor,
    value_BSGD: Tensor,
    out_BCHD: Tensor,
    logsumexp_BHC: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten._flash_attention_backward``, under the same limits."""
    _check(cum_seq_q, dropout_p, window_size_left, window_size_right, others)
    factor = _scale(query_BCHD, scale)
    queries, keys, values = _heads(query_BCHD, key_BSGD, value_BSGD)
    grad, out = (tensor.transpose(1, 2).float() for tensor in (grad_out_BCHD, out_BCHD))
    scores = queries @ keys.mT * factor + _mask(query_BCHD, key_BSGD, is_causal)
    weights = (scores - logsumexp_BHC.unsqueeze(-1)).exp()
    d_scores = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * factor
    d_query = (d_scores @ keys).transpose(1, 2)
    d_key, d_value = (_by_group(t, key_BSGD) for t in (d_scores.mT @ queries, weights.mT @ grad))
    targets = torch.empty_like(query_BCHD), torch.empty_like(key_BSGD), torch.empty_like(value_BSGD)
    for target, source in zip(targets, (d_query, d_key, d_value), strict=True):
        target.copy_(source)
    return targets


def _check(packed: Tensor | None, dropout_p: float, left: int | None, right: int | None, others: Any) -> None:
    given = [name for name, value in others.items() if value is not None]
    if packed is not None:
        given.append("packed sequences")
    if dropout_p:
        given.append("dropout")
    if (left is not None and left >= 0) or (right is not None and right >= 0):
        given.append("windows")
    if given:
        raise NotImplementedError(f"simulated CUDA has flash attention without {', '.join(given)} only")


def _scale(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _heads(query_BCHD: Tensor, key_BSGD: Tensor, value_BSGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float32, heads before tokens, each group of keys and values repeated for its heads."""
    repeats = query_BCHD.shape[2] // key_BSGD.shape[2]
    keys, values = (t.transpose(1, 2).float().repeat_interleave(repeats, 1) for t in (key_BSGD, value_BSGD))
    return query_BCHD.transpose(1, 2).float(), keys, values


def _mask(query_BCHD: Tensor, key_BSGD: Tensor, is_causal: bool) -> Tensor:
    num_queries, num_keys = query_BCHD.shape[1], key_BSGD.shape[1]
    mask = torch.zeros(num_queries, num_keys)
    if is_causal:
        future = torch.ones(num_queries, num_keys, dtype=torch.bool).triu_(num_keys - num_queries + 1)
        mask.masked_fill_(future, -math.inf)
    return mask


def _by_group(per_head_BHSD: Tensor, key_BSGD: Tensor) -> Tensor:
    groups = key_BSGD.shape[2]
    B, _, S, D = per_head_BHSD.shape
    return per_head_BHSD.reshape(B, groups, -1, S, D).sum(2).transpose(1, 2)


KERNELS: dict[Any, Callable[..., Any]] = {
    _aten._flash_attention_forward.default: flash_attention_forward,
    _aten._flash_attention_backward.default: flash_attention_backward,
}
