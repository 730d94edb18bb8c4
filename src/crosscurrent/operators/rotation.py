"""Rotary positions: the angles of consecutive positions, and turning pairs of features by them, or back.

Usage:

    cos_TF, sin_TF = angles(start, T, F, theta, torch.float32)  # positions start .. start + T
    y_BHTD = rotate(x_BHTD, cos_TF, sin_TF, 1)
    grad_x_BHTD = rotate(grad_y_BHTD, cos_TF, sin_TF, -1)

`start` is a tensor of one integer, so that the same launch can serve any positions. Angles are made in
float64: in float32, position * frequency is off by several hundredths of a radian a million tokens in.
Feature d of the first half is paired with d + D/2. The sines are multiplied by the last argument, and the
strides of x are kept if the last is 1.

Legend: B batch, H heads, T tokens, D head size, F = D / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crosscurrent.operators.library import register


def _angles(start: Tensor, length: int, half: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exponents_F = torch.arange(half, device=start.device, dtype=torch.float64)
    frequencies_F = torch.pow(theta, exponents_F / -half)
    positions_T = torch.arange(length, device=start.device, dtype=torch.float64) + start
    angles_TF = positions_T[:, None] * frequencies_F
    return angles_TF.cos().to(dtype), angles_TF.sin().to(dtype)


def _rotate(x: Tensor, cos_TF: Tensor, sin_TF: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    # Both halves in one kernel: a view of pairs of halves, with the same cosines for each.
    pairs = (*x.shape[:-1], 2, half)
    torch.mul(x.view(pairs), cos_TF.unsqueeze(-2), out=out.view(pairs))
    out[..., :half].addcmul_(high, sin_TF, value=-sign)
    out[..., half:].addcmul_(low, sin_TF, value=sign)
    return out


_CUDA = "crosscurrent.operators.rotation_triton"
angles = register(
    "angles(Tensor start, int length, int half, float theta, ScalarType dtype) -> (Tensor, Tensor)",
    _angles,
    _CUDA,
)
rotate = register("rotate(Tensor x, Tensor cos, Tensor sin, int sign) -> Tensor", _rotate, _CUDA)
