"""Rotary positions, absolute in the whole sequence, in one operator and any dtype.

Usage:

    rope = Rope(head_size=64, theta=10_000.0)
    q_BHTD = rotate(q_BHTD, rope.angles(start, T, device=x.device, dtype=x.dtype))

Su et al. 2021, arXiv:2104.09864. Feature d of the first half is paired with d + D/2, as in most open
models, and not with its neighbour as in the paper. Angles are made in float64: in float32, position *
frequency is off by several hundredths of a radian a million tokens in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crosscurrent.operators.rotation import rotate as turn

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [T, D/2] of T consecutive positions."""


class Rope:
    """Makes the angles of a run of positions; remembers the last run, since all layers ask for it."""

    def __init__(self, *, head_size: int, theta: float) -> None:
        self._head_size = head_size
        self._theta = theta
        self._last: tuple[object, Angles] | None = None

    def angles(self, start: int, length: int, *, device: torch.device, dtype: torch.dtype) -> Angles:
        """Angles of the positions start .. start + length, in float32 or wider, made on the device."""
        dtype = torch.promote_types(dtype, torch.float32)
        key = (start, length, device, dtype)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        # An inference tensor, kept for the next training step, could not be saved for backward.
        with torch.inference_mode(False), torch.no_grad():
            exponents_F = torch.arange(0, self._head_size, 2, device=device, dtype=torch.float64)
            frequencies_F = torch.pow(self._theta, exponents_F / -self._head_size)
            positions_T = torch.arange(start, start + length, device=device, dtype=torch.float64)
            angles_TF = positions_T[:, None] * frequencies_F
            angles = angles_TF.cos().to(dtype), angles_TF.sin().to(dtype)
        self._last = (key, angles)
        return angles


class _Rotate(torch.autograd.Function):
    """A rotation, whose gradient is the rotation back. It saves the angles and not the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TF, sin_TF)
        return turn(x, cos_TF, sin_TF, 1)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return turn(grad, *ctx.saved_tensors, -1), None, None


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn the pairs of x [B, H, T, D] by the angles; the strides of x are kept."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        turned: Tensor = turn(x, *angles, 1)
        return turned
    return _Rotate.apply(x, *angles)  # type: ignore[no-any-return, no-untyped-call]
