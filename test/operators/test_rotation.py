"""Angles and rotation against plain numbers, and on a GPU the kernels against the plain versions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from crosscurrent.operators.rotation import angles, rotate

SHAPES = [(1, 3, 5, 8), (2, 1, 7, 6), (2, 4, 33, 128), (1, 5, 1, 2)]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, H, T, D] in a [B, T, H, D] buffer, and angles [T, D/2] that are at least float32."""
    generator = torch.Generator().manual_seed(0)
    B, H, T, D = shape
    x = torch.randn(B, T, H, D, generator=generator, dtype=torch.float64).transpose(1, 2).to(dtype)
    angles = torch.randn(T, D // 2, generator=generator, dtype=torch.float64) * 3
    wide = torch.promote_types(dtype, torch.float32)
    return x, angles.cos().to(wide), angles.sin().to(wide)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_turn_as_complex_numbers_do(shape: tuple[int, ...]) -> None:
    x, cos, sin = draw(shape, torch.float64)
    pairs = torch.complex(*x.contiguous().chunk(2, dim=-1)) * torch.complex(cos, sin)
    turned = rotate(x, cos, sin, 1)
    # Two products of numbers below 8, in float64.
    torch.testing.assert_close(turned, torch.cat([pairs.real, pairs.imag], -1), rtol=0, atol=1e-14)
    torch.testing.assert_close(rotate(turned, cos, sin, -1), x, rtol=0, atol=1e-14)
    assert turned.stride() == x.stride()


@pytest.mark.parametrize("start", [0, 5_000_000])
def test_angles_are_those_of_the_positions(start: int) -> None:
    cos, sin = angles(torch.tensor(start), 3, 4, 10_000.0, torch.float64)
    for position, feature in ((0, 0), (1, 2), (2, 3)):
        angle = (start + position) * 10_000.0 ** (-feature / 4)
        # The power and the product are each rounded, to 2^-53 of an angle of up to 5e6: 1.1e-9.
        assert math.isclose(cos[position, feature], math.cos(angle), rel_tol=0, abs_tol=1.2e-9)
        assert math.isclose(sin[position, feature], math.sin(angle), rel_tol=0, abs_tol=1.2e-9)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "half"), [(1, 1), (7, 3), (300, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_kernel_makes_the_angles_of_the_plain_version(length: int, half: int, dtype: torch.dtype) -> None:
    start, theta = 5_000_000, 500_000.0
    exact = angles(torch.tensor(start), length, half, theta, torch.float64)
    got = angles(torch.tensor(start).cuda(), length, half, theta, dtype)
    for here, there in zip(got, exact, strict=True):
        assert (here.shape, here.dtype) == (there.shape, dtype)
        # Each side rounds its angle as above, the power here to 2 units; then one rounding to the dtype.
        atol = 4e-9 + torch.finfo(dtype).eps
        torch.testing.assert_close(here.cpu().double(), there, rtol=0, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_kernel_does_what_the_plain_version_does(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, cos, sin = draw(shape, dtype)
    exact = rotate(x.double(), cos.double(), sin.double(), 1)
    got = rotate(x.cuda(), cos.cuda(), sin.cuda(), 1)
    assert got.dtype == dtype
    assert got.stride() == x.stride()
    # Two products and a sum in float32 or wider, then one rounding to the dtype, of numbers below 8.
    wide = torch.promote_types(dtype, torch.float32)
    atol = 8 * (3 * torch.finfo(wide).eps + torch.finfo(dtype).eps)
    torch.testing.assert_close(got.cpu().double(), exact, rtol=0, atol=atol)
