"""The schedules layer: the gradient as it is holds, and one wait less does not."""

from __future__ import annotations

import pytest
import torch

from crosscurrent.stress.edges import drop_edge
from crosscurrent.suite.experiment import make_batches, make_model
from crosscurrent.suite.layer import Verdict
from crosscurrent.suite.recorded import record
from crosscurrent.suite.scenario import WITH_GRAPHS, Scenario, scenarios
from crosscurrent.suite.schedules import Schedules, judge

LASTREC = Scenario(policy="lastrec", quantizer="default")

pytestmark = pytest.mark.usefixtures("_cuda")


def short() -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids, targets = make_batches()[0]
    return [(ids[:, :40], targets[:, :37])]


def test_the_gradient_gives_the_same_bits_in_other_schedules() -> None:
    program = record(make_model(LASTREC), short(), keep=True).program
    assert program is not None
    outcome = judge(program)
    assert outcome.verdict is Verdict.HELD, outcome.detail
    assert "bounded" in outcome.detail


@pytest.mark.parametrize(
    ("where", "scenario"),
    [
        ("Outgoing.send", LASTREC),
        ("Incoming.receive", LASTREC),
        pytest.param("Outgoing.send", WITH_GRAPHS[0], marks=pytest.mark.simulation),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_without_a_wait_it_does_not(where: str, scenario: Scenario) -> None:
    with drop_edge(where, call="wait_event"):
        program = record(make_model(scenario), short(), keep=True).program
    assert program is not None
    outcome = judge(program)
    assert outcome.verdict is Verdict.FAILED
    # On a device the recorded run may have shown the race itself.
    raced = "run again in program order" in outcome.detail and torch.cuda.is_available()
    assert raced or "schedules differ" in outcome.detail
    assert "batch 1 " in outcome.detail


@pytest.mark.stress
@pytest.mark.parametrize(
    "scenario",
    [
        *scenarios(everything=True),
        *(pytest.param(each, marks=pytest.mark.simulation) for each in WITH_GRAPHS),
    ],
    ids=lambda scenario: scenario.name,
)
def test_the_layer_holds(scenario: Scenario) -> None:
    outcome = Schedules().check(scenario)
    assert outcome.verdict is Verdict.HELD, outcome.detail
