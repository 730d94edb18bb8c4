"""The history layer: the races of the past, brought back one by one, do not get past the verifier.

And the code as it is, put to the same three tests, passes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from crosscurrent.bits import deterministic
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.races.findings import Finding
from crosscurrent.schedules import Prover, RandomWalk, explore
from crosscurrent.schedules.strategies import LatestAndEarliest
from crosscurrent.schedules.values import What
from crosscurrent.stress.delays import delays
from crosscurrent.stress.history import PAST_RACES, HistoryEvidence, PastRace, Shown
from crosscurrent.stress.lanes import roles_in
from crosscurrent.stress.plans import DelayConfig, How, Target
from crosscurrent.suite.experiment import differences, make_batches, make_model
from crosscurrent.suite.layer import Outcome
from crosscurrent.suite.recorded import (
    Batches,
    Part,
    Recording,
    on_gpu,
    on_host,
    racy,
    record,
    replaced,
    steps,
)
from crosscurrent.suite.scenario import Scenario
from crosscurrent.suite.variants import VARIANTS

NUM_TOKENS = 46
"""Tokens of each batch: four columns, so that each double buffer goes round."""

_FORWARD = frozenset({Part.FORWARD})
_BACKWARD = frozenset(Part) - {Part.UPLOAD, Part.FORWARD}

WHERE: Mapping[str, tuple[frozenset[Part], frozenset[Part]]] = {
    "layer-input-sent-early": (_FORWARD, _FORWARD),
    "embedding-sent-early": (_FORWARD, _FORWARD),
    "checkpoint-read-while-written": (_FORWARD, _BACKWARD),
    "row-start-without-main": (_BACKWARD, _BACKWARD),
    "slot-refilled-early": (frozenset({Part.LOOP}), frozenset({Part.LOOP})),
    "head-gradient-sent-early": (frozenset({Part.LOOP}), frozenset({Part.LOOP})),
    "source-freed-while-copied": (_FORWARD, _FORWARD),
    "scratch-shared": (_BACKWARD, _BACKWARD),
    "head-gradient-overwritten": (_BACKWARD, _BACKWARD),
    "last-write-not-awaited": (_BACKWARD, _BACKWARD),
    "second-batch-only": (frozenset({Part.UPLOAD}), frozenset({Part.UPLOAD})),
}
"""By race: the parts of a step that its two accesses are from."""

NEEDS_SCRATCH = "scratch-shared"
NEEDS_TWO_BATCHES = "second-batch-only"
NUM_TOKENS_AHEAD = 16
"""Tokens of each of these two batches: one column, since the host has to issue all of the first before its
first copy runs, and may be ahead of a stream by about a thousand launches."""

DELAY_US = 100_000.0
"""Longer than the host takes to issue a cell, even on a slow machine."""
DELAY_OF_A_BATCH_US = 1_500_000.0
"""Longer than it takes to issue a batch."""


@dataclass(frozen=True)
class History:
    """Each race of the past, detected and witnessed; on a real GPU shown by a delay, too."""

    name: str = "history"
    claim: str = (
        "each race of the past, brought back, is named by the detector and gives other gradients in some "
        "schedule; the code as it is passes the same tests"
    )
    needs_cuda: bool = True
    needs_quiet: bool = True

    def takes(self, scenario: Scenario) -> bool:
        """Without graphs, since these races are between copies and what is issued beside them; and where
        racy code can be run in this scenario itself."""
        return not scenario.graphs and racy(scenario) == scenario

    def check(self, scenario: Scenario) -> Outcome:
        """Show all of them."""
        return judge(list(history(scenario)))


def judge(shown: Sequence[Shown]) -> Outcome:
    """Held if every race showed, and none in the code as it is."""
    evidence = HistoryEvidence(tuple(shown))
    wrong = [each for each in shown if not each.as_expected]
    if wrong:
        return Outcome.failed("; ".join(_complaint(each) for each in wrong), evidence)
    races = sum(each.race is not None for each in shown)
    ways = "named, witnessed and shown by a delay" if shown[0].delayed is not None else "named and witnessed"
    return Outcome.held(f"{races} races of the past {ways}; none in the code as it is", evidence)


def history(scenario: Scenario, races: Sequence[PastRace] = PAST_RACES) -> Iterator[Shown]:
    """What becomes of each race, and at last of the code as it is. ``torch.cuda`` has to work."""
    delayed_at: dict[Target, PastRace] = {}
    for race in races:
        recording, finding = detected(race, scenario)
        witness = ""
        delayed = "" if on_gpu() else None
        if finding is not None:
            witness = witnessed(recording, finding)
            if delayed is not None:
                target = Target.of(finding)
                delayed_at[target] = max(race, delayed_at.get(target, race), key=_delay)
                delayed = under_delay(race, scenario, target)
        yield Shown(
            race=race,
            finding="" if finding is None else str(finding),
            witness=witness,
            delayed=delayed,
        )
    yield _unchanged(scenario, delayed_at)


def detected(race: PastRace, scenario: Scenario) -> tuple[Recording, Finding | None]:
    """A run with the race, and the finding that names it."""
    with VARIANTS[race.name]():
        recording = record(model_for(race, scenario), batches_for(race), keep=True)
    roles = roles_in(recording.seen.records, recording.seen.lanes)
    finding = race.pair_in(recording.seen.findings, roles)
    if finding is not None:
        sides = zip((finding.first, finding.second), WHERE[race.name], strict=True)
        if any(recording.parts.of(side.index) not in parts for side, parts in sides):
            finding = None
    return recording, finding


def witnessed(recording: Recording, finding: Finding) -> str:
    """What the schedule that reverses a finding changes: only losses and gradients count."""
    assert recording.program is not None
    witness = Prover(recording.program).prove(finding)
    if witness.failure is not None:
        return str(witness)
    named = [str(change) for change in witness.changes if change.what is What.VALUE]
    return "\n".join(named)


def under_delay(race: PastRace, scenario: Scenario, target: Target, *, changed: bool = True) -> str:
    """On a real GPU: what differs from the flag off when an op is delayed; empty if nothing does.

    Not ``changed``: the same test of the code as it is.
    """
    batches = batches_for(race)
    torch.cuda.synchronize()
    with deterministic():
        off = on_host(steps(model_for(race, scenario, flag=False), batches))
        model = model_for(race, scenario)
        torch.cuda.synchronize()
        variant = VARIANTS[race.name] if changed else replaced
        plan = DelayConfig(how=How.DIRECTED, target=target, delay_us=_delay(race))
        with variant(), delays(plan) as delayed:
            on = steps(model, batches)
        on = on_host(on)
    # A racy run leaves copies behind that nobody waits for, and its memory goes to the next run.
    torch.cuda.synchronize()
    if not delayed.num_delayed and changed:
        return ""
    return "".join(differences(off, on)[:1])


def _unchanged(scenario: Scenario, delayed_at: Mapping[Target, PastRace]) -> Shown:
    recording = record(make_model(scenario), two_batches(), keep=True)
    assert recording.program is not None
    findings = "\n".join(map(str, recording.seen.findings))
    found = explore(recording.program, [LatestAndEarliest(), RandomWalk(count=2)])
    delayed = "" if on_gpu() else None
    for target, race in delayed_at.items():
        delayed = delayed or under_delay(race, scenario, target, changed=False)
    return Shown(
        race=None,
        finding=findings,
        witness="\n".join(map(str, found.differences)),
        delayed=delayed,
    )


def model_for(race: PastRace, scenario: Scenario, *, flag: bool = True) -> LongContextGradientModel:
    """The model of a scenario, in which a race can show."""
    # Of the quantizers, that of 4 bits uses its scratch both ways.
    if race.name == NEEDS_SCRATCH:
        scenario = replace(scenario, quantizer="torch-quantized4")
    return make_model(scenario, flag=flag)


def two_batches(num_tokens: int = NUM_TOKENS) -> Batches:
    """The beginnings of the suite's batches."""
    return [(ids[:, :num_tokens], targets[:, : num_tokens - 3]) for ids, targets in make_batches()]


def batches_for(race: PastRace) -> Batches:
    """What a race needs to show."""
    return two_batches(NUM_TOKENS_AHEAD) if race.name == NEEDS_TWO_BATCHES else two_batches()[:1]


def _delay(race: PastRace) -> float:
    return DELAY_OF_A_BATCH_US if race.name == NEEDS_TWO_BATCHES else DELAY_US


def _complaint(shown: Shown) -> str:
    if shown.race is None:
        said = next(text for text in (shown.finding, shown.witness, shown.delayed) if text)
        return f"the code as it is: {said}"
    ways = {"not detected": shown.finding, "not witnessed": shown.witness, "not delayed": shown.delayed}
    missing = [what for what, text in ways.items() if text == ""]
    return f"{shown.race.number} {shown.race.name}: {', '.join(missing)}"
