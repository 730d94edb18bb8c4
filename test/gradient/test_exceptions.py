"""An exception in the middle leaves the model usable: no gradient, no memory, and the next step is right."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.gradient import CheckpointsGoneError, GradientArgs, LongContextGradientModel
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
            self.name = func.overloadpacket.__name__
            raise self.error
        return func(*args, **(kwargs or {}))


def step(model: LongContextGradientModel, ids: Tensor, targets: Tensor) -> None:
    model(ids, targets).backward()


@pytest.fixture
def model(build: Build, cuda: torch.device) -> LongContextGradientModel:
    return build(cache="h2o", num_layers=2, dtype=torch.float32, grad=ASYNC).to(cuda)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, FloatingPointError])
def test_after_an_exception_nothing_is_allocated_and_the_next_step_is_right(
    model: LongContextGradientModel,
    batch: Batch,
    grads: Grads,
    emptied: Callable[[], None],
    error: type[BaseException],
) -> None:
    counter = RaiseAt(0, error())
    with counter:
        step(model, *batch(21))
    expected = grads(model)
    model.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for share in (0.03, 0.25, 0.5, 0.7, 0.95):
        with RaiseAt(int(share * counter.count), error()), pytest.raises(error):
            step(model, *batch(21))
        assert not grads(model)
        emptied()
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


class OutOfCpuMemory(TorchDispatchMode):
    """As many bytes as asked for are there, for one tensor; then none."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and made.nbytes > self.most:
            raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: {made.nbytes} bytes")
        return made


def test_a_loss_whose_checkpoints_gave_way_to_a_batch_without_room_is_refused(
    build: Build, batch: Batch, grads: Grads
) -> None:
    """Records of three columns; the second batch is wider, and there is room for its last column's only."""
    model = build()
    model(*batch(20)).backward()
    expected = grads(model)
    model.zero_grad()
    earlier = model(*batch(20))
    assert model._store is not None
    sizes = [size for key, size in model._make_format(6, 20).sizes().items() if key.kind is Kind.RECORD]
    with (
        OutOfCpuMemory(min(sizes)),
        pytest.raises(torch.OutOfMemoryError, match="bytes of pageable CPU memory"),
    ):
        model(*batch(20, batch_size=6))
    with pytest.raises(CheckpointsGoneError):
        earlier.backward()
    assert not grads(model)
    model(*batch(20)).backward()
    assert all(torch.equal(grads(model)[name], expected[name]) for name in expected)


def test_cpu_memory_that_the_caches_do_not_get_is_the_same_error_with_the_sizes(
    build: Build, batch: Batch
) -> None:
    """PyTorch's CPU allocator raises a plain RuntimeError. By hand: as above, float64, 3 layers."""
    caches = 2 * (1 << 45) * 2 * 2 * 2 * 8 * 3
    with pytest.raises(
        torch.OutOfMemoryError, match=f"DefaultCPUAllocator(.|\n)*forward pass {caches} bytes"
    ):
        build(cache_length=1 << 45)(*batch(20))


def test_memory_that_is_not_there_is_told_with_sizes_outside_of_the_passes_as_well(
    build: Build, batch: Batch, cuda: torch.device
) -> None:
    """The batch on its way, and the looks at parameters and gradients. Autograd's own ops are left without:
    it makes the gradient of the loss, and hands out those of the parameters."""
    error = torch.OutOfMemoryError("no room")
    model = build(num_layers=1, dtype=torch.float32, grad=ASYNC | {"nan_guard": True}).to(cuda)
    ids, targets = batch(9)
    names = []
    for number in range(1, 10000):
        with RaiseAt(number, error) as at, suppress(torch.OutOfMemoryError):
            try:
                step(model, ids, targets)
            except torch.OutOfMemoryError as caught:
                if " bytes" not in str(caught):
                    names.append(at.name)
                error.__traceback__ = error.__context__ = error.__cause__ = None
                raise
            break
        model.zero_grad()
    assert number > 100
    assert set(names) == {"detach", "ones_like"}
