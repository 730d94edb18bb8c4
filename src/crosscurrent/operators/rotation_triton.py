"""The operators of `rotation` on CUDA: each one kernel; one pass over x, in float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, out,
    x_batch, x_head, x_token, out_batch, out_head, out_token,
    num_tokens, num_heads, sign,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    # One program turns all heads of one token, which have the same angles.
    token = tl.program_id(0) % num_tokens
    batch = (tl.program_id(0) // num_tokens).to(tl.int64)
    features = tl.arange(0, BLOCK_HALF)
    heads = tl.arange(0, BLOCK_HEADS)
    in_half = features < HALF
    mask = (heads < num_heads)[:, None] & in_half[None, :]
    c = tl.load(cos + token.to(tl.int64) * HALF + features, mask=in_half, other=0.0)[None, :]
    s = tl.load(sin + token.to(tl.int64) * HALF + features, mask=in_half, other=0.0)[None, :] * sign
    source = x + batch * x_batch + token.to(tl.int64) * x_token + heads[:, None] * x_head + features[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(c.dtype)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(c.dtype)
    target = out + batch * out_batch + token.to(tl.int64) * out_token + heads[:, None] * out_head
    target = target + features[None, :]
    tl.store(target, (low * c - high * s).to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (high * c + low * s).to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _angles_kernel(  # type: ignore[no-untyped-def]
    start, cos, sin, num_angles, THETA: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_angles
    position = (tl.load(start) + index // HALF).to(tl.float64)
    exponent = (index % HALF).to(tl.float64) / -HALF
    # A constant: an argument that is a float would come in as float32.
    theta = tl.full((BLOCK,), THETA, tl.float64)
    angle = position * libdevice.pow(theta, exponent)
    tl.store(cos + index, libdevice.cos(angle).to(cos.dtype.element_ty), mask=mask)
    tl.store(sin + index, libdevice.sin(angle).to(sin.dtype.element_ty), mask=mask)


_BLOCK = 256


def angles(start: Tensor, length: int, half: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos_TF, sin_TF = torch.empty(2, length, half, dtype=dtype, device=start.device)
    num_angles = length * half
    _angles_kernel[(triton.cdiv(num_angles, _BLOCK),)](
        start, cos_TF, sin_TF, num_angles, THETA=theta, HALF=half, BLOCK=_BLOCK
    )
    return cos_TF, sin_TF


def rotate(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, sign: int) -> Tensor:
    B, H, T, D = x.shape
    out = torch.empty_like(x)
    _rotate_kernel[(B * T,)](
        x, cos_TF.contiguous(), sin_TF.contiguous(), out,
        *x.stride()[:3], *out.stride()[:3],
        T, H, sign,
        HALF=D // 2, BLOCK_HALF=triton.next_power_of_2(D // 2), BLOCK_HEADS=triton.next_power_of_2(H),
    )  # fmt: skip
    return out
