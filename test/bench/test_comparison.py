"""The comparison of two steps, byte for byte."""

from __future__ import annotations

import math

import pytest
import torch

from crosscurrent.bench.comparison import Outcome, compare


def _outcome(loss: float = 1.5, **gradients: list[float]) -> Outcome:
    return Outcome(
        loss=torch.tensor(loss),
        gradients={name: torch.tensor(values, dtype=torch.bfloat16) for name, values in gradients.items()},
    )


def test_the_same_is_right() -> None:
    found = compare(_outcome(a=[1.0, 2.0], b=[0.0]), _outcome(a=[1.0, 2.0], b=[0.0]))
    assert found.is_right
    assert found.sentence() == "off and on agree bit for bit: the loss and all 2 gradients"


def test_one_bit_is_wrong() -> None:
    next_up = 1.0 + 2.0**-7  # bfloat16 has 7 bits behind the point
    found = compare(_outcome(a=[0.0], b=[1.0]), _outcome(a=[0.0], b=[next_up]))
    assert not found.is_right
    assert found.different == ("b",)
    assert compare(_outcome(a=[0.0]), _outcome(a=[-0.0])).different == ("a",)
    assert found.sentence() == "WRONG: 1 of 2 gradients differ, first b"


def test_another_loss_is_wrong() -> None:
    found = compare(_outcome(1.5, a=[1.0]), _outcome(1.25, a=[1.0]))
    assert not found.is_right
    assert "the losses differ (1.5 off, 1.25 on)" in found.sentence()


def test_a_missing_gradient_is_wrong() -> None:
    found = compare(_outcome(a=[1.0], b=[1.0]), _outcome(a=[1.0]))
    assert found.different == ("b",)
    assert not found.is_right


def test_no_gradient_at_all_is_wrong() -> None:
    assert not compare(_outcome(), _outcome()).is_right


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong_even_where_both_agree(bad: float) -> None:
    found = compare(_outcome(a=[1.0, bad]), _outcome(a=[1.0, bad]))
    assert not found.different
    assert found.not_finite == ("a",)
    assert not found.is_right
    assert compare(_outcome(bad, a=[1.0]), _outcome(bad, a=[1.0])).not_finite == ("loss",)
