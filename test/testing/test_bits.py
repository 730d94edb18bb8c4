"""Bits and not values: which tensors are the same, and what is said of those that are not."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from crosscurrent.bits import deterministic, difference, same_bits

QUIET, OTHER_NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor(math.nan), torch.tensor(math.nan), True),
        (QUIET, OTHER_NAN, False),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.ones(2, 3).T, torch.ones(3, 2), True),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(9)[::5][:1], torch.ones(1), True),
        (torch.ones(1).expand(3), torch.ones(3), True),
        (torch.tensor([1 - 1j]).conj(), torch.tensor([1 + 1j]), True),
        (torch.tensor([1 - 1j]).conj(), torch.tensor([1 - 1j]), False),
        (torch.empty(0, 3), torch.empty(0, 3), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
    ],
)
def test_bits_and_not_values_count(one: Tensor, other: Tensor, same: bool) -> None:
    assert same_bits(one, other) is same
    assert (difference(one, other) is None) is same


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_a_zero_of_the_other_sign_is_a_difference_in_every_type(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, 0.0]).to(dtype)
    assert same_bits(one, one.clone())
    assert difference(one, torch.tensor([1.0, -0.0]).to(dtype)) == "1 of 2 elements differ, by up to 0"


@pytest.mark.usefixtures("_cuda")
def test_on_a_device_as_well() -> None:
    one, other = (torch.zeros(2, 3, device="cuda") for _ in range(2))
    assert same_bits(one.T, other.T)
    other[1, 2] = -0.0
    assert not same_bits(one.T, other.T)
    assert difference(one, other) == "1 of 6 elements differ, by up to 0"


def test_pytorch_is_as_strict_afterwards_as_before() -> None:
    def strictness() -> tuple[bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert strictness() == (True, False)
            assert "CUBLAS_WORKSPACE_CONFIG" in os.environ
        assert strictness() == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert strictness() == (False, False)
