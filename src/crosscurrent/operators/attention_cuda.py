"""Attention on CUDA: the fused kernels that PyTorch brings along for half precision, else the plain version.

Two families of kernels, both grouped and both with the log-sum-exp:

- FlashAttention-2 (Dao 2023, arXiv:2307.08691) knows lower-right causal masks. Its backward pass adds with
  atomics unless `torch.use_deterministic_algorithms(True)` asks for order.
- cuDNN's are two to three times faster on Hopper, but their causal mask is upper-left and their backward pass
  is never deterministic. The first S - C keys are visible to every query and the last C causally, and that
  needs no lower-right mask: attend to both parts, and merge. The backward pass of each part only needs the
  output and the log-sum-exp of the whole.

cuDNN it is where it exists, where order was not asked for, and where there is enough work for a GPU.

Legend: B batch, H query heads, G query groups, C queries, S keys, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from crosscurrent.operators.attention import plain_attend, plain_attend_backward, plain_summed_weights
from crosscurrent.operators.attention_triton import HEAD_SIZES, merge, sum_weights

_HALF_DTYPES = (torch.float16, torch.bfloat16)

# Fewer queries or keys leave cuDNN's tiles half empty; fewer tiles of queries leave a GPU half idle, which
# FlashAttention avoids by splitting the keys of the forward pass.
_CUDNN_MIN_LENGTH = 64
_CUDNN_MIN_TILES = 128
_TILE_QUERIES = 128


def attend(q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, H, C, D] and log-sum-exp [B, H, C]."""
    if not _is_fused(q_BHCD):
        return plain_attend(q_BHCD, k_BGSD, v_BGSD)
    if not _prefers_cudnn(q_BHCD, k_BGSD) or not _fills_gpu(q_BHCD):
        return _flash(q_BHCD, k_BGSD, v_BGSD)
    parts = [_cudnn(q_BHCD, k, v, causal) for k, v, causal in _parts(q_BHCD, k_BGSD, v_BGSD)]
    if len(parts) == 1:
        return parts[0]
    (before, before_lse), (own, own_lse) = parts
    return merge(before, before_lse, own, own_lse)


def attend_backward(
    grad_BHCD: Tensor, q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, out_BHCD: Tensor, lse_BHC: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the queries, and of the keys and values: [2, B, G, S, D]."""
    if not _is_fused(q_BHCD):
        return plain_attend_backward(grad_BHCD, q_BHCD, k_BGSD, v_BGSD, out_BHCD, lse_BHC)
    if not _prefers_cudnn(q_BHCD, k_BGSD):
        dq, dk, dv = _flash_backward(grad_BHCD, q_BHCD, k_BGSD, v_BGSD, out_BHCD, lse_BHC)
        return dq, torch.stack([dk, dv])
    lse_BHC1 = lse_BHC.unsqueeze(-1)
    parts = [
        _cudnn_backward(grad_BHCD, q_BHCD, k, v, out_BHCD, lse_BHC1, causal)
        for k, v, causal in _parts(q_BHCD, k_BGSD, v_BGSD)
    ]
    dq = parts[0][0] if len(parts) == 1 else parts[0][0].add_(parts[1][0])
    dkv = k_BGSD.new_empty(2, *k_BGSD.shape)
    for index, out in enumerate(dkv, start=1):
        torch.cat([part[index] for part in parts], dim=2, out=out)
    return dq, dkv


def summed_weights(q_BHCD: Tensor, k_BGSD: Tensor, lse_BHC: Tensor) -> Tensor:
    """Weights [B, G, S]."""
    fits = _is_fused(q_BHCD) and q_BHCD.shape[-1] in HEAD_SIZES
    return (sum_weights if fits else plain_summed_weights)(q_BHCD, k_BGSD, lse_BHC)


def _is_fused(q_BHCD: Tensor) -> bool:
    head_size = q_BHCD.shape[-1]
    return q_BHCD.dtype in _HALF_DTYPES and head_size % 8 == 0 and head_size <= 256


def _fills_gpu(q_BHCD: Tensor) -> bool:
    B, H, C = q_BHCD.shape[:3]
    return B * H * -(-C // _TILE_QUERIES) >= _CUDNN_MIN_TILES


def _prefers_cudnn(q_BHCD: Tensor, k_BGSD: Tensor) -> bool:
    num_queries, num_keys = q_BHCD.shape[2], k_BGSD.shape[2]
    lengths = [num_queries] if num_keys == num_queries else [num_queries, num_keys - num_queries]
    return (
        min(lengths) >= _CUDNN_MIN_LENGTH
        and q_BHCD.shape[-1] <= 128
        and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        and torch.cuda.get_device_capability(q_BHCD.device) >= (9, 0)
        and not torch.are_deterministic_algorithms_enabled()
    )


def _parts(q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Keys, values, and whether they are causal: those before the queries' own, and those."""
    before = k_BGSD.shape[2] - q_BHCD.shape[2]
    own = (k_BGSD[:, :, before:], v_BGSD[:, :, before:], True)
    return [(k_BGSD[:, :, :before], v_BGSD[:, :, :before], False), own] if before else [own]


def _cudnn(q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out_BHCD, lse_BHC1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BHCD, k_BGSD, v_BGSD, None, True, 0.0, causal, False, scale=_scale(q_BHCD)
    )
    return out_BHCD, lse_BHC1.squeeze(-1)


def _cudnn_backward(
    grad_BHCD: Tensor,
    q_BHCD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHCD: Tensor,
    lse_BHC1: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    no_state = torch.empty(2, dtype=torch.int64, device=q_BHCD.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_BHCD, q_BHCD, k_BGSD, v_BGSD, out_BHCD, lse_BHC1, no_state[0], no_state[1],
        None, None, None, q_BHCD.shape[2], k_BGSD.shape[2], 0.0, causal, scale=_scale(q_BHCD),
    )  # fmt: skip
    return dq, dk, dv


def _flash(q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
    out_BCHD, lse_BHC, *_ = torch.ops.aten._flash_attention_forward(
        q_BHCD.transpose(1, 2), k_BGSD.transpose(1, 2), v_BGSD.transpose(1, 2),
        None, None, q_BHCD.shape[2], k_BGSD.shape[2], 0.0, True, False, scale=_scale(q_BHCD),
    )  # fmt: skip
    return out_BCHD.transpose(1, 2), lse_BHC


def _flash_backward(
    grad_BHCD: Tensor, q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, out_BHCD: Tensor, lse_BHC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # The generator's state is only read when there is dropout, and there is none.
    no_state = torch.empty(0, dtype=torch.uint64, device=q_BHCD.device)
    swapped = (t.transpose(1, 2) for t in (grad_BHCD, q_BHCD, k_BGSD, v_BGSD, out_BHCD))
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *swapped, lse_BHC, None, None, q_BHCD.shape[2], k_BGSD.shape[2], 0.0, True, no_state, no_state,
        scale=_scale(q_BHCD),
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _scale(q_BHCD: Tensor) -> float:
    return 1.0 / math.sqrt(q_BHCD.shape[-1])
