"""Under the race detector: no race, no host wait, and no wait that could be left out.

Three batches of different length, so that buffers are reused across batches and grow. Several sizes of
lattice, since each has edges of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscurrent.gradient import LongContextGradientModel, transfer
from crosscurrent.races.advice import Verdict
from crosscurrent.races.watch import Watch, watch

Build = Callable[..., LongContextGradientModel]
Batch = Callable[..., tuple[Tensor, Tensor]]
Grads = Callable[[torch.nn.Module], dict[str, Tensor]]

ASYNC = {"layercp_pin_memory": True, "cachecp_pin_memory": True, "async_cpu_transfer": True, "chunk_size": 4}
QUANTIZED = {"layercp_qname": "torch-quantized8", "cachecp_qname": "torch-quantized4"}
DEVICE = torch.device("cuda")

pytestmark = pytest.mark.usefixtures("cuda")


def on_device(
    model: LongContextGradientModel, batches: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Everything uploaded before the watch begins."""
    model.to(DEVICE)
    return [(ids.to(DEVICE), targets.to(DEVICE)) for ids, targets in batches]


def train(model: LongContextGradientModel, batches: list[tuple[Tensor, Tensor]]) -> None:
    for ids, targets in batches:
        model(ids, targets).backward()


def watched(model: LongContextGradientModel, batches: list[tuple[Tensor, Tensor]]) -> Watch:
    batches = on_device(model, batches)
    with watch(trace=True) as seen:
        train(model, batches)
    return seen


def transfer_waits(seen: Watch) -> list[Any]:
    return [
        each
        for each in seen.advice
        if each.site.file.endswith("gradient/transfer.py") and each.kind == "wait_event"
    ]


CASES = [
    pytest.param({"cache": "lastrec"}, (22, 29, 35), id="lastrec"),
    pytest.param({"cache": "h2o", "grad": QUANTIZED}, (22, 29, 13), id="h2o-quantized"),
    pytest.param({"cache": "h2o", "grad": {"layers_per_cell": 2}}, (29, 22, 36), id="two-layers-a-cell"),
    pytest.param({"cache": "lastrec-torch-quantized8"}, (22, 29, 35), id="lastrec-packed"),
    pytest.param({"cache": "h2o-torch-quantized4"}, (22, 29, 13), id="h2o-packed"),
    pytest.param({"cache": "lastrec"}, (5, 8, 7), id="one-column"),
    pytest.param({"cache": "lastrec"}, (12, 16, 14), id="two-columns"),
    pytest.param({"cache": "h2o", "grad": {"layers_per_cell": 3}}, (22, 24, 9), id="one-row"),
]


@pytest.mark.parametrize(("settings", "lengths"), CASES)
def test_there_is_no_race_no_host_wait_and_no_wait_too_many(
    build: Build, batch: Batch, settings: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    settings = settings | {"grad": ASYNC | settings.get("grad", {}), "num_layers": 3}
    seen = watched(build(**settings), [batch(length) for length in lengths])
    assert not seen.findings
    assert not seen.unknown
    # Pinned memory is allocated when a batch needs more than any before it, and never again.
    assert {wait.kind for wait in seen.host_waits} <= {"allocation"}
    waits = transfer_waits(seen)
    assert waits
    assert all(wait.verdict is Verdict.NECESSARY for wait in waits)
    assert [(str(wait.site.line), wait.redundant_alone) for wait in waits if wait.redundant_alone] == []


def test_pinned_memory_is_allocated_once(build: Build, batch: Batch) -> None:
    model = build(cache="h2o", grad=ASYNC)
    batches = on_device(model, [batch(29), batch(29, seed=1), batch(22)])
    train(model, batches[:1])
    with watch() as seen:
        train(model, batches)
    assert not seen.host_waits
    assert not seen.findings


def test_ids_from_cpu_memory_wait_for_nothing_and_allocate_once(build: Build, batch: Batch) -> None:
    model = build(grad=ASYNC).to(DEVICE)
    train(model, [batch(22), batch(13)])
    torch.cuda.synchronize()
    with watch() as seen:
        train(model, [batch(22)])
    assert {wait.kind for wait in seen.host_waits} <= {"query"}
    assert not seen.findings


def test_a_double_buffer_of_one_slot_is_noticed(
    build: Build, batch: Batch, grads: Grads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad twin: what was prefetched replaces what is still to be used. The gradients show it."""
    (ids, targets), *_ = on_device(model := build(grad=ASYNC), [batch(29)])
    model(ids, targets).backward()
    right = grads(model)
    model.zero_grad()
    allocate = transfer._allocate
    monkeypatch.setattr(transfer, "_allocate", lambda *args: allocate(*args)[:1])
    model(ids, targets).backward()
    wrong = grads(model)
    assert not all(torch.equal(right[name], wrong[name]) for name in right)


def test_with_the_flag_off_there_is_one_stream(build: Build, batch: Batch) -> None:
    grad = {"layercp_pin_memory": True, "cachecp_pin_memory": True}
    seen = watched(build(cache="h2o", grad=grad), [batch(29), batch(22)])
    assert not seen.findings
    assert not transfer_waits(seen)
    assert {wait.kind for wait in seen.host_waits} <= {"allocation"}


def test_steps_on_streams_that_differ_are_ordered(build: Build, batch: Batch) -> None:
    """The caller orders its own streams; the model must order its CPU buffers and slots."""
    model = build(cache="h2o", grad=ASYNC)
    batches = on_device(model, [batch(29), batch(22), batch(29)])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with watch() as seen:
        last = torch.cuda.current_stream()
        for (ids, targets), stream in zip(batches, [*streams, streams[0]], strict=True):
            stream.wait_stream(last)
            with torch.cuda.stream(stream):
                model(ids, targets).backward()
            last = stream
    assert not seen.findings


@pytest.mark.parametrize("calls", [2, 9, 15, 30])
def test_an_interrupted_pass_leaves_no_race_behind(
    build: Build, batch: Batch, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Interrupted right behind a copy, before the event that the next pass would wait for is recorded."""
    model = build(num_layers=2, grad=ASYNC)
    batches = on_device(model, [batch(29)])
    record = transfer.Lane.record
    count = 0

    def interrupted(lane: transfer.Lane) -> transfer.Moment | None:
        nonlocal count
        count += model._lanes is not None and lane is not model._lanes.main
        if count == calls:
            raise KeyboardInterrupt
        return record(lane)

    with watch() as seen:
        monkeypatch.setattr(transfer.Lane, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, batches)
        monkeypatch.undo()
        model.zero_grad()
        train(model, batches)
    assert not seen.findings
