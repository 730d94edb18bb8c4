"""What the layers share: which values count as different."""

from __future__ import annotations

import pytest
import torch

from crosscurrent.suite.experiment import differences


def test_the_same_bits_are_no_difference() -> None:
    values = {"loss": torch.ones(1), "grad": torch.arange(4.0)}
    assert differences(values, {name: value.clone() for name, value in values.items()}) == []


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ([-0.0, 1.0, 2.0], "grad: 1 of 3 elements differ, by up to 0"),
        ([0.0, 1.5, torch.nan], "grad: 2 of 3 elements differ, by up to 0.5; 0 and 1 NaN"),
    ],
)
def test_other_bits_are_one(on: list[float], said: str) -> None:
    assert differences({"grad": torch.arange(3.0)}, {"grad": torch.tensor(on)}) == [said]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_same_bits_are_one_where_both_are_not_finite(bad: float) -> None:
    values = {"loss": torch.tensor([1.0, bad]), "grad": torch.ones(2)}
    assert differences(values, values) == ["loss: not finite"]


def test_so_is_a_value_of_one_side_only() -> None:
    assert differences({"loss": torch.ones(1), "grad": torch.ones(1)}, {"loss": torch.ones(1)}) == [
        "only one side has grad"
    ]
