"""The formulas for operations and bytes, against slow counts of what a real step does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import crosscurrent
from crosscurrent.bench.configurations import CONFIGURATIONS, Configuration
from crosscurrent.bench.counts import PassCount, Role, count
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.model.config import LoRAConfig
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.report.costs import Direction

Shape = tuple[int, int, int]

simulated_only = pytest.mark.simulation


class _SlowCount(TorchDispatchMode):
    """Looks at every operator that runs: shapes of products, and pairs of queries and keys one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[Shape] = Counter()
        self.attention = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"):
            left, right = [each for each in args if isinstance(each, Tensor)][-2:]
            assert left.dim() == 2, "the model's own products are of matrices"
            self.products[(left.shape[0], left.shape[1], right.shape[1])] += 1
        factor = {
            "crosscurrent::attend": 4,
            "crosscurrent::attend_backward": 10,
            "crosscurrent::summed_weights": 2,
        }.get(name, 0)
        if factor:
            query, key = args[1:3] if name.endswith("backward") else args[:2]
            batch_size, heads, queries, size = query.shape
            slots = key.shape[2]
            pairs = sum(1 for q in range(queries) for slot in range(slots) if slot <= slots - queries + q)
            self.attention += factor * size * heads * batch_size * pairs
        return func(*args, **(kwargs or {}))


def _model(configuration: Configuration, device: str, *, flag: bool = False) -> LongContextGradientModel:
    torch.manual_seed(0)
    parts = Transformer(configuration.model).to(device), Head(configuration.model).to(device)
    # Op by op: what a graph launches is not seen op by op.
    grad = replace(configuration.grad, async_cpu_transfer=flag)
    return LongContextGradientModel(*parts, cache=configuration.cache, grad=grad)


def _batch(configuration: Configuration) -> tuple[Tensor, Tensor]:
    size, length = configuration.batch_size, configuration.sequence_length
    ids = torch.arange(size * length).remainder(configuration.model.vocab_size).view(size, length)
    return ids, ids[:, -configuration.num_targets :]


def _shapes(counted: PassCount) -> Counter[Shape]:
    shapes: Counter[Shape] = Counter()
    for (role, rows, in_size, out_size), num in counted.products.items():
        shape = {
            Role.OUTPUT: (rows, in_size, out_size),
            Role.INPUT: (rows, out_size, in_size),
            Role.WEIGHT: (out_size, rows, in_size),
        }[role]
        shapes[shape] += num
    return shapes


def test_operations_are_those_of_a_real_step(small: Configuration) -> None:
    model = _model(small, "cpu")
    with _SlowCount() as forward:
        loss = model(*_batch(small))
    with _SlowCount() as backward:
        loss.backward()
    counted = count(small)
    for seen, formula in ((forward, counted.forward), (backward, counted.backward)):
        assert seen.products == _shapes(formula)
        assert seen.attention == formula.attention
        products = sum(2 * m * k * n * num for (m, k, n), num in seen.products.items())
        assert formula.operations == products + seen.attention


@simulated_only
@pytest.mark.parametrize("flag", [False, True])
def test_bytes_are_those_of_a_real_step(small: Configuration, flag: bool) -> None:
    with crosscurrent.simulate():
        model, batch = _model(small, "cuda", flag=flag), _batch(small)
        with crosscurrent.overlap() as forward:
            loss = model(*batch)
        with crosscurrent.overlap() as backward:
            loss.backward()
    counted = count(small)
    for run, formula in ((forward, counted.forward), (backward, counted.backward)):
        moved = {part.name: part.nbytes for part in run.result.by_direction}
        assert moved.get(Direction.HOST_TO_DEVICE.value, 0) == formula.to_device
        assert moved.get(Direction.DEVICE_TO_HOST.value, 0) == formula.to_host


def test_h200_a_is_what_its_description_says() -> None:
    """By hand: 8 layers, 16384 tokens, each product and each pair counted."""
    counted = count(CONFIGURATIONS["h200-a"])
    tokens, embed = 16_384, 2048
    layer = 2 * tokens * (2 * embed * embed + 2 * embed * 1024 + 2 * embed * 4 * embed)
    head = 2 * 8192 * embed * 32_000
    # The first chunk sees a triangle; each of the 24 others 4096 slots, but for a triangle of 512.
    pairs = 4096 * 4097 // 2 + 24 * (512 * 4096 - 512 * 511 // 2)
    attention = 4 * embed * pairs
    assert counted.forward.operations == 8 * (layer + attention) + head
    keys_values = 2 * (tokens - 4096) * embed * 2 * 1024
    cells = 3 * layer + attention * 14 // 4
    assert counted.backward.operations == 8 * (cells + keys_values) + 3 * head


def test_h2o_computes_its_weights_once_more_forward() -> None:
    configuration = CONFIGURATIONS["h200-b"]
    lastrec = replace(configuration, cache=CONFIGURATIONS["h200-a"].cache)
    more = count(configuration).forward.attention / count(lastrec).forward.attention
    assert more == 6 / 4
    assert count(configuration).backward.attention == count(lastrec).backward.attention


def test_what_is_not_counted_is_refused() -> None:
    small = CONFIGURATIONS["cpu-small"]
    with pytest.raises(ValueError, match="set lora to None"):
        replace(small, model=replace(small.model, lora=LoRAConfig(rank=2)))
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        replace(small, repeats=0)


@simulated_only
def test_the_flag_is_all_that_differs() -> None:
    small = CONFIGURATIONS["cpu-small"]
    with crosscurrent.simulate():
        off, on = (small.with_flag(flag) for flag in (False, True))
        assert (off.async_cpu_transfer, on.async_cpu_transfer) == (False, True)
        assert replace(on, async_cpu_transfer=False) == off
