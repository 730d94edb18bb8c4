"""The layers find what they are there to find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscurrent.gradient import store, transfer, windows
from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.graphs import Graphs
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.kvcache.policies.h2o import H2O
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.suite import exactness, experiment
from crosscurrent.suite.contracts import Contracts
from crosscurrent.suite.exactness import Exactness
from crosscurrent.suite.experiment import (
    Measurement,
    cache_config,
    gradient_args,
    make_batches,
    make_parts,
    measure,
)
from crosscurrent.suite.layer import Layer, Verdict
from crosscurrent.suite.parity import Parity, first_difference
from crosscurrent.suite.race_freedom import RaceFreedom
from crosscurrent.suite.scenario import WITH_GRAPHS, Scenario, scenarios

LASTREC = Scenario(policy="lastrec", quantizer="default")
H2O_QUANTIZED = Scenario(policy="h2o", quantizer="torch-quantized8")


@pytest.mark.parametrize("scenario", scenarios(everything=True), ids=lambda scenario: scenario.name)
def test_the_gradient_is_exact(scenario: Scenario) -> None:
    outcome = Exactness().check(scenario)
    assert outcome.verdict is Verdict.HELD, outcome.detail


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("layer", [Contracts(), Parity(), RaceFreedom()], ids=lambda layer: layer.name)
def test_layers_hold_on_cuda(layer: Layer) -> None:
    outcome = layer.check(H2O_QUANTIZED)
    assert outcome.verdict is Verdict.HELD, outcome.detail


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("scenario", WITH_GRAPHS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("layer", [Parity(), RaceFreedom()], ids=lambda layer: layer.name)
def test_layers_hold_with_graphs(layer: Layer, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = 0
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal launches
        launches += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    outcome = layer.check(scenario)
    assert outcome.verdict is Verdict.HELD, outcome.detail
    assert launches


@pytest.mark.usefixtures("_cuda")
def test_gradients_that_the_next_row_writes_to_are_other_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows add their gradients up in the same places, which graphs need, and must have taken them then."""
    monkeypatch.setattr(Graphs, "taken", lambda self, kept: kept)
    assert Parity().check(LASTREC).verdict is Verdict.HELD
    outcome = Parity().check(WITH_GRAPHS[0])
    assert outcome.verdict is Verdict.FAILED
    assert "elements differ" in outcome.detail


def test_a_gradient_that_is_off_in_one_chunk_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    right = windows.attend_backward
    calls: list[int] = []

    def wrong(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        dq, dkv = right(*arguments)
        return dq, dkv * (1 + 1e-6 * (len(calls) == 3))

    monkeypatch.setattr(windows, "attend_backward", wrong)
    assert Exactness().check(LASTREC).verdict is Verdict.FAILED


def test_a_policy_that_evicts_another_token_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    right = H2O._lowest

    def wrong(self: H2O, count: int) -> Tensor:
        slots = right(self, count)
        return (slots - 1).clamp(min=0) if count == 1 else slots  # one token late in the first batch

    batches = make_batches()
    assert any((ids.shape[1] - 16) % 6 == 1 for ids, _ in batches), "no chunk has a single token"
    monkeypatch.setattr(H2O, "_lowest", wrong)
    assert Exactness().check(Scenario(policy="h2o", quantizer="default")).verdict is Verdict.FAILED


def test_exactness_does_not_hold_to_less_than_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "TOLERANCE", 0.0)
    assert Exactness().check(LASTREC).verdict is Verdict.FAILED


def _measured() -> list[Measurement]:
    model = LongContextGradientModel(
        *make_parts(dtype=torch.float32, device="cpu"), cache=cache_config(LASTREC), grad=gradient_args()
    )
    return measure(model, make_batches())


def test_the_same_run_twice_has_no_difference() -> None:
    assert first_difference(_measured(), _measured()) is None


def test_one_bit_is_a_difference() -> None:
    name = "gpt_model.layers.1.attention.k.weight"
    one, other = _measured(), _measured()
    gradient = other[1].gradients[name]
    gradient.view(torch.int32)[3, 5] ^= 1
    said = first_difference(one, other)
    assert said is not None
    assert said.startswith(f"batch 1: {name}: 1 of {gradient.numel()} elements differ")


def test_a_zero_of_the_other_sign_is_a_difference() -> None:
    one, other = _measured(), _measured()
    for side, zero in ((one, 0.0), (other, -0.0)):
        side[0].loss.fill_(zero)
    assert first_difference(one, other) == "batch 0: loss: 1 of 1 elements differ, by up to 0"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_on_both_sides_is_a_difference_too(bad: float) -> None:
    one, other = _measured(), _measured()
    for side in (one, other):
        side[0].loss.fill_(bad)
    assert first_difference(one, other) == "batch 0: loss: not finite"


@pytest.mark.usefixtures("_cuda")
def test_two_runs_that_are_nan_in_the_same_way_are_no_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**arguments: Any) -> tuple[Transformer, Head]:
        model, head = make_parts(**arguments)
        with torch.no_grad():
            head.weight.fill_(torch.nan)
        return model, head

    monkeypatch.setattr(experiment, "make_parts", broken)
    outcome = Parity().check(LASTREC)
    assert outcome.verdict is Verdict.FAILED
    assert outcome.detail.endswith("batch 0: loss: not finite")


def test_another_eviction_or_a_missing_gradient_is_a_difference() -> None:
    one, other = _measured(), _measured()
    swapped = [replace(other[0], replay_log=other[1].replay_log), other[1]]
    assert first_difference(one, swapped) == "batch 0: the replay logs differ"
    del other[0].gradients["head_model.weight"]
    assert first_difference(one, other) == "batch 0: only one side has head_model.weight"


@pytest.mark.usefixtures("_cuda")
def test_a_flag_that_is_not_refused_breaks_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientArgs, "_check_asynchronous", lambda self: None)
    outcome = Contracts().check(LASTREC)
    assert outcome.verdict is Verdict.FAILED
    assert "was not refused with nothing pinned" in outcome.detail


@pytest.mark.usefixtures("_cuda")
def test_memory_that_is_not_pinned_breaks_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    right = store.is_pinned
    # The budget is right, the buffers are not.
    budget = store.pinned_budget

    def budget_as_before(*arguments: object, **named: object) -> store.PinnedBudget:
        with monkeypatch.context() as inner:
            inner.setattr(store, "is_pinned", right)
            return budget(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("crosscurrent.gradient.long_context.pinned_budget", budget_as_before)
    monkeypatch.setattr(store, "is_pinned", lambda *_: False)
    outcome = Contracts().check(LASTREC)
    assert outcome.verdict is Verdict.FAILED
    assert "bytes are pinned, the budget says" in outcome.detail


@pytest.mark.usefixtures("_cuda")
def test_buffers_made_anew_each_step_break_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LongContextGradientModel._run_checkpointed

    def wasteful(self: LongContextGradientModel, call: object) -> Tensor:
        self._store = None
        return right(self, call)  # type: ignore[arg-type]

    monkeypatch.setattr(LongContextGradientModel, "_run_checkpointed", wasteful)
    outcome = Contracts().check(LASTREC)
    assert outcome.verdict is Verdict.FAILED
    assert "allocated again" in outcome.detail


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("scenario", [LASTREC, WITH_GRAPHS[0]], ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("lane", ["host_to_device", "device_to_host", "main"])
def test_a_lane_that_never_waits_races(
    lane: str, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = transfer.Lane.behind

    def never(self: transfer.Lane, moment: transfer.Moment | None) -> torch.cuda.Event | None:
        return None if self is getattr(lanes[0], lane) else right(self, moment)

    lanes: list[transfer.Lanes] = []
    opened = transfer.Lanes.open

    def remembered(self: transfer.Lanes) -> None:
        lanes[:] = [self]
        opened(self)

    monkeypatch.setattr(transfer.Lanes, "open", remembered)
    monkeypatch.setattr(transfer.Lane, "behind", never)
    outcome = RaceFreedom().check(scenario)
    assert outcome.verdict is Verdict.FAILED
    assert "races; first:" in outcome.detail


@pytest.mark.usefixtures("_cuda")
def test_a_host_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LongContextGradientModel._run_checkpointed

    def waiting(self: LongContextGradientModel, call: object) -> Tensor:
        loss = right(self, call)  # type: ignore[arg-type]
        assert loss.item() > 0
        return loss

    monkeypatch.setattr(LongContextGradientModel, "_run_checkpointed", waiting)
    outcome = RaceFreedom().check(LASTREC)
    assert outcome.verdict is Verdict.FAILED
    assert "the host waits: item at" in outcome.detail
