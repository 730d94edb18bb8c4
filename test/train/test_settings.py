"""The knobs of a training run."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

from crosscurrent.train.settings import OptimizerArgs, OptimizerName, RunArgs, reproducible


def test_the_rate_rises_in_a_straight_line_and_then_stays() -> None:
    args = OptimizerArgs(learning_rate=0.8, warmup_steps=3)
    assert [args.rate(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert OptimizerArgs(learning_rate=0.8, warmup_steps=0).rate(0) == 0.8


def test_matrices_decay_and_vectors_and_frozen_parameters_do_not() -> None:
    matrix, vector, frozen = (
        nn.Parameter(torch.ones(2, 2)),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2)),
    )
    frozen.requires_grad_(False)
    optimizer = OptimizerArgs(learning_rate=0.5, weight_decay=0.1).build([matrix, vector, frozen])
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # AdamW without a gradient only decays: by the rate times the decay, once.
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 1 - 0.5 * 0.1))
    assert torch.equal(vector.detach(), torch.ones(2))
    assert torch.equal(frozen, torch.ones(2))


def test_sgd_has_momentum() -> None:
    parameter = nn.Parameter(torch.zeros(()))
    args = OptimizerArgs(name=OptimizerName.sgd, learning_rate=1.0, beta1=0.5, weight_decay=0.0)
    optimizer = args.build([parameter])
    for _ in range(2):
        parameter.grad = torch.ones(())
        optimizer.step()
    assert parameter.item() == -1 - 1.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("warmup_steps", -1),
        ("weight_decay", -0.1),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("max_grad_norm", 0.0),
    ],
)
def test_what_no_optimizer_could_use_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"optimizer.{name} must be"):
        OptimizerArgs(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 0), ("sequence_length", 0), ("num_threads", 0), ("seed", -1)]
)
def test_what_no_run_could_be_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        RunArgs(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("deterministic", [True, False])
def test_pytorch_is_as_it_was_after_a_run(deterministic: bool) -> None:
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    run = RunArgs(num_threads=2, deterministic=deterministic)
    with contextlib.suppress(KeyError), reproducible(run, torch.device("cuda")):
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        raise KeyError
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
