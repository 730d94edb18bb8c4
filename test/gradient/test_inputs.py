"""Bad input is refused before anything is changed, and the error says what was seen and expected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from crosscurrent.gradient import GradientArgs, LongContextGradientModel
from crosscurrent.model.transformer import Head

Build = Callable[..., LongContextGradientModel]
Batch = Callable[..., tuple[Tensor, Tensor]]
Grads = Callable[[torch.nn.Module], dict[str, Tensor]]


@contextmanager
def refusing(
    model: LongContextGradientModel, match: str, error: type[Exception] = ValueError
) -> Iterator[None]:
    """The error is raised, and neither the log of the last pass nor its checkpoints were touched."""
    good_ids, good_targets = torch.zeros(1, 20, dtype=torch.long), torch.zeros(1, 20, dtype=torch.long)
    earlier = model(good_ids, good_targets)
    with pytest.raises(error, match=match):
        yield
    earlier.backward()


def refuses(model: LongContextGradientModel, ids: Any, targets: Any, match: str) -> None:
    with refusing(model, match):
        model(ids, targets)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


def test_an_empty_batch(build: Build) -> None:
    refuses(build(), ones(0, 5), ones(0, 5), r"input_ids is empty: shape \[0, 5\]")
    refuses(build(), ones(1, 0), ones(1, 0), r"input_ids is empty: shape \[1, 0\]")


def test_no_targets(build: Build) -> None:
    refuses(build(), ones(1, 5), ones(1, 0), r"targets is empty: shape \[1, 0\]")


@pytest.mark.parametrize("bad", [13, -1, -100, 1 << 40])
def test_a_token_id_out_of_range(build: Build, bad: int) -> None:
    ids = ones(2, 20)
    ids[1, 7] = bad
    refuses(build(), ids, ones(2, 20), rf"input_ids\[1, 7\] is {bad}, expected 0 \.\. 12 \(1 such")


@pytest.mark.parametrize("bad", [13, -1, -99])
def test_a_target_out_of_range(build: Build, bad: int) -> None:
    targets = ones(2, 20)
    targets[0, 3] = bad
    refuses(build(), ones(2, 20), targets, rf"targets\[0, 3\] is {bad}, expected 0 \.\. 12 or -100")


def test_ids_at_both_ends_of_the_range_and_ignored_targets_are_good(build: Build) -> None:
    ids, targets = ones(1, 20), ones(1, 20)
    ids[0, 0], ids[0, 1], targets[0, 0], targets[0, 1], targets[0, 2] = 0, 12, 0, 12, -100
    assert build()(ids, targets).isfinite()


def test_targets_longer_than_inputs(build: Build) -> None:
    refuses(build(), ones(1, 20), ones(1, 21), "targets are longer than inputs: 21 targets, 20 inputs")


def test_targets_as_long_as_inputs_are_good(build: Build) -> None:
    assert build()(ones(1, 20), ones(1, 20)).isfinite()


def test_batch_sizes_that_differ(build: Build) -> None:
    refuses(build(), ones(1, 20), ones(2, 20), "one batch size, got 1 and 2")


@pytest.mark.parametrize("ids", [torch.ones(1, 20), ones(20), ones(1, 20).bool()])
def test_ids_that_are_no_ids(build: Build, ids: Tensor) -> None:
    refuses(build(), ids, ones(1, 20), r"input_ids must be integers of shape \[batch, tokens\]")


@pytest.mark.parametrize("ids", [[[1, 2]], np.ones((1, 20), dtype=np.int64), None])
def test_ids_that_are_no_tensor(build: Build, ids: object) -> None:
    model = build()
    with refusing(model, "input_ids must be a tensor of integers, got", TypeError):
        model(ids, ones(1, 20))
    with refusing(model, "targets must be a tensor of integers, got", TypeError):
        model(ones(1, 20), ids)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_ids_that_pytorch_cannot_compare(build: Build, dtype: torch.dtype) -> None:
    refuses(build(), ones(1, 20).to(dtype), ones(1, 20), rf"{dtype} of shape .*; the dtypes are torch\.int64")


def test_parameters_of_several_dtypes(build: Build) -> None:
    model = build()
    model.head_model.float()
    told = r"embedding\.weight is torch\.float64 on cpu, head_model\.weight is torch\.float32 on cpu"
    with pytest.raises(ValueError, match=told):
        model(ones(1, 20), ones(1, 20))


def test_a_head_of_another_vocabulary(build: Build) -> None:
    model = build()
    small = dataclasses.replace(model.gpt_model.config, vocab_size=7)
    model.head_model = Head(small).double()
    with pytest.raises(ValueError, match="vocabulary of 13 tokens, but its head one of 7"):
        model(ones(1, 20), ones(1, 20))


@pytest.mark.parametrize("sizes", [{"batch_size": 0}, {"sequence_length": -1}])
def test_a_budget_of_nothing(build: Build, sizes: dict[str, int]) -> None:
    (name,) = sizes
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got"):
        build().pinned_budget(**({"batch_size": 1, "sequence_length": 8} | sizes))


def test_int32_ids_are_good(build: Build) -> None:
    model = build()
    ids, targets = ones(1, 20), ones(1, 20)
    assert torch.equal(model(ids.int(), targets.int()), model(ids, targets))


def test_a_chunk_above_the_cache_length(build: Build) -> None:
    with pytest.raises(ValueError, match=r"grad\.chunk_size is 9, but the shortest KV cache has 8 slots"):
        build(cache_length=8, grad={"chunk_size": 9})
    build(cache_length=8, grad={"chunk_size": 8})


def test_a_chunk_above_what_grace_tokens_leave(build: Build) -> None:
    with pytest.raises(ValueError, match=r"3 hold grace tokens: a chunk can be at most 5 long"):
        build(cache="h2o", cache_length=8, grace_period=3, grad={"chunk_size": 6})
    build(cache="h2o", cache_length=8, grace_period=3, grad={"chunk_size": 5})


def test_a_cache_length_for_each_layer(build: Build) -> None:
    with pytest.raises(ValueError, match="cache_length has 2 lengths, but the model has 3 layers"):
        build(cache_length=(8, 8))
    build(cache_length=(8, 8, 9))


def test_dense_and_a_sequence_longer_than_the_cache(build: Build) -> None:
    refuses_dense = build(cache="dense", cache_length=(20, 21, 30))
    refuses(refuses_dense, ones(1, 21), ones(1, 21), r"dense cache keeps every token, .* 21 and .* 20 slots")


def test_async_transfer_and_a_model_in_cpu_memory(build: Build, cuda: torch.device) -> None:
    grad = {"layercp_pin_memory": True, "cachecp_pin_memory": True, "async_cpu_transfer": True}
    model = build(grad=grad)
    with pytest.raises(ValueError, match=r"grad\.async_cpu_transfer needs the model on a CUDA device"):
        model(ones(1, 20), ones(1, 20))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("guard", [False, True])
def test_a_parameter_that_is_not_finite(
    build: Build, batch: Batch, grads: Grads, value: float, guard: bool
) -> None:
    """In CPU memory it is named with and without the guard."""
    model = build(grad={"nan_guard": guard})
    bad = model.gpt_model.layers[1].mlp.up.weight.detach()[3, 4]
    good = bad.item()
    told = r"finite parameters, .* in gpt_model\.layers\.1\.mlp\.up\.weight;"
    with refusing(model, told, FloatingPointError):
        bad.data.fill_(value)
        with torch.no_grad(), pytest.raises(FloatingPointError, match=told):
            model(*batch(20))
        assert not grads(model)
        try:
            model(*batch(20))
        finally:
            bad.data.fill_(good)
    assert all(gradient.isfinite().all() for gradient in grads(model).values())


def test_the_guard_keeps_a_bad_gradient_out_of_the_parameters(
    build: Build, batch: Batch, grads: Grads
) -> None:
    model = build(grad={"nan_guard": True})
    model(*batch(20)).backward()
    before = grads(model)
    with pytest.raises(FloatingPointError, match="finite gradients"):
        (model(*batch(20)) * float("nan")).backward()
    after = grads(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_on_a_device_nobody_waits_for_a_look_at_the_parameters_unless_asked(
    build: Build, batch: Batch, cuda: torch.device
) -> None:
    for guard in (False, True):
        model = build(grad={"nan_guard": guard}).to(cuda)
        with torch.no_grad():
            model.gpt_model.layers[1].mlp.up.weight[3, 4] = float("nan")
        with pytest.raises(FloatingPointError, match="finite parameters") if guard else nullcontext():
            assert model(*batch(20)).isnan()


def test_the_budget_is_known_without_running_anything(build: Build) -> None:
    """By hand: 3 rows and the head, 20 tokens, batch 2, 8 wide, float64; and 2 of 3 columns' left edges less
    one have a KV checkpoint of 8 slots, 2 groups, head size 2, keys and values, aligned to 256 bytes."""
    model = build()
    budget = model.pinned_budget(batch_size=2, sequence_length=8 + 8 + 4)
    column_bytes = [tokens * 2 * 8 * 8 for tokens in (8, 8, 4)]
    assert budget.layer_inputs == 4 * sum(column_bytes)
    assert budget.head_gradients == sum(column_bytes)
    assert budget.kv_checkpoints == 2 * 2 * 8 * 2 * 2 * 8
    assert budget.pinned == 0
    assert dict(budget.rows())["total"] == budget.total


def test_the_budget_of_h2o_has_its_replay_log(build: Build) -> None:
    """12 tokens come after the cache is full; each costs 3 layers, 2 sequences, 2 groups an int16: padded by
    column to 256 bytes."""
    without = build().pinned_budget(batch_size=2, sequence_length=8 + 8 + 4)
    with_log = build(cache="h2o").pinned_budget(batch_size=2, sequence_length=8 + 8 + 4)
    assert with_log.layer_inputs - without.layer_inputs == 3 * 2 * 256


def test_what_is_pinned_after_a_step_is_what_the_budget_said(
    build: Build, batch: Batch, cuda: torch.device
) -> None:
    """The host is not ahead of a batch: it waits in between for the loss, and ids and targets go in turns."""
    grad = {"layercp_pin_memory": True, "cachecp_pin_memory": True}
    model = build(cache="h2o", grad=grad).to(cuda)
    budget = model.pinned_budget(batch_size=2, sequence_length=41)
    assert model.pinned_bytes() == 0
    assert budget.token_ids == 2 * 2 * 41 * 8
    for _ in range(3):
        model(*batch(41)).backward()
        torch.cuda.synchronize()
    assert budget.pinned - 1024 <= model.pinned_bytes() <= budget.pinned
    before = build(cache="h2o", grad=grad).pinned_budget(batch_size=2, sequence_length=41, device=cuda)
    assert before == budget


def test_pinned_memory_counts_with_the_allocators_rounding(build: Build, cuda: torch.device) -> None:
    model = build(grad={"layercp_pin_memory": True}).to(cuda)
    budget = model.pinned_budget(batch_size=3, sequence_length=8)
    assert budget.layer_inputs == 4 * 3 * 8 * 8 * 8
    assert budget.token_ids == 2 * 3 * 8 * 8
    assert budget.pinned == (4 + 1) * 2048 + 2 * 256


def test_an_unknown_quantizer_is_refused() -> None:
    with pytest.raises(ValueError, match="layercp_qname"):
        GradientArgs(layercp_qname="zip")


def test_autocast_is_refused(build: Build, batch: Batch) -> None:
    model = build(dtype=torch.float32)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"torch\.autocast is on"),
    ):
        model(*batch(20))
    model(*batch(20))
