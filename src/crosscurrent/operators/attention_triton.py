"""Triton kernels around the fused attention kernels: summed weights, and merging attention over two parts.

The operators decide when they are used. Import this module only where there is Triton, which CUDA builds of
PyTorch bring along.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.0 / math.log(2.0)
_BLOCK_QUERIES = 64
_BLOCK_KEYS = 128
HEAD_SIZES = (16, 32, 64, 128, 256)
"""A block of rows is loaded whole, and Triton's ranges are powers of two."""


@triton.jit  # type: ignore[untyped-decorator]
def _summed_weights_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, lse_ptr, out_ptr,
    q_batch, q_head, q_row,
    k_batch, k_group, k_row,
    lse_batch, lse_head,
    num_queries, num_keys, num_groups, scale,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    # One program owns BLOCK_KEYS keys of one query group and sums over all queries of all its heads:
    # no atomics, so that the sums (and the evictions that they decide) are the same in every run.
    keys = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    batch = tl.program_id(1) // num_groups
    group = tl.program_id(1) % num_groups
    columns = tl.arange(0, HEAD_SIZE)
    valid_keys = keys < num_keys
    k = tl.load(
        k_ptr + batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_group
        + keys[None, :].to(tl.int64) * k_row + columns[:, None],
        mask=valid_keys[None, :], other=0.0,
    )  # fmt: skip
    # Query i sees keys up to num_keys - num_queries + i: the queries are the last keys.
    first_own = num_keys - num_queries
    first_seeing = tl.maximum(tl.program_id(0) * BLOCK_KEYS - first_own, 0) // BLOCK_QUERIES * BLOCK_QUERIES
    total = tl.zeros([BLOCK_KEYS], dtype=tl.float32)
    for head in range(HEADS):
        q_base = q_ptr + batch.to(tl.int64) * q_batch + (group * HEADS + head).to(tl.int64) * q_head
        lse_base = lse_ptr + batch.to(tl.int64) * lse_batch + (group * HEADS + head).to(tl.int64) * lse_head
        for start in range(first_seeing, num_queries, BLOCK_QUERIES):
            queries = start + tl.arange(0, BLOCK_QUERIES)
            valid_queries = queries < num_queries
            q = tl.load(
                q_base + queries[:, None].to(tl.int64) * q_row + columns[None, :],
                mask=valid_queries[:, None], other=0.0,
            )  # fmt: skip
            lse = tl.load(lse_base + queries, mask=valid_queries, other=0.0)
            logits = tl.dot(q, k) * scale
            seen = (keys[None, :] <= first_own + queries[:, None]) & valid_queries[:, None]
            total += tl.sum(tl.where(seen, tl.exp2(logits - lse[:, None] * 1.4426950408889634), 0.0), axis=0)
    tl.store(out_ptr + tl.program_id(1).to(tl.int64) * num_keys + keys, total, mask=valid_keys)


def sum_weights(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """Sum softmax weights over the queries, and over the heads of each query group, in one pass.

    Shapes: ``q`` (B, H, C, D), ``k`` (B, G, S, D), both bfloat16 or float16 with contiguous rows;
    ``lse`` (B, H, C) float32, natural logarithm. Returns (B, G, S) float32.
    """
    batch, num_heads, num_queries, head_size = q.shape
    num_groups, num_keys = k.shape[1], k.shape[2]
    lse = lse if lse.stride(-1) == 1 else lse.contiguous()
    out = torch.empty((batch, num_groups, num_keys), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(num_keys, _BLOCK_KEYS), batch * num_groups)
    _summed_weights_kernel[grid](
        q, k, lse, out,
        q.stride(0), q.stride(1), q.stride(2),
        k.stride(0), k.stride(1), k.stride(2),
        lse.stride(0), lse.stride(1),
        num_queries, num_keys, num_groups, _LOG2_E / math.sqrt(head_size),
        HEADS=num_heads // num_groups, HEAD_SIZE=head_size,
        BLOCK_QUERIES=_BLOCK_QUERIES, BLOCK_KEYS=_BLOCK_KEYS,
        num_warps=8 if head_size > 64 else 4,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, a_lse_ptr, b_lse_ptr, out_ptr, lse_ptr,
    a_batch, a_head, a_row, b_batch, b_head, b_row, out_batch, out_head, out_row,
    num_heads, num_queries,
    HEAD_SIZE: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
):  # fmt: skip
    queries = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    valid = queries < num_queries
    columns = tl.arange(0, BLOCK_HEAD)
    mask = valid[:, None] & (columns < HEAD_SIZE)[None, :]
    # The log-sum-exps are contiguous: [B, H, C].
    at = tl.program_id(1).to(tl.int64) * num_queries + queries
    a_lse = tl.load(a_lse_ptr + at, mask=valid, other=0.0)
    b_lse = tl.load(b_lse_ptr + at, mask=valid, other=0.0)
    top = tl.maximum(a_lse, b_lse)
    lse = top + tl.log(tl.exp(a_lse - top) + tl.exp(b_lse - top))
    a = tl.load(
        a_ptr + batch * a_batch + head * a_head + queries[:, None] * a_row + columns[None, :],
        mask=mask,
        other=0.0,
    )
    b = tl.load(
        b_ptr + batch * b_batch + head * b_head + queries[:, None] * b_row + columns[None, :],
        mask=mask,
        other=0.0,
    )
    out = a.to(tl.float32) * tl.exp(a_lse - lse)[:, None] + b.to(tl.float32) * tl.exp(b_lse - lse)[:, None]
    target = out_ptr + batch * out_batch + head * out_head + queries[:, None] * out_row + columns[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + at, lse, mask=valid)


def merge(a_BHCD: Tensor, a_lse_BHC: Tensor, b_BHCD: Tensor, b_lse_BHC: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from the outputs and log-sum-exps of attention over each.

    Returns the output, laid out as [B, C, H, D] in memory and passed transposed, and the log-sum-exp.
    """
    B, H, C, D = a_BHCD.shape
    out_BHCD = a_BHCD.new_empty(B, C, H, D).transpose(1, 2)
    lse_BHC = torch.empty((B, H, C), dtype=torch.float32, device=a_BHCD.device)
    block = 32
    _merge_kernel[(triton.cdiv(C, block), B * H)](
        a_BHCD, b_BHCD, a_lse_BHC.contiguous(), b_lse_BHC.contiguous(), out_BHCD, lse_BHC,
        *a_BHCD.stride()[:3], *b_BHCD.stride()[:3], *out_BHCD.stride()[:3],
        H, C, HEAD_SIZE=D, BLOCK_HEAD=triton.next_power_of_2(D), BLOCK_QUERIES=block,
    )  # fmt: skip
    return out_BHCD, lse_BHC
