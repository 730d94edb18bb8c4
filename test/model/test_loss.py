"""Alignment, counting and slicing of targets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crosscurrent.model import loss as loss_module
from crosscurrent.model.loss import align_targets, count_targets, cross_entropy_sum, slices


def test_shorter_targets_belong_to_the_last_inputs() -> None:
    aligned = align_targets(torch.tensor([[5, 6], [7, -100]]), length=4)
    assert aligned.tolist() == [[-100, -100, 5, 6], [-100, -100, 7, -100]]


def test_targets_of_full_length_are_not_copied() -> None:
    targets = torch.zeros(2, 4, dtype=torch.long)
    assert align_targets(targets, length=4) is targets


def test_longer_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"targets are longer than inputs: 5 targets, 4 inputs"):
        align_targets(torch.zeros(1, 5, dtype=torch.long), length=4)


def test_ignored_targets_are_not_counted() -> None:
    assert count_targets(torch.tensor([[1, -100, 3], [-100, -100, 0]])).item() == 3


def test_a_batch_without_a_target_has_a_loss_of_zero_and_no_nan() -> None:
    targets = torch.full((1, 3), -100)
    total = cross_entropy_sum(torch.randn(1, 3, 5), targets)
    assert (total / count_targets(targets)).item() == 0.0


def test_half_precision_is_summed_in_float32() -> None:
    logits = torch.randn(2, 3, 5).bfloat16()
    targets = torch.randint(5, (2, 3))
    assert torch.equal(cross_entropy_sum(logits, targets), cross_entropy_sum(logits.float(), targets))


@given(
    length=st.integers(1, 300),
    batch_size=st.integers(1, 4),
    vocab_size=st.integers(1, 50),
    limit=st.integers(1, 999),
)
def test_slices_cover_all_tokens_once_and_stay_small(
    length: int, batch_size: int, vocab_size: int, limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "_SLICE_ELEMENTS", limit)
        ranges = list(slices(length, batch_size=batch_size, vocab_size=vocab_size))
    assert [t for a, b in ranges for t in range(a, b)] == list(range(length))
    longest = max(b - a for a, b in ranges)
    assert longest == 1 or longest * batch_size * vocab_size <= limit


def test_the_sum_over_slices_is_the_sum_over_the_whole() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 10, 7).double(), torch.randint(7, (2, 10))
    parts = sum(cross_entropy_sum(logits[:, a:b], targets[:, a:b]) for a, b in ((0, 4), (4, 5), (5, 10)))
    # 20 terms of about 2 in float64.
    torch.testing.assert_close(parts, cross_entropy_sum(logits, targets), rtol=0, atol=1e-13)
