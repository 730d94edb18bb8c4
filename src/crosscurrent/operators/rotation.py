"""Rotary positions: turn the pairs of features by their angles, or back.

Usage:

    y_BHTD = rotate(x_BHTD, cos_TF, sin_TF, 1)
    grad_x_BHTD = rotate(grad_y_BHTD, cos_TF, sin_TF, -1)

Feature d of the first half is paired with d + D/2. The sines are multiplied by the last argument, and the
strides of x are kept.

Legend: B batch, H heads, T tokens, D head size, F = D / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crosscurrent.operators.library import register


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


rotate = register(
    "rotate(Tensor x, Tensor cos, Tensor sin, int sign) -> Tensor",
    _rotate,
    "crosscurrent.operators.rotation_triton",
)
