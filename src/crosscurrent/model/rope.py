"""Rotary positions, absolute in the whole sequence, in any dtype.

Usage:

    rope = Rope(head_size=64, theta=10_000.0)
    start = torch.full((), 0, device=x.device)
    q_BHTD = rotate(q_BHTD, rope.angles(start, T, dtype=x.dtype))

Su et al. 2021, arXiv:2104.09864. Feature d of the first half is paired with d + D/2, as in most open
models, and not with its neighbour as in the paper. `operators.rotation` says how precise the angles are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crosscurrent.operators import rotation as operators

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [T, D/2] of T consecutive positions."""


class Rope:
    """Makes the angles of a run of positions."""

    def __init__(self, *, head_size: int, theta: float) -> None:
        self._head_size = head_size
        self._theta = theta

    def angles(self, start: Tensor, length: int, *, dtype: torch.dtype) -> Angles:
        """Angles of the positions start .. start + length, in float32 or wider. `start`: one integer."""
        dtype = torch.promote_types(dtype, torch.float32)
        return operators.angles(start, length, self._head_size // 2, self._theta, dtype)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    """A rotation, whose gradient is the rotation back. It saves the angles and not the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TF, sin_TF)
        return operators.rotate(x, cos_TF, sin_TF, 1)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return operators.rotate(grad, *ctx.saved_tensors, -1), None, None


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn the pairs of x [B, H, T, D] by the angles; the strides of x are kept."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        turned: Tensor = operators.rotate(x, *angles, 1)
        return turned
    return _Rotate.apply(x, *angles)  # type: ignore[no-any-return, no-untyped-call]
