"""The gradient under stress. A little of it always; all of it with ``-m stress``, before a stream change.

On a machine with a GPU its lanes are delayed; elsewhere the schedules are run that these delays lead to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from crosscurrent.errors import WrongUseError
from crosscurrent.schedules import Schedule, load, run_schedule
from crosscurrent.stress import Delays, How, plans
from crosscurrent.stress.campaign import Case, Trial
from crosscurrent.suite.scenario import WITH_GRAPHS, Scenario, scenarios
from crosscurrent.suite.stressed import GradientCase, StressOptions, Values, _Delayed, cases
from crosscurrent.suite.verification import Cuda

LASTREC = Scenario(policy="lastrec", quantizer="default")
ALL = cases(scenarios(everything=True), StressOptions(), Cuda.available())


def lastrec(options: StressOptions) -> GradientCase:
    return GradientCase(
        scenario=LASTREC, checkpoints="kv_checkpoints", options=options, cuda=Cuda.available()
    )


# -- always ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", [LASTREC, WITH_GRAPHS[0]], ids=lambda scenario: scenario.name)
def test_a_few_seeds_change_nothing(scenario: Scenario) -> None:
    trial = replace(lastrec(StressOptions()), scenario=scenario).prepare()
    assert list(trial.problems) == []
    assert [list(trial.run(seed)) for seed in range(4)] == [[]] * 4
    trial.close()


@pytest.mark.simulation
@pytest.mark.usefixtures("_forgotten_wait")
def test_a_forgotten_wait_is_a_race_and_some_seeds_show_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("programs")
    trial = lastrec(StressOptions(save_to=folder)).prepare()
    (race,) = trial.problems
    assert race.what.startswith("write-after-read on device memory")
    assert "(Incoming.fetch)" in race.what
    assert "gpt_model.layers." in race.what  # the witness, in names that the user knows
    failures = [failure for seed in range(6) for failure in trial.run(seed)]
    assert failures
    failure = failures[0]
    assert "elements changed" in failure.what
    # What is printed can be replayed from the file alone.
    assert failure.schedule is not None
    assert failure.trace is not None
    program = load(failure.trace)
    assert str(Schedule.parse(failure.schedule, program)) == failure.schedule
    assert str(run_schedule(program, failure.schedule).changes[0]) == failure.what.splitlines()[0]
    trial.close()


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", scenarios(), ids=lambda scenario: scenario.name)
def test_a_few_real_delays_change_nothing(scenario: Scenario) -> None:
    for case in cases([scenario], StressOptions(), Cuda.REAL):
        trial = case.prepare()
        assert list(trial.problems) == []
        assert [list(trial.run(seed)) for seed in range(9)] == [[]] * 9
        trial.close()


# What a GPU does, on simulated CUDA: there values never differ, but all of it runs.


def on_a_device(options: StressOptions) -> Trial:
    return replace(lastrec(options), cuda=Cuda.REAL).prepare()


@pytest.mark.simulation
@pytest.mark.usefixtures("_cuda")
def test_on_a_device_every_seed_is_a_run_with_delays(made: list[Delays]) -> None:
    trial = on_a_device(StressOptions())
    assert list(trial.problems) == []
    counted, *_ = made
    assert (counted.num_ops > 1000, counted.num_delayed) == (True, 0)
    assert [list(trial.run(seed)) for seed in range(3)] == [[]] * 3
    assert [each.num_delayed > 0 for each in made] == [False, True, True, True]
    trial.close()


@pytest.mark.simulation
@pytest.mark.usefixtures("_cuda")
def test_a_seed_that_by_chance_delays_nothing_delays_all_of_a_lane(
    made: list[Delays], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = on_a_device(StressOptions(how=How.RANDOM))
    monkeypatch.setattr(plans, "RANDOM_SHARE", 1e-15)
    assert list(trial.run(1)) == []
    assert [each.num_delayed > 0 for each in made] == [False, False, True]
    trial.close()


@pytest.mark.simulation
@pytest.mark.usefixtures("_cuda")
def test_a_seed_for_which_nothing_was_delayed_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = on_a_device(StressOptions())
    monkeypatch.setattr(Delays, "before", lambda *_: None)
    (failure,) = trial.run(2)
    assert (failure.seed, failure.what) == (2, "nothing was delayed, so that nothing was tried")
    trial.close()


def test_lanes_that_the_gradient_does_not_have_are_refused() -> None:
    with pytest.raises(
        ValueError, match="no lane 'other'; its lanes are device_to_host, host_to_device, main"
    ):
        StressOptions(lanes=("main", "other"))


@pytest.mark.simulation
@pytest.mark.usefixtures("_cuda", "_forgotten_wait")
def test_on_a_device_the_detector_looks_at_a_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the runs whose values are compared, that of the detector is the first, which has the mistake.
    with monkeypatch.context() as patched:
        patched.setattr(_Delayed, "_failures", lambda *_: [])
        patched.setattr(_Delayed, "_run", lambda *_, **__: Values({}))
        (race,) = on_a_device(StressOptions()).problems
    assert race.what.startswith("write-after-read on device memory")


def test_what_differs_is_said_and_nothing_else() -> None:
    off = Values({"loss": torch.ones(1), "grad": torch.arange(4.0)})
    assert off.differences(Values({"loss": torch.ones(1), "grad": torch.arange(4.0)})) == []
    wrong = Values({"loss": torch.ones(1), "grad": torch.tensor([-0.0, 1, 2.5, torch.nan])})
    assert off.differences(wrong) == ["grad: 3 of 4 elements differ, by up to 0.5; 0 and 1 NaN"]
    nan = Values({"loss": torch.tensor([torch.nan])})
    assert nan.differences(nan) == ["loss: not finite"]


def test_every_scenario_is_a_case_and_quantizers_store_both_kinds_of_checkpoints() -> None:
    names = [case.name for case in ALL]
    assert len(names) == len(set(names)) == 3 * (1 + 2 * 2)
    assert "lastrec, default" in names
    assert "h2o, torch-quantized8 layer_inputs" in names


def test_without_any_cuda_there_is_nothing_to_try() -> None:
    case = GradientCase(
        scenario=LASTREC, checkpoints="kv_checkpoints", options=StressOptions(), cuda=Cuda.NONE
    )
    with pytest.raises(WrongUseError, match="need CUDA"):
        case.prepare()


# -- with -m stress: --stress-seeds, --stress-seed, --delay-us ---------------------------------------------


@pytest.fixture(scope="module", params=ALL, ids=lambda case: case.name)
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    """A case, prepared once for all of its seeds."""
    case: Case = request.param
    assert isinstance(case, GradientCase)
    options = StressOptions(delay_us=request.config.getoption("delay_us"))
    prepared = GradientCase(
        scenario=case.scenario, checkpoints=case.checkpoints, options=options, cuda=case.cuda
    ).prepare()
    yield prepared
    prepared.close()


@pytest.mark.stress
def test_nothing_is_wrong_before_anything_is_delayed(trial: Trial) -> None:
    assert not trial.problems, "\n\n".join(failure.what for failure in trial.problems)


@pytest.mark.stress
def test_delays_change_no_bit(trial: Trial, stress_seed: int) -> None:
    failures = trial.run(stress_seed)
    assert not failures, f"seed {stress_seed}: {failures[0].what}"
