"""The races of the past: each would be caught today, three ways, and the code as it is has none of them."""

from __future__ import annotations

import pytest
import torch

from crosscurrent.stress.delays import Delays, delays
from crosscurrent.stress.history import PAST_RACES, PastRace, Shown, history_table
from crosscurrent.stress.lanes import roles_in
from crosscurrent.stress.plans import DelayConfig, How, Target
from crosscurrent.suite.experiment import differences, make_model
from crosscurrent.suite.history import (
    WHERE,
    History,
    batches_for,
    detected,
    history,
    judge,
    model_for,
    under_delay,
    witnessed,
)
from crosscurrent.suite.layer import Verdict
from crosscurrent.suite.recorded import on_host, record, steps
from crosscurrent.suite.scenario import Scenario, scenarios
from crosscurrent.suite.variants import VARIANTS

LASTREC = Scenario(policy="lastrec", quantizer="default")
BY_NAME = {race.name: race for race in PAST_RACES}

pytestmark = pytest.mark.usefixtures("_cuda")


def test_all_eleven_are_told_in_order() -> None:
    assert [race.number for race in PAST_RACES] == list(range(1, 12))
    assert list(VARIANTS) == list(WHERE) == [race.name for race in PAST_RACES]


@pytest.mark.parametrize("race", PAST_RACES, ids=lambda race: race.name)
def test_a_race_of_the_past_is_named_and_witnessed(race: PastRace) -> None:
    recording, finding = detected(race, LASTREC)
    assert finding is not None, [str(each) for each in recording.seen.findings]
    assert (finding.kind, finding.memory) == (race.kind, race.memory)
    # In program order it is right, to the bit: it is the order alone that is wrong.
    off = on_host(steps(model_for(race, LASTREC, flag=False), batches_for(race)))
    assert differences(off, recording.values) == []
    said = witnessed(recording, finding)
    # In the gradient's own names, or as its loss.
    assert "batch 1 " in said
    assert ".grad: " in said or "loss: " in said


def _tokens() -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.arange(2 * 30).reshape(2, 30) % 48
    return [(ids, ids[:, 3:])]


def test_one_race_is_not_taken_for_another() -> None:
    """A refilled slot is in the loop, and main's to wait for: neither 4's place nor 9's pair."""
    recording, finding = detected(BY_NAME["slot-refilled-early"], LASTREC)
    assert finding is not None
    roles = roles_in(recording.seen.records, recording.seen.lanes)
    same_pair = [race.number for race in PAST_RACES if race.pair_in(recording.seen.findings, roles)]
    assert same_pair == [4, 5]
    first, _ = WHERE["last-write-not-awaited"]
    assert recording.parts.of(finding.first.index) in first


def test_the_last_one_needs_two_batches() -> None:
    with VARIANTS["second-batch-only"]():
        first = record(make_model(LASTREC), _tokens())
        both = record(make_model(LASTREC), _tokens() * 2)
    assert not first.seen.findings
    assert both.seen.findings


def test_a_schedule_of_the_code_as_it_is_changes_nothing() -> None:
    (shown,) = history(LASTREC, [])
    assert shown.race is None
    assert (shown.finding, shown.witness) == ("", "")
    assert judge([shown]).verdict is Verdict.HELD


def test_what_is_not_shown_fails() -> None:
    race = PAST_RACES[0]
    good = [Shown(race=race, finding="named", witness="changed"), Shown(race=None)]
    assert judge(good).verdict is Verdict.HELD
    for bad, said in (
        (Shown(race=race, finding="", witness="changed"), "not detected"),
        (Shown(race=race, finding="named", witness=""), "not witnessed"),
        (Shown(race=race, finding="named", witness="changed", delayed=""), "not delayed"),
        (Shown(race=None, finding="a race"), "the code as it is: a race"),
        (Shown(race=None, witness="a change"), "the code as it is: a change"),
        (Shown(race=None, delayed="a difference"), "the code as it is: a difference"),
    ):
        outcome = judge([*good, bad])
        assert outcome.verdict is Verdict.FAILED
        assert said in outcome.detail


def test_the_table_and_the_json_tell_all() -> None:
    race = PAST_RACES[0]
    shown = [Shown(race=race, finding="named [raw-1]", witness="changed"), Shown(race=None)]
    assert history_table(shown).row_count == 2
    evidence = judge(shown).evidence
    assert evidence is not None
    assert evidence.as_json() == [
        {
            "number": 1,
            "name": "layer-input-sent-early",
            "as_expected": True,
            "finding": "named [raw-1]",
            "witness": "changed",
            "delayed": None,
        },
        {
            "number": None,
            "name": "unchanged",
            "as_expected": True,
            "finding": "",
            "witness": "",
            "delayed": None,
        },
    ]


def test_the_delay_meets_its_target() -> None:
    """On simulated CUDA a delay changes no value; what is delayed is the same there as on a GPU."""
    race = BY_NAME["head-gradient-sent-early"]
    _, finding = detected(race, LASTREC)
    assert finding is not None
    config = DelayConfig(how=How.DIRECTED, target=Target.of(finding), delay_us=1.0)
    with delays(config) as delayed:
        steps(make_model(LASTREC), _tokens())
    # Of about a thousand ops, those that leave from that call: a copy for each checkpoint.
    assert 0 < delayed.num_delayed < delayed.num_ops / 50


def test_the_code_as_it_is_stands_a_delay(made: list[Delays]) -> None:
    race = BY_NAME["slot-refilled-early"]
    _, finding = detected(race, LASTREC)
    assert finding is not None
    assert under_delay(race, LASTREC, Target.of(finding), changed=False) == ""
    assert [delayed.num_delayed > 0 for delayed in made] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("race", PAST_RACES, ids=lambda race: race.name)
def test_a_directed_delay_shows_the_race_on_a_gpu(race: PastRace) -> None:
    _, finding = detected(race, LASTREC)
    assert finding is not None
    target = Target.of(finding)
    assert under_delay(race, LASTREC, target) != ""
    assert under_delay(race, LASTREC, target, changed=False) == ""


@pytest.mark.stress
@pytest.mark.parametrize(
    "scenario", [*filter(History().takes, scenarios(everything=True))], ids=lambda scenario: scenario.name
)
def test_the_layer_holds(scenario: Scenario) -> None:
    outcome = History().check(scenario)
    assert outcome.verdict is Verdict.HELD, outcome.detail
