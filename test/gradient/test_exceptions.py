"""An exception in the middle leaves the model usable: no gradient, no memory, and the next step is right."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.gradient import GradientArgs, LongContextGradientModel
from crosscurrent.gradient.checkpoints import CellKey, Kind
from crosscurrent.gradient.store import CheckpointStore

Build = Callable[..., LongContextGradientModel]
Batch = Callable[..., tuple[Tensor, Tensor]]
Grads = Callable[[torch.nn.Module], dict[str, Tensor]]

ASYNC = {"layercp_pin_memory": True, "cachecp_pin_memory": True, "async_cpu_transfer": True}


class RaiseAt(TorchDispatchMode):
    """Raises instead of the op of a given number; counts the ops."""

    def __init__(self, number: int, error: BaseException) -> None:
        super().__init__()
        self.number = number
        self.error = error
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        if self.count == self.number:
            raise self.error
        return func(*args, **(kwargs or {}))


def step(model: LongContextGradientModel, ids: Tensor, targets: Tensor) -> None:
    model(ids, targets).backward()


@pytest.fixture
def model(build: Build, cuda: torch.device) -> LongContextGradientModel:
    return build(cache="h2o", num_layers=2, dtype=torch.float32, grad=ASYNC).to(cuda)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no room for 12 bytes")])
def test_after_an_exception_nothing_is_allocated_and_the_next_step_is_right(
    model: LongContextGradientModel, batch: Batch, grads: Grads, error: BaseException
) -> None:
    counter = RaiseAt(0, error)
    with counter:
        step(model, *batch(21))
    expected = grads(model)
    model.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for share in (0.03, 0.25, 0.5, 0.7, 0.95):
        with RaiseAt(int(share * counter.count), error), pytest.raises(type(error)):
            step(model, *batch(21))
        assert not grads(model)
        # The frames of its traceback would keep what they held.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        gc.collect()
        assert torch.cuda.memory_allocated() == before, f"after {share}"
        step(model, *batch(21))
        found = grads(model)
        assert all(torch.equal(found[name], expected[name]) for name in expected), f"after {share}"
        model.zero_grad()
        del found


def test_gradients_of_earlier_batches_survive_an_exception(
    model: LongContextGradientModel, batch: Batch, grads: Grads
) -> None:
    step(model, *batch(30))
    before = grads(model)
    loss = model(*batch(45))
    with RaiseAt(300, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        loss.backward()
    after = grads(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_out_of_memory_is_pytorchs_error_with_the_sizes_asked_for(
    model: LongContextGradientModel, batch: Batch
) -> None:
    """By hand: caches of 8 slots, 2 groups, head size 2, batch 2, keys and values, 4 bytes; 2 layers."""
    error = torch.OutOfMemoryError("no room for 12 bytes")
    with (
        RaiseAt(200, error),
        pytest.raises(torch.OutOfMemoryError, match="no room for 12 bytes") as caught,
    ):
        model(*batch(45))
    assert f"KV caches of the forward pass {2 * 8 * 2 * 2 * 2 * 2 * 4} bytes" in str(caught.value)
    assert "[2, 45] token ids" in str(caught.value)


def test_cpu_memory_that_is_not_there_is_the_same_error_with_the_sizes() -> None:
    """No machine has 2^60 bytes."""
    key = CellKey(Kind.RECORD, 0, 3)
    store = CheckpointStore(GradientArgs(), torch.device("cpu"))
    store.reserve({key: 256})
    with pytest.raises(torch.OutOfMemoryError, match=f"{1 << 60} bytes of pageable .* record of column 3"):
        store.reserve({key: 1 << 60})
    store.reserve({key: 512})
    assert store[key].bytes.numel() == 512
