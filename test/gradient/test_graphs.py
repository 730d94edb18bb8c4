"""Work as CUDA graphs: what `Graphs` promises, and a model that comes out the same with and without them.

On a real GPU under deterministic algorithms, as everything that is compared to the bit. On simulated CUDA a
capture computes nothing and poisons what it made, and a launch runs on the captured addresses: what a graph
should not have stood for comes out wrong there, too.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.gradient import GradientArgs, LongContextGradientModel, graphs
from crosscurrent.gradient.graphs import Graphs, choice_of_kernels
from crosscurrent.model.config import LoRAConfig
from crosscurrent.races.watch import watch
from crosscurrent.stress.edges import drop_edge
from crosscurrent.trace.simulate import simulate

# Deterministic matrix products need it, and cuBLAS reads it when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

Build = Callable[..., LongContextGradientModel]
Batch = Callable[..., tuple[Tensor, Tensor]]
Grads = Callable[[torch.nn.Module], dict[str, Tensor]]

ASYNC = {"layercp_pin_memory": True, "cachecp_pin_memory": True, "async_cpu_transfer": True, "chunk_size": 4}
GRAPHS = ASYNC | {"cuda_graphs": True}
DEVICE = torch.device("cuda")
LENGTHS = (25, 18)
"""Columns of one chunk, and of two, and one that is cut short."""


@contextmanager
def deterministic(mode: bool) -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    """A real device, or two simulated ones."""
    with nullcontext() if torch.cuda.is_available() else simulate(devices=2), deterministic(True):
        yield


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


class Doubling:
    """Work that is right whoever runs it, and counts how often the host runs it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        self.calls += 1
        return [2 * x for x in inputs]


@pytest.fixture
def made() -> Graphs:
    made = Graphs(enabled=True)
    made.begin("signature", DEVICE)
    return made


# -- calls ----------------------------------------------------------------------------------------------


def test_work_is_issued_then_captured_then_launched(made: Graphs) -> None:
    work = Doubling()
    for number, calls in ((1, 1), (2, 2), (3, 2), (4, 2)):
        (y,) = made.call("key", work, number * ones(3))
        assert y.tolist() == [2 * number] * 3
        assert work.calls == calls


def test_without_graphs_work_is_issued_each_time() -> None:
    made, work = Graphs(enabled=False), Doubling()
    for number in (1, 2, 3):
        (y,) = made.call("key", work, number * ones(3))
        assert y.tolist() == [2 * number] * 3
        assert work.calls == number


def test_an_output_is_valid_until_the_next_call_and_what_was_taken_stays(made: Graphs) -> None:
    work = Doubling()
    for _ in range(2):
        made.call("a", work, ones(3))
        made.call("b", work, ones(3))
    (first,) = made.call("a", work, 3 * ones(3))
    (taken,) = made.taken([first])
    assert first.tolist() == [6] * 3
    (second,) = made.call("b", work, 4 * ones(3))
    assert second.tolist() == [8] * 3
    assert first.tolist() == [8] * 3, "keys of one shape share their places"
    assert taken.tolist() == [6] * 3


def test_another_shape_or_dtype_has_another_place(made: Graphs) -> None:
    work = Doubling()
    inputs = {"a": ones(3), "b": ones(4), "c": ones(3).double()}
    for _ in range(2):
        for key, x in inputs.items():
            made.call(key, work, x)
    outputs = {key: made.call(key, work, 5 * x)[0] for key, x in inputs.items()}
    for key, x in inputs.items():
        assert torch.equal(outputs[key], 10 * x), key


def test_an_output_may_be_the_next_input(made: Graphs) -> None:
    work = Doubling()
    for start in (1, 2, 3):
        x = start * ones(3)
        for _ in range(3):
            (x,) = made.call("key", work, x)
        assert x.tolist() == [8 * start] * 3


def _spoil(x: Tensor) -> None:
    x.fill_(torch.nan)


def test_inputs_may_be_reused_when_they_were_read(made: Graphs) -> None:
    """`when_read` is called once a call, and what it writes to the inputs is too late to be seen."""
    work, x = Doubling(), ones(3)
    for number in (1, 2, 3, 4):
        x.fill_(number)
        (y,) = made.call("key", work, x, when_read=partial(_spoil, x))
        assert x.isnan().all()
        assert y.tolist() == [2 * number] * 3


def test_anomaly_detection_sees_the_work_itself(made: Graphs) -> None:
    """It reads what each function gave. What was captured before is there again when it is off."""
    work = Doubling()
    for detect, calls in ((False, 1), (True, 2), (True, 3), (False, 4), (True, 5), (False, 5)):
        with torch.autograd.set_detect_anomaly(detect):
            x = ones(3).requires_grad_()
            (y,) = made.call("key", work, x)
            assert work.calls == calls
        assert y.tolist() == [2] * 3


def test_a_backward_pass_under_anomaly_detection(build: Build, batch: Batch, grads: Grads) -> None:
    ids, targets = on_device(batch(25))
    model = build(num_layers=2, dtype=torch.float32, grad=GRAPHS).to(DEVICE)
    found = []
    for detect in (False, True, True, False):
        model.zero_grad()
        with torch.autograd.set_detect_anomaly(detect):
            model(ids, targets).backward()
        found.append(grads(model))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_lengths_without_end_are_issued(made: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    counts = {}
    for key in "abc":
        work = Doubling()
        for number in (1, 2, 3, 4):
            assert made.call(key, work, number * ones(3))[0].tolist() == [2 * number] * 3
        counts[key] = work.calls
    assert counts == {"a": 2, "b": 2, "c": 4}


# -- memory ---------------------------------------------------------------------------------------------


def test_kept_memory_stays_until_the_signature_is_another(made: Graphs) -> None:
    kept = made.keep("key", lambda: ones(3))
    made.begin("signature", DEVICE)
    assert made.keep("key", lambda: ones(3)) is kept
    assert made.keep("another", lambda: ones(3)) is not kept
    made.begin("another signature", DEVICE)
    assert made.keep("key", lambda: ones(3)) is not kept


def test_another_signature_drops_what_was_captured(made: Graphs) -> None:
    factor = 2

    def work(x: Tensor) -> list[Tensor]:
        return [factor * x]

    for _ in range(3):
        made.call("key", work, ones(3))
    factor = 3
    assert made.call("key", work, ones(3))[0].tolist() == [2] * 3, "a launch does what was captured"
    made.begin("another signature", DEVICE)
    for _ in range(3):
        assert made.call("key", work, ones(3))[0].tolist() == [3] * 3


def test_without_graphs_nothing_is_kept() -> None:
    made = Graphs(enabled=False)
    kept = made.keep("key", lambda: ones(3))
    assert made.keep("key", lambda: ones(3)) is not kept
    assert made.recall("key", lambda: ones(3)) is not made.recall("key", lambda: ones(3))
    (taken,) = made.taken([kept])
    assert taken is kept


def test_the_latest_are_recalled(made: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_RECALLED", 2)
    a, b = (made.recall(key, lambda: ones(1)) for key in "ab")
    assert made.recall("a", lambda: ones(1)) is a
    made.recall("c", lambda: ones(1))
    assert made.recall("a", lambda: ones(1)) is a
    assert made.recall("b", lambda: ones(1)) is not b


def test_an_error_while_capturing_is_told_as_it_is(made: Graphs) -> None:
    number = 0

    def work(x: Tensor) -> list[Tensor]:
        nonlocal number
        number += 1
        y = x + 1
        if number == 2:
            raise KeyboardInterrupt
        return [2 * y]

    assert made.call("key", work, ones(3))[0].tolist() == [4] * 3
    with pytest.raises(KeyboardInterrupt):
        made.call("key", work, ones(3))
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
    for factor in (1, 2, 3):
        assert made.call("key", work, factor * ones(3))[0].tolist() == [2 * (factor + 1)] * 3
    assert number == 3


def test_one_stream_is_for_all_captures(made: Graphs) -> None:
    """A matrix library makes a workspace, of tens of megabytes, for each stream that it sees."""
    streams = set()

    def work(x: Tensor) -> list[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            streams.add(torch.cuda.current_stream())
        return [2 * x]

    for signature in ("a", "b", "c"):
        made.begin(signature, DEVICE)
        for key in (1, 2):
            for _ in range(2):
                made.call(key, work, ones(3))
    assert len(streams) == 1


@pytest.mark.two_gpus
def test_a_device_that_is_not_the_current_one() -> None:
    made, work = Graphs(enabled=True), Doubling()
    device = torch.device("cuda", 1)
    for number in (1, 2, 3):
        made.begin("signature", device)
        (y,) = made.call("key", work, torch.full((3,), float(number), device=device))
        assert y.device == device
        assert y.tolist() == [2 * number] * 3
    assert work.calls == 2


# -- a model with and without ---------------------------------------------------------------------------


def on_device(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].to(DEVICE), batch[1].to(DEVICE)


def train(
    model: LongContextGradientModel, batches: list[tuple[Tensor, Tensor]], *, steps: int, held_out: Any = None
) -> list[Any]:
    """What some steps of SGD show to the outside: losses, gradients, replay logs, in CPU memory.

    A batch that is held out is evaluated between forward and backward passes, and between steps.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    shown: list[Any] = []

    def evaluate() -> None:
        if held_out is not None:
            with torch.no_grad():
                shown.append(model(*held_out).cpu())

    for _ in range(steps):
        for ids, targets in batches:
            optimizer.zero_grad()
            loss = model(ids, targets)
            evaluate()
            loss.backward()
            evaluate()
            shown += [loss.detach().cpu(), model.replay_log()]
            shown += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            optimizer.step()
    return shown


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Tensor):
            assert a.isfinite().all()
            assert torch.equal(a, b)
        else:
            assert a.same_as(b)


QUANTIZED = {"layercp_qname": "torch-quantized8", "cachecp_qname": "torch-quantized8"}
SETTINGS = [
    pytest.param({"cache": "lastrec"}, id="lastrec"),
    pytest.param({"cache": "h2o", "grace_period": 2}, id="h2o"),
    pytest.param({"cache": "dense", "cache_length": 48}, id="dense"),
    pytest.param({"cache": "lastrec", "grad": QUANTIZED}, id="lastrec-quantized"),
    pytest.param({"cache": "h2o", "grad": QUANTIZED}, id="h2o-quantized"),
    pytest.param({"cache": "dense", "cache_length": 48, "grad": QUANTIZED}, id="dense-quantized"),
    pytest.param({"cache": "lastrec-torch-quantized8"}, id="lastrec-packed"),
    pytest.param({"cache": "h2o-torch-quantized4"}, id="h2o-packed"),
    pytest.param(
        {
            "cache": "lastrec",
            "num_layers": 3,
            "cache_length": (8, 10, 9),
            "grad": {"layers_per_cell": 2},
        },
        id="lastrec-unequal",
    ),
    pytest.param(
        {
            "cache": "h2o",
            "num_layers": 3,
            "cache_length": (8, 10, 9),
            "grad": {"layers_per_cell": 2},
        },
        id="h2o-unequal",
    ),
    pytest.param({"cache": "h2o", "lora": LoRAConfig(rank=2)}, id="lora"),
    pytest.param({"cache": "lastrec", "tie_embeddings": True}, id="tied"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_come_out_the_same_to_the_bit(build: Build, batch: Batch, settings: dict[str, Any]) -> None:
    """Two batches of different length, three times: on one lane issued, against one and three with graphs."""

    def run(flags: dict[str, Any]) -> list[Any]:
        grad = ASYNC | settings.get("grad", {}) | flags
        model = build(**{"num_layers": 2} | settings | {"grad": grad, "dtype": torch.float32}).to(DEVICE)
        if "lora" in settings:
            # The first layer is frozen whole, the others but for their updates.
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora" in name and "layers.0." not in name)
        batches = [on_device(batch(length)) for length in LENGTHS]
        return train(model, batches, steps=3)

    off = run({"async_cpu_transfer": False})
    for asynchronous in (False, True):
        assert_same(off, run({"async_cpu_transfer": asynchronous, "cuda_graphs": True}))


@pytest.mark.parametrize("cache", ["lastrec", "h2o"])
def test_evaluations_between_forward_and_backward_disturb_nothing(
    build: Build, batch: Batch, cache: str
) -> None:
    batches = [on_device(batch(length)) for length in LENGTHS]

    def run(grad: dict[str, Any]) -> list[Any]:
        model = build(cache=cache, num_layers=2, dtype=torch.float32, grad=grad).to(DEVICE)
        return train(model, batches, steps=2, held_out=on_device(batch(12, seed=1)))

    assert_same(run(ASYNC), run(GRAPHS))


def test_the_comparison_notices_what_a_graph_may_not_stand_for(
    build: Build, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad twin: work whose key says too little of it."""
    batches = [on_device(batch(length)) for length in LENGTHS]

    def run(grad: dict[str, Any]) -> list[Any]:
        return train(
            build(cache="lastrec", num_layers=2, dtype=torch.float32, grad=grad).to(DEVICE), batches, steps=2
        )

    off = run(ASYNC)
    assert_same(off, run(GRAPHS))
    right = graphs.Graphs.call
    monkeypatch.setattr(
        graphs.Graphs,
        "call",
        lambda self, key, *args, **kwargs: right(self, (key[0], *key[2:]), *args, **kwargs),  # not its row
    )
    with pytest.raises(AssertionError):
        assert_same(off, run(GRAPHS))


def test_gradients_are_the_callers_own(build: Build, batch: Batch) -> None:
    """They add up from batch to batch, and no later step writes to the ones that were there before."""
    batches = [on_device(batch(length, seed=seed)) for seed, length in enumerate((25, 25, 18, 25))]

    def accumulate(model: LongContextGradientModel, at: list[int]) -> dict[str, Tensor]:
        for index in at:
            model(*batches[index]).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    with_graphs = build(cache="h2o", num_layers=2, dtype=torch.float32, grad=GRAPHS).to(DEVICE)
    found = accumulate(with_graphs, [0, 1, 2])
    kept = {name: g.clone() for name, g in found.items()}
    expected = accumulate(
        build(cache="h2o", num_layers=2, dtype=torch.float32, grad=ASYNC).to(DEVICE), [0, 1, 2]
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with_graphs.zero_grad(set_to_none=True)
    accumulate(with_graphs, [3])
    assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_an_unequal_share_of_parameters(build: Build, batch: Batch) -> None:
    """Rows below the first that trains have no backward pass, and none has a head that trains alone."""
    batches = [on_device(batch(25)), on_device(batch(18))]
    for frozen in ("gpt_model.", "gpt_model.embedding", "head_model."):

        def run(grad: dict[str, Any], frozen: str = frozen) -> list[Any]:
            model = build(cache="lastrec", num_layers=2, dtype=torch.float32, grad=grad).to(DEVICE)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen))
            return train(model, batches, steps=2)

        assert_same(run(ASYNC), run(GRAPHS))


# -- what work depends on without being given it --------------------------------------------------------


def _moved(model: LongContextGradientModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _to_the_cpu_and_back(model: LongContextGradientModel) -> None:
    model.cpu()
    model.to(DEVICE)


def _frozen(model: LongContextGradientModel) -> None:
    model.gpt_model.layers[1].requires_grad_(False)


def _frozen_below(model: LongContextGradientModel) -> None:
    model.gpt_model.embedding.requires_grad_(False)
    model.gpt_model.layers[0].requires_grad_(False)


def _double(model: LongContextGradientModel) -> None:
    model.double()


CHANGES = [_moved, _to_the_cpu_and_back, _frozen, _frozen_below, _double]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_model_that_changed_is_captured_again(
    build: Build, batch: Batch, grads: Grads, change: Callable[[LongContextGradientModel], None]
) -> None:
    ids, targets = on_device(batch(25))

    def run(grad: dict[str, Any]) -> list[dict[str, Tensor]]:
        model = build(cache="h2o", num_layers=2, dtype=torch.float32, grad=grad).to(DEVICE)
        found = []
        for number in range(4):
            if number == 2:
                change(model)
            model.zero_grad()
            model(ids, targets).backward()
            found.append(grads(model))
        return found

    for a, b in zip(run(ASYNC), run(GRAPHS), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_trains_may_change_between_forward_and_backward(
    build: Build, batch: Batch, grads: Grads
) -> None:
    """A graph of that backward pass lacks a gradient that the next one has."""
    ids, targets = on_device(batch(25))

    def run(grad: dict[str, Any]) -> list[dict[str, Tensor]]:
        model = build(num_layers=2, dtype=torch.float32, grad=grad).to(DEVICE)
        layer, found = model.gpt_model.layers[1], []
        for number in range(5):
            layer.requires_grad_(number != 1)
            model.zero_grad()
            loss = model(ids, targets)
            layer.requires_grad_(number != 3)
            loss.backward()
            found.append(grads(model))
        return found

    for a, b in zip(run(ASYNC), run(GRAPHS), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    was = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, was)


@contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(not was)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


SURROUNDINGS = {
    "deterministic": lambda: deterministic(not torch.are_deterministic_algorithms_enabled()),
    "inference-mode": torch.inference_mode,
    "precision": lambda: _changed(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "cudnn-attention": _without_cudnn_attention,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_other_surroundings_drop_what_was_captured(
    build: Build, batch: Batch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ids, targets = on_device(batch(25))
    model = build(cache="h2o", num_layers=2, grad=GRAPHS).to(DEVICE)
    drops = 0
    right = Graphs.drop

    def counted(self: Graphs) -> None:
        nonlocal drops
        drops += 1
        right(self)

    def losses(surroundings: AbstractContextManager[Any]) -> set[float]:
        with surroundings, torch.no_grad():
            return {model(ids, targets).item() for _ in range(4)}

    (expected,) = losses(nullcontext())
    monkeypatch.setattr(Graphs, "drop", counted)
    assert losses(nullcontext()) == {expected}
    assert drops == 0, "nothing changed"
    (found,) = losses(SURROUNDINGS[name]())
    # 1e-12: on a GPU other kernels may add in another order, of float64 (2e-16) and some hundred terms.
    assert found == pytest.approx(expected, rel=1e-12)
    assert drops == 1
    assert losses(nullcontext()) == {expected}
    assert drops == 2


def test_either_way_to_ask_for_a_precision_is_seen() -> None:
    """PyTorch refuses to answer in the old words once somebody has used the new ones."""
    matmul = torch.backends.cuda.matmul
    was = matmul.fp32_precision
    before = choice_of_kernels()
    try:
        matmul.fp32_precision = "tf32"
        new = choice_of_kernels()
        matmul.fp32_precision = "ieee"
        assert new not in (before, choice_of_kernels())
        torch.set_float32_matmul_precision("high")
        assert choice_of_kernels() == new
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = was
    assert choice_of_kernels() == before


def test_batches_of_another_size_take_turns(build: Build, batch: Batch) -> None:
    batches = [on_device(batch(25, batch_size=size)) for size in (2, 2, 3, 1)]

    def run(grad: dict[str, Any]) -> list[Any]:
        return train(
            build(cache="h2o", num_layers=2, dtype=torch.float32, grad=grad).to(DEVICE), batches, steps=2
        )

    assert_same(run(ASYNC), run(GRAPHS))


def test_evaluation_in_inference_mode_between_steps(build: Build, batch: Batch) -> None:
    """What it keeps may not be seen by autograd later, and so may not be kept for training."""
    batches, held_out = [on_device(batch(25)), on_device(batch(18))], on_device(batch(12))

    def run(grad: dict[str, Any]) -> list[Any]:
        model = build(cache="h2o", num_layers=2, dtype=torch.float32, grad=grad).to(DEVICE)
        shown = []
        for _ in range(3):
            with torch.inference_mode():
                shown.append(model(*held_out).cpu())
            shown += train(model, batches, steps=1)
        return shown

    assert_same(run(ASYNC), run(GRAPHS))


def test_dropout_of_an_evaluation_ends_with_it(build: Build, batch: Batch) -> None:
    ids, targets = on_device(batch(25))
    model = build(grad=GRAPHS, lora=LoRAConfig(rank=2, dropout=0.5)).to(DEVICE)

    def losses() -> set[float]:
        with torch.no_grad():
            return {model(ids, targets).item() for _ in range(4)}

    model.eval()
    expected = losses()
    assert len(expected) == 1
    model.train()
    assert len(losses()) == 4, "each draws its own numbers"
    model.eval()
    assert losses() == expected


def test_a_batch_of_nan_leaves_nothing_behind(build: Build, batch: Batch) -> None:
    """Kept caches hold NaN then, also in slots that a shorter batch does not fill."""
    bad, right = on_device(batch(25)), on_device(batch(6))
    bad[0][0, 3] = -1

    for cache in ("lastrec", "h2o", "h2o-torch-quantized8"):
        expected = train(
            build(cache=cache, num_layers=2, grad=ASYNC | QUANTIZED).to(DEVICE), [right], steps=3
        )
        model = build(cache=cache, num_layers=2, grad=GRAPHS | QUANTIZED).to(DEVICE)
        for _ in range(3):
            loss = model(*bad)
            loss.backward()
            assert loss.isnan()
        model.zero_grad()
        assert_same(expected, train(model, [right], steps=3))


# -- copies, and models where there is no CUDA ----------------------------------------------------------


def _pickled(model: LongContextGradientModel) -> LongContextGradientModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: LongContextGradientModel = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled], ids=["deepcopy", "saved"])
def test_copies_have_graphs_of_their_own(
    build: Build, batch: Batch, duplicate: Callable[[LongContextGradientModel], LongContextGradientModel]
) -> None:
    batches = [on_device(batch(25)), on_device(batch(18))]
    model = build(cache="h2o", num_layers=2, dtype=torch.float32, grad=GRAPHS).to(DEVICE)
    train(model, batches, steps=1)
    model.zero_grad()
    other = duplicate(model)
    first, second = train(model, batches, steps=2), train(other, batches, steps=2)
    assert_same(first, second)


class Counting(pickle.Pickler):
    """Counts the tensors that it is given, and does not write them."""

    nbytes = 0

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, Tensor):
            return None
        self.nbytes += obj.nbytes
        return f"tensor of {tuple(obj.shape)}"


def test_a_saved_model_holds_nothing_of_its_graphs(build: Build, batch: Batch) -> None:
    def saved(grad: dict[str, Any]) -> tuple[int, int]:
        model = build(grad=grad, num_layers=2).to(DEVICE)
        train(model, [on_device(batch(22))], steps=2)
        model.zero_grad()
        file = io.BytesIO()
        pickler = Counting(file)
        pickler.dump(model.cpu())
        return pickler.nbytes, file.tell()

    assert saved(GRAPHS) == saved(ASYNC)


def test_a_model_on_the_cpu_is_refused_by_the_name_of_the_flag(build: Build, batch: Batch) -> None:
    model = build(grad={"cuda_graphs": True})
    with pytest.raises(ValueError, match=r"grad\.cuda_graphs needs the model on a CUDA device.*cpu"):
        model(*batch(25))
    loss = build(grad={"cuda_graphs": False})(*batch(25))
    assert loss.isfinite()


# -- exceptions -----------------------------------------------------------------------------------------


class RaiseAt(TorchDispatchMode):
    """Raises instead of the op of a given number; counts the ops."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        if self.count == self.number:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


SHARES = {0: (0.1, 0.9), 1: (0.1, 0.4, 0.7, 0.95), 2: (0.3, 0.8)}
"""How far a step comes, by the steps before it."""


@pytest.mark.parametrize("steps_before", SHARES)
def test_after_an_exception_nothing_is_left_and_the_next_step_is_right(
    build: Build, batch: Batch, grads: Grads, emptied: Callable[[], None], steps_before: int
) -> None:
    """In steps that are issued, captured and launched; some of the ops that raise are being captured."""
    ids, targets = on_device(batch(12))
    model = build(cache="h2o", num_layers=2, dtype=torch.float32, grad=GRAPHS).to(DEVICE)

    def step() -> None:
        model.zero_grad()
        model(ids, targets).backward()

    def steps_like_before() -> None:
        model._graphs.drop()
        for _ in range(steps_before):
            step()

    # The matrix library's workspaces stay: one for the user's stream, and one for the stream of captures.
    for _ in range(2):
        step()
    model.zero_grad()
    model._graphs.drop()
    gc.collect()
    before = torch.cuda.memory_allocated()

    steps_like_before()
    with RaiseAt(0) as counter:
        step()
    expected = grads(model)
    for share in SHARES[steps_before]:
        steps_like_before()
        model.zero_grad()
        with RaiseAt(int(share * counter.count)), pytest.raises(KeyboardInterrupt):
            model(ids, targets).backward()
        assert not grads(model)
        assert not torch.cuda.is_current_stream_capturing()
        emptied()
        held = sum(g.nbytes for g in expected.values())
        # Allocations are counted in multiples of 512 bytes.
        assert torch.cuda.memory_allocated() <= before + held + 512 * len(expected), f"after {share}"
        for _ in range(2):
            step()
            found = grads(model)
            assert all(torch.equal(found[name], expected[name]) for name in expected), f"after {share}"
        del found


# -- order ----------------------------------------------------------------------------------------------


def waits_of(model: LongContextGradientModel, batches: list[tuple[Tensor, Tensor]]) -> set[str]:
    with watch() as seen:
        for ids, targets in batches:
            model(ids, targets).backward()
    assert not seen.findings
    assert not seen.unknown
    return {f"{wait.kind} at {wait.site}" for wait in seen.host_waits}


@pytest.mark.parametrize("cache", ["lastrec", "h2o", "h2o-torch-quantized8"])
def test_steps_that_capture_and_launch_have_no_race_and_no_other_host_wait(
    build: Build, batch: Batch, cache: str
) -> None:
    batches = [on_device(batch(length)) for length in (25, 18, 25, 18, 26)]
    settings = {"cache": cache, "num_layers": 2, "grad": GRAPHS | QUANTIZED}
    assert waits_of(build(**settings).to(DEVICE), batches) == waits_of(
        build(**settings | {"grad": ASYNC | QUANTIZED}).to(DEVICE), batches
    )


class Streams:
    """Runs on two streams, which the caller does not order, and later work of the caller's on the first."""

    def __init__(self, model: LongContextGradientModel) -> None:
        self.model = model
        self.streams = torch.cuda.current_stream(), torch.cuda.Stream()
        self.streams[1].wait_stream(self.streams[0])

    def step(self, stream: int, batch: tuple[Tensor, Tensor], *, training: bool = True) -> None:
        with torch.cuda.stream(self.streams[stream]):
            # Unused from here on, so that the caller has nothing to order of its own.
            self.model.zero_grad()
            loss = self.model(*batch) if training else torch.no_grad()(self.model)(*batch)
            if training:
                loss.backward()

    def allocate(self) -> None:
        """Memory of many sizes: whatever was freed serves again."""
        for size in range(8, 6000, 8):
            torch.ones(size, dtype=torch.uint8, device=DEVICE)


def on_streams(build: Build, story: Callable[[Streams], None], *, asynchronous: bool, **settings: Any) -> Any:
    grad = GRAPHS | {"async_cpu_transfer": asynchronous}
    streams = Streams(build(**{"num_layers": 2, "dtype": torch.float32, "grad": grad} | settings).to(DEVICE))
    torch.cuda.synchronize()
    with watch() as seen:
        story(streams)
        streams.allocate()
    assert not seen.unknown
    return seen.findings


LANES = pytest.mark.parametrize("asynchronous", [False, True], ids=["one-lane", "three-lanes"])


@LANES
def test_runs_on_streams_that_differ_are_ordered(build: Build, batch: Batch, asynchronous: bool) -> None:
    batches = [on_device(batch(length)) for length in LENGTHS]

    def story(streams: Streams) -> None:
        for number in range(6):
            streams.step(number % 2, batches[number // 3])

    assert not on_streams(build, story, asynchronous=asynchronous, cache="h2o")
    with drop_edge("Graphs.begin", call="wait_stream"):
        assert on_streams(build, story, asynchronous=asynchronous, cache="h2o")


def _many_batches(batch: Batch) -> Callable[[Streams], None]:
    batches = [on_device(batch(length)) for length in (25, 18, 25, 18)]

    def story(streams: Streams) -> None:
        for stream, each in enumerate(batches):
            streams.step(stream % 2, each)

    return story


def _longer_batch(batch: Batch) -> Callable[[Streams], None]:
    short, long = on_device(batch(5)), on_device(batch(25))

    def story(streams: Streams) -> None:
        streams.step(0, short)
        streams.step(1, short)
        streams.step(1, long)

    return story


@LANES
@pytest.mark.parametrize("make_story", [_many_batches, _longer_batch], ids=["recalled", "rings"])
def test_what_is_freed_in_a_run_on_another_stream_is_not_used_too_early(
    build: Build,
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
    make_story: Callable[[Batch], Callable[[Streams], None]],
    asynchronous: bool,
) -> None:
    monkeypatch.setattr(graphs, "_MOST_RECALLED", 4)
    story = make_story(batch)
    assert not on_streams(build, story, asynchronous=asynchronous)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    assert on_streams(build, story, asynchronous=asynchronous)


@LANES
def test_what_is_dropped_on_another_stream_is_not_used_too_early(
    build: Build, batch: Batch, asynchronous: bool
) -> None:
    """No graph was made yet, but memory was kept."""
    batches = [on_device(batch(length, batch_size=size)) for length, size in ((8, 2), (5, 2), (8, 3))]

    def story(streams: Streams) -> None:
        for stream, each in zip((0, 1, 1), batches, strict=True):
            streams.step(stream, each, training=False)

    assert not on_streams(build, story, asynchronous=asynchronous, cache="h2o")


@pytest.mark.simulation
def test_graphs_captured_before_the_watch_are_understood_here(build: Build, batch: Batch) -> None:
    """Simulated CUDA tells of each captured call at each launch: races inside are found all the same."""
    batches = [on_device(batch(25))]
    for wait in (True, False):
        streams = Streams(build(cache="h2o", num_layers=2, dtype=torch.float32, grad=GRAPHS).to(DEVICE))
        for _ in range(3):
            streams.step(0, batches[0])
        torch.cuda.synchronize()
        with nullcontext() if wait else drop_edge("Graphs.begin", call="wait_stream"), watch() as seen:
            streams.step(0, batches[0])
            streams.step(1, batches[0])
        assert not seen.unknown
        assert bool(seen.findings) is not wait


@pytest.mark.no_gpu
def test_arguments_without_cuda_are_refused_by_the_name_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"grad\.cuda_graphs needs a CUDA device.*is_available"):
        GradientArgs(cuda_graphs=True)
