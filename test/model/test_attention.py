"""Attention, its backward and its summed weights against an explicit softmax and plain autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crosscurrent.model.attention import attend, attend_backward, attention, summed_weights
from crosscurrent.operators import attention as attention_module

# Float64 has 2^-53 = 1.1e-16 of rounding. The sums here have at most 24 keys * 8 heads * 8 features
# = 1536 terms of about 1, so errors of 1536 * 1.1e-16 = 1.7e-13 at the very most, twice over.
FLOAT64_ATOL = 5e-13


def three(gradients: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    dq, (dk, dv) = gradients
    return dq, dk, dv


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int, int, int]:
    """(batch, groups, heads of a group, queries, keys, head size)."""
    queries = draw(st.integers(1, 9))
    return (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        queries,
        queries + draw(st.integers(0, 15)),
        draw(st.integers(1, 8)),
    )


def draw_qkv(
    shape: tuple[int, int, int, int, int, int], seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries in a [B, T, H, D] buffer, keys and values at the front of a longer cache."""
    B, G, R, C, S, D = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, C, G * R, D, generator=generator, dtype=torch.float64).transpose(1, 2)
    k, v = torch.randn(2, B, G, S + 3, D, generator=generator, dtype=torch.float64)[:, :, :, :S]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def explicit_weights(q: Tensor, k: Tensor) -> Tensor:
    """Softmax weights [B, H, C, S], head by head, query by query."""
    (B, H, C, D), (G, S) = q.shape, k.shape[1:3]
    rows = []
    for h in range(H):
        for c in range(C):
            seen = S - C + c + 1
            scores = torch.einsum("bd,bsd->bs", q[:, h, c], k[:, h // (H // G), :seen]) / math.sqrt(D)
            weights = torch.softmax(scores, -1)
            rows.append(torch.nn.functional.pad(weights, (0, S - seen)))
    return torch.stack(rows, 1).view(B, H, C, S)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return explicit_weights(q, k) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


settings.register_profile("attention", deadline=None, max_examples=40, derandomize=True)
examples = settings(settings.get_profile("attention"))
seeds = st.integers(0, 2**32 - 1)


class TestAgainstExplicitSoftmax:
    @pytest.mark.parametrize("tile", [1 << 25, 40])
    def test_output_and_gradients(self, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention_module, "_TILE_ELEMENTS", tile)

        @examples
        @given(shape=shapes(), seed=seeds)
        def check(shape: tuple[int, int, int, int, int, int], seed: int) -> None:
            leaves = [t.requires_grad_() for t in draw_qkv(shape, seed)]
            expected = explicit_attention(*leaves)
            grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed + 1)).double()
            expected_grads = torch.autograd.grad(expected, leaves, grad)
            with torch.no_grad():
                out, lse = attend(*leaves)
                grads = three(attend_backward(grad, *leaves, out, lse))
            for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=FLOAT64_ATOL)
            through_autograd = torch.autograd.grad(attention(*leaves), leaves, grad)
            for got, want in zip(through_autograd, grads, strict=True):
                assert torch.equal(got, want)

        check()

    @pytest.mark.parametrize("tile", [1 << 25, 40])
    def test_summed_weights(self, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention_module, "_TILE_ELEMENTS", tile)

        @examples
        @given(shape=shapes(), seed=seeds)
        def check(shape: tuple[int, int, int, int, int, int], seed: int) -> None:
            q, k, v = draw_qkv(shape, seed)
            B, G, R, C, S, _ = shape
            got = summed_weights(q, k, attend(q, k, v)[1])
            want = explicit_weights(q, k).view(B, G, R, C, S).sum((2, 3))
            torch.testing.assert_close(got, want, rtol=0, atol=FLOAT64_ATOL)

        check()

    def test_log_sum_exp(self) -> None:
        q, k, v = draw_qkv((1, 1, 1, 1, 5, 4), seed=0)
        want = torch.logsumexp(q[0, 0] @ k[0, 0].T / 2, -1)
        torch.testing.assert_close(attend(q, k, v)[1][0, 0], want, rtol=0, atol=FLOAT64_ATOL)


def test_the_backward_passes_gradcheck() -> None:
    leaves = [t.requires_grad_() for t in draw_qkv((2, 2, 2, 3, 5, 2), seed=1)]
    assert torch.autograd.gradcheck(attention, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes_have_a_wide_softmax(dtype: torch.dtype) -> None:
    q, k, v = draw_qkv((2, 2, 2, 5, 9, 8), seed=2, dtype=dtype)
    out, lse = attend(q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert summed_weights(q, k, lse).dtype == torch.float32
    want = explicit_attention(q.double(), k.double(), v.double())
    # Float32 inside: 9 keys and 8 features, below 64 roundings of 2^-24 of values below 4; then one
    # rounding of the output to its dtype.
    atol = 64 * 4 * 2**-24 + 4 * torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)


def test_the_operators_have_schemas_and_a_plain_meaning() -> None:
    q, k, v = draw_qkv((2, 2, 2, 5, 9, 8), seed=6, dtype=torch.bfloat16)
    out, lse = attend(q, k, v)
    operators = torch.ops.crosscurrent
    results = {
        operators.attend: (operators.attend(q, k, v), (out, lse)),
        operators.summed_weights: ((operators.summed_weights(q, k, lse),), (summed_weights(q, k, lse),)),
        operators.attend_backward: (
            operators.attend_backward(out, q, k, v, out, lse),
            attend_backward(out, q, k, v, out, lse),
        ),
    }
    for operator, (got, want) in results.items():
        assert not operator.default._schema.is_mutable
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_gradients_have_the_dtypes_of_their_inputs() -> None:
    q, k, v = draw_qkv((1, 1, 2, 3, 4, 8), seed=3, dtype=torch.bfloat16)
    out, lse = attend(q, k, v)
    grads = three(attend_backward(out, q, k, v, out, lse))
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)]


def test_scores_that_would_overflow_are_fine() -> None:
    """A future key with a huge score neither dominates the maximum nor leaves an infinity behind."""
    q = torch.full((1, 1, 2, 1), 100.0)
    k = torch.tensor([0.0, 100.0]).view(1, 1, 2, 1)
    v = torch.tensor([3.0, 5.0]).view(1, 1, 2, 1)
    out, lse = attend(q, k, v)
    assert out.flatten().tolist() == [3.0, 5.0]
    assert summed_weights(q, k, lse).flatten().tolist() == [1.0, 1.0]
    grads = three(attend_backward(torch.ones_like(out), q, k, v, out, lse))
    assert all(g.isfinite().all() for g in grads)


def test_nan_is_passed_on() -> None:
    q, k, v = draw_qkv((1, 2, 1, 2, 4, 2), seed=4)
    k[0, 1, 0, 0] = math.nan
    out, lse = attend(q, k, v)
    assert out[0, 0].isfinite().all()
    assert out[0, 1].isnan().all()
    assert summed_weights(q, k, lse)[0, 1].isnan().any()


def test_a_key_of_the_future_does_not_matter() -> None:
    q, k, v = draw_qkv((1, 1, 1, 3, 5, 4), seed=5)
    before = attend(q, k, v)[0]
    k[..., -1, :] += 10
    v[..., -1, :] += 10
    after = attend(q, k, v)[0]
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert not torch.equal(before[:, :, 2], after[:, :, 2])


@pytest.mark.parametrize(("q_shape", "k_shape"), [((1, 3, 1, 4), (1, 2, 5, 4)), ((1, 2, 6, 4), (1, 2, 5, 4))])
def test_shapes_that_cannot_be_meant(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    q, k = torch.zeros(q_shape), torch.zeros(k_shape)
    with pytest.raises(ValueError, match=r"heads.*groups.*queries.*keys"):
        attend(q, k, k)
