"""The fused attention kernels on a real GPU against float64 on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from crosscurrent.model.attention import attend, attend_backward, summed_weights

pytestmark = pytest.mark.gpu

# (batch, groups, heads of a group, queries, keys, head size): chunks after a full cache, a first chunk, a
# single token, sizes that are no multiple of any block, a head size that Triton cannot and one that no
# kernel can.
SHAPES = [
    (2, 2, 4, 128, 512, 128),
    (1, 4, 1, 256, 256, 64),
    (2, 1, 8, 1, 333, 64),
    (1, 2, 3, 77, 301, 80),
    (1, 2, 2, 65, 130, 12),
    # Enough work for cuDNN's kernels: both parts, a causal one alone, and sizes that are no multiples.
    (4, 4, 4, 256, 1024, 128),
    (4, 2, 8, 256, 256, 64),
    (8, 2, 8, 200, 533, 64),
]
HALF = [torch.bfloat16, torch.float16]


def three(gradients: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    dq, (dk, dv) = gradients
    return dq, dk, dv


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries in a [B, T, H, D] buffer, keys and values at the front of a longer cache."""
    B, G, R, C, S, D = shape
    torch.manual_seed(0)
    q = torch.randn(B, C, G * R, D).transpose(1, 2)
    k, v = torch.randn(2, B, G, S + 5, D)[:, :, :, :S]
    return tuple(t.cuda().to(dtype) for t in (q, k, v))  # type: ignore[return-value]


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.cpu().double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_fused_attention_and_its_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = draw(shape, dtype)
    grad = torch.randn_like(q)
    out, lse = attend(q, k, v)
    grads = three(attend_backward(grad, q, k, v, out, lse))
    exact = [t.cpu().double() for t in (q, k, v)]
    exact_out, exact_lse = attend(*exact)
    exact_grads = three(attend_backward(grad.cpu().double(), *exact, exact_out, exact_lse))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    # Weights, their gradients and each result are rounded once to half precision, u = eps / 2 relative,
    # and the rounded output goes into the backward: below eight such roundings in the norm of each.
    tolerance = 8 * torch.finfo(dtype).eps / 2
    for got, want in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        assert got.shape == want.shape
        assert relative_error(got, want) < tolerance
    # Scores of at most 64 in magnitude are sums of at most 128 products in float32: 128 * 2^-24 * 64.
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=0, atol=128 * 2**-24 * 64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_fused_summed_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = draw(shape, dtype)
    exact = [t.cpu().double() for t in (q, k, v)]
    lse = attend(*exact)[1]
    want = summed_weights(exact[0], exact[1], lse)
    got = summed_weights(q, k, lse.cuda().float())
    assert got.dtype == torch.float32
    # A score that is off by 128 * 2^-24 * 64 puts its weight off by as much, relative; the sum of at most
    # 1024 positive terms adds 1024 * 2^-24 at most.
    torch.testing.assert_close(got.cpu().double(), want, rtol=(128 * 64 + 1024) * 2**-24, atol=1e-30)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_summed_weights_are_the_same_in_every_run(dtype: torch.dtype) -> None:
    q, k, v = draw(SHAPES[0], dtype)
    lse = attend(q, k, v)[1]
    first = summed_weights(q, k, lse)
    for _ in range(5):
        assert torch.equal(summed_weights(q, k, lse), first)


def test_deterministic_algorithms_make_the_fused_backward_repeatable() -> None:
    q, k, v = draw(SHAPES[0], torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        out, lse = attend(q, k, v)
        runs = [three(attend_backward(out, q, k, v, out, lse)) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_a_future_key_does_not_matter_to_the_fused_kernels() -> None:
    q, k, v = draw((1, 2, 2, 8, 24, 64), torch.bfloat16)
    before, lse = attend(q, k, v)
    weights = summed_weights(q[:, :, :7], k[:, :, :23], lse[:, :, :7])
    k[:, :, -1] += 10
    v[:, :, -1] += 10
    after = attend(q, k, v)[0]
    assert torch.equal(before[:, :, :7], after[:, :, :7])
    assert not torch.equal(before[:, :, 7], after[:, :, 7])
    # 7 queries of 2 heads; sums of weights that are each off by 2^-10 at most.
    assert math.isclose(weights[0, 0].sum().item(), 14, rel_tol=2**-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_takes_the_plain_path(shape: tuple[int, ...]) -> None:
    q, k, v = draw(shape, torch.float32)
    out, lse = attend(q, k, v)
    exact = [t.cpu().double() for t in (q, k, v)]
    exact_out, exact_lse = attend(*exact)
    grads = three(attend_backward(out, q, k, v, out, lse))
    exact_grads = three(attend_backward(exact_out, *exact, exact_out, exact_lse))
    # Float32, u = 2^-24: scores off by 128 * 64 u as above, and so are weights; each later sum of at most
    # 1024 terms adds its part. In the norm, where errors of random sign cancel, far below the sum of both.
    tolerance = (128 * 64 + 1024) * 2**-24
    for got, want in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        assert relative_error(got, want) < tolerance
