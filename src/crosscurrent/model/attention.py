"""Grouped-query attention with an explicit backward and a second pass for summed weights.

Usage, for the last C of S tokens (the other S - C keys are visible to every query):

    out_BHCD, lse_BHC = attend(q_BHCD, k_BGSD, v_BGSD)
    dq_BHCD, dkv_2BGSD = attend_backward(grad_out_BHCD, q_BHCD, k_BGSD, v_BGSD, out_BHCD, lse_BHC)
    weights_BGS = summed_weights(q_BHCD, k_BGSD, lse_BHC)
    out_BHCD = attention(q_BHCD, k_BGSD, v_BGSD)  # the same, known to autograd

Legend: B batch, H query heads, G query groups (key/value heads), C queries, S keys, D head size. Query c
sees the keys s <= S - C + c (a lower-right causal mask); head h reads group h // (H // G); the scale is
1 / sqrt(D). Any strides will do; as long as the last is 1, keys and values are read in place from the front
of a longer cache. [B, T, H, D] buffers, passed transposed, are the fastest for queries, outputs and their
gradients.

Each is one operator of `crosscurrent.operators`: plain matrix products on a CPU, fused kernels on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crosscurrent.operators import attention as operators


def attend(q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to all S keys from the last C positions, outside of autograd.

    Returns the output in the dtype of the queries, and the log-sum-exp of the scaled scores in float32
    (float64 for float64), which `attend_backward` and `summed_weights` need.
    """
    (H, C), (G, S) = q_BHCD.shape[1:3], k_BGSD.shape[1:3]
    if H % G or C > S:
        raise ValueError(
            f"got {H} heads, {G} groups, {C} queries, {S} keys; expected a whole number of heads a group and "
            f"no more queries than keys: pass q as [B, H, C, D] and k, v as [B, G, S, D]"
        )
    return operators.attend(q_BHCD, k_BGSD, v_BGSD)  # type: ignore[no-any-return]


def attend_backward(
    grad_out_BHCD: Tensor, q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, out_BHCD: Tensor, lse_BHC: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the queries, and of the keys and values in one tensor, from what `attend` took and gave.

    On CUDA in half precision they differ in their last bits from run to run unless
    `torch.use_deterministic_algorithms(True)` is set.
    """
    gradients = operators.attend_backward(grad_out_BHCD, q_BHCD, k_BGSD, v_BGSD, out_BHCD, lse_BHC)
    return gradients  # type: ignore[no-any-return]


def summed_weights(q_BHCD: Tensor, k_BGSD: Tensor, lse_BHC: Tensor) -> Tensor:
    """Softmax weights summed over the queries and the heads of a group, in float32 or float64."""
    return operators.summed_weights(q_BHCD, k_BGSD, lse_BHC)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """`attend`, with `attend_backward` as its gradient."""

    @staticmethod
    def forward(ctx: Any, q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
        out, lse = attend(q_BHCD, k_BGSD, v_BGSD)
        ctx.save_for_backward(q_BHCD, k_BGSD, v_BGSD, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, (dk, dv) = attend_backward(grad_out, *ctx.saved_tensors)
        return dq, dk, dv


def attention(q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
    """Attend with ordinary autograd: [B, H, C, D]."""
    return _Attention.apply(q_BHCD, k_BGSD, v_BGSD)  # type: ignore[no-any-return, no-untyped-call]
