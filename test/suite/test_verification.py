"""The seam of the suite: what held, what failed and what could not be run are kept apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from known_answers import Asked, Question

from crosscurrent.suite import LAYERS
from crosscurrent.suite.layer import Outcome, Verdict
from crosscurrent.suite.recorded import on_gpu
from crosscurrent.suite.scenario import WITH_GRAPHS, Scenario, scenarios
from crosscurrent.suite.verification import Cuda, Result, _result_of, overall, questions, run, run_spread

ONE = scenarios()[:1]


def test_the_ordinary_scenarios_are_two_policies_times_two_quantizers() -> None:
    assert [scenario.name for scenario in scenarios()] == [
        "lastrec, default",
        "lastrec, torch-quantized8",
        "h2o, default",
        "h2o, torch-quantized8",
    ]
    assert set(scenarios()) < set(scenarios(everything=True))


def test_with_graphs_only_layers_that_look_at_them_are_asked() -> None:
    assert [scenario.name for scenario in WITH_GRAPHS] == ["lastrec, default, graphs", "h2o, default, graphs"]
    layers = [Question(name="a"), Question(name="b", takes_graphs=True)]
    asked = [(layer.name, scenario) for layer, scenario in questions(layers, [*ONE, *WITH_GRAPHS])]
    assert asked == [("a", *ONE), ("b", *ONE), *(("b", scenario) for scenario in WITH_GRAPHS)]
    results = list(run(layers, [*ONE, *WITH_GRAPHS], Cuda.NONE))
    assert [(result.layer, result.scenario) for result in results] == asked
    told = {layer.name for layer, _ in questions(LAYERS, WITH_GRAPHS)}
    assert told == {"parity", "races"} | (set() if torch.cuda.is_available() else {"schedules"})


def test_every_layer_is_asked_of_every_scenario() -> None:
    layers = [Question(name="a"), Question(name="b")]
    results = list(run(layers, scenarios(), Cuda.NONE))
    assert [(result.layer, result.scenario) for result in results] == [
        (layer.name, scenario) for layer in layers for scenario in scenarios()
    ]
    assert overall(results) is Verdict.HELD


@pytest.mark.parametrize("answer", [Outcome.failed("seen 1, expected 2"), RuntimeError("broken")])
def test_one_failure_fails_the_whole_and_the_others_are_still_asked(answer: Outcome | Exception) -> None:
    layers = [Question(answer=answer), Question(), Question(needs_cuda=True)]
    results = list(run(layers, ONE, Cuda.NONE))
    assert [result.outcome.verdict for result in results] == [Verdict.FAILED, Verdict.HELD, Verdict.NOT_RUN]
    assert overall(results) is Verdict.FAILED


def test_an_error_of_a_layer_is_told_in_its_result() -> None:
    (result,) = run([Question(answer=KeyError("lost"))], ONE, Cuda.NONE)
    assert result.outcome == Outcome.failed("KeyError: 'lost'")


def test_what_could_not_be_run_is_never_counted_as_held() -> None:
    results = list(run([Question(), Question(needs_cuda=True)], ONE, Cuda.NONE))
    assert [result.outcome.verdict for result in results] == [Verdict.HELD, Verdict.NOT_RUN]
    assert overall(results) is Verdict.NOT_RUN
    assert "CUDA" in results[1].outcome.detail


def test_nothing_asked_is_nothing_held() -> None:
    assert overall([]) is Verdict.NOT_RUN


@pytest.mark.simulation
def test_simulated_cuda_is_there_while_a_layer_that_needs_it_runs() -> None:
    @dataclass(frozen=True)
    class Asks(Question):
        def check(self, scenario: Scenario) -> Outcome:
            return Outcome.held("there" if torch.cuda.is_available() else "not there")

    results = list(run([Asks(needs_cuda=True), Asks()], ONE, Cuda.SIMULATED))
    assert results[0].outcome == Outcome.held("there")


@pytest.mark.simulation
def test_without_a_device_simulation_is_a_choice() -> None:
    assert Cuda.available() is Cuda.SIMULATED
    assert Cuda.available(may_simulate=False) is Cuda.NONE


def test_processes_give_the_answers_of_one() -> None:
    layers = [
        Question(name="a"),
        Question(name="b", answer=Outcome.failed("seen 1, expected 2")),
        Question(name="c", answer=KeyError("lost")),
        Question(name="d", needs_cuda=True),
    ]

    def outcomes(results: Iterator[Result]) -> dict[tuple[str, Scenario], Outcome]:
        return {(result.layer, result.scenario): result.outcome for result in results}

    alone = outcomes(run(layers, scenarios(), Cuda.NONE))
    assert outcomes(run_spread(layers, scenarios(), Cuda.NONE, workers=2)) == alone
    assert len(alone) == len(layers) * len(scenarios())


def test_a_process_that_died_is_no_verdict() -> None:
    from concurrent.futures import Future
    from concurrent.futures.process import BrokenProcessPool

    gone: Future[Result] = Future()
    gone.set_exception(BrokenProcessPool())
    result = _result_of(gone, Question(), ONE[0])
    assert result.outcome.verdict is Verdict.NOT_RUN
    assert "--workers 1" in result.outcome.detail


@pytest.mark.parametrize("cuda", [Cuda.REAL, Cuda.NONE])
def test_what_needs_a_real_device_quiet_is_asked_at_the_end_in_this_process(cuda: Cuda) -> None:
    layers = [Asked(name="quiet", needs_quiet=True), Asked(name="loud")]
    results = list(run_spread(layers, scenarios(), cuda, workers=2))
    assert len(results) == len(layers) * len(scenarios())
    assert all(result.outcome.detail.isdecimal() for result in results)
    here = [result.layer for result in results if result.outcome.detail == str(os.getpid())]
    assert here == (["quiet"] * len(scenarios()) if cuda is Cuda.REAL else [])
    assert [result.layer for result in results[len(results) - len(here) :]] == here


def test_no_layer_is_asked_twice_of_what_comes_to_the_same() -> None:
    """Racy code runs with lastrec where another policy could not bear it."""
    asked = {
        scenario.policy
        for layer, scenario in questions(LAYERS, scenarios(everything=True))
        if layer.name == "history"
    }
    assert asked == ({"lastrec"} if on_gpu() else {"lastrec", "h2o"})
