"""Mutants of traces and of the gradient: all are noticed, and what notices them is not blind."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from crosscurrent.gradient.transfer import Lane
from crosscurrent.races.detector import Detector
from crosscurrent.stress.mutations import (
    Kind,
    Mutant,
    Score,
    first_races,
    merged,
    mutated,
    mutations_of,
    mutations_table,
    thinned,
)
from crosscurrent.suite import structure
from crosscurrent.suite.experiment import make_batches, make_model
from crosscurrent.suite.layer import Verdict
from crosscurrent.suite.mutations import (
    Mutations,
    disagreement_with_advice,
    disagreement_with_program,
    edge_mutant,
    edges_of,
    judged,
    recorded,
    sample,
    witness_of,
)
from crosscurrent.suite.recorded import Part, Recording, record, replaced
from crosscurrent.suite.scenario import Scenario, scenarios
from crosscurrent.suite.structure import (
    DOUBLE_BUFFERS,
    ONE_SLOT,
    REUSED_EARLY,
    one_slot,
    structural_mutants,
    unflipped,
)
from crosscurrent.suite.verification import Cuda
from crosscurrent.trace.records import (
    Access,
    Alloc,
    Free,
    HostWait,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    Region,
    Site,
    TraceInfo,
    UseStream,
    WaitEvent,
)
from crosscurrent.trace.records import (
    Lane as TraceLane,
)

LASTREC = Scenario(policy="lastrec", quantizer="default")
INFO = TraceInfo([TraceLane(i, f"lane {i}") for i in range(4)], [Site("program.py", 1, "step")])
MAIN, SIDE, THIRD = 1, 2, 3


class Script:
    """Writes a trace of integers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.events = 0

    def add(self, make: type, *fields: Any) -> None:
        self.records.append(make(len(self.records), *fields))

    def op(self, lane: int, block: int, *, write: bool) -> None:
        self.add(Op, lane, "op", 0, (Access(block, Region(0, 64, 64), write),))

    def alloc(self, block: int, lane: int) -> None:
        self.add(Alloc, block, lane, 512, MemoryKind.DEVICE, 0)

    def record(self, lane: int) -> int:
        self.events += 1
        self.add(RecordEvent, lane, self.events, 0, "record")
        return self.events

    def wait(self, lane: int, event: int) -> None:
        if lane == 0:
            self.add(HostWait, "event", event, (), 0)
        else:
            self.add(WaitEvent, lane, event, 0, "wait_event")


def races(records: list[Record]) -> bool:
    detector = Detector()
    for each in records:
        detector.feed(each)
    return bool(detector.causes)


def hand_over() -> Script:
    """main writes twice, and hands over the second time."""
    script = Script()
    script.alloc(0, MAIN)
    script.op(MAIN, 0, write=True)
    script.record(MAIN)
    script.op(MAIN, 0, write=True)
    script.wait(SIDE, script.record(MAIN))
    script.op(SIDE, 0, write=False)
    return script


# -- one trace by hand ------------------------------------------------------------------------------------


def test_both_ends_of_an_edge_are_changed_in_every_way() -> None:
    mutations = mutations_of(hand_over().records, INFO)
    assert [(each.kind, each.call, each.occurrence, each.lane) for each in mutations] == [
        (Kind.RECORD_DROPPED, "record", 1, None),
        (Kind.RECORDED_ELSEWHERE, "record", 1, SIDE),
        (Kind.EARLY, "record", 1, None),
        (Kind.WAIT_DROPPED, "wait_event", 0, None),
        (Kind.WAITED_ELSEWHERE, "wait_event", 0, MAIN),
    ]


@pytest.mark.parametrize("number", range(5))
def test_each_of_them_is_a_race_and_the_trace_is_not(number: int) -> None:
    records = hand_over().records
    assert not races(records)
    mutation = mutations_of(records, INFO)[number]
    assert races(mutated(records, mutation))
    ((_, cause),) = first_races(records, [mutation])
    assert cause is not None
    assert (cause.first.index, cause.second.index) == (3, 6)


def test_too_early_is_where_the_lane_was_when_it_recorded_less() -> None:
    (early,) = (m for m in mutations_of(hand_over().records, INFO) if m.kind is Kind.EARLY)
    assert (early.earlier, early.previous) == (1, 2)
    changed = mutated(hand_over().records, early)
    assert [each.index for each in changed] == [0, 1, 2, 4, 3, 5, 6]


def test_two_recordings_of_the_same_work_are_one_moment() -> None:
    script = Script()
    script.alloc(0, MAIN)
    script.op(MAIN, 0, write=True)
    script.record(MAIN)
    script.wait(SIDE, script.record(MAIN))
    (early,) = (m for m in mutations_of(script.records, INFO) if m.kind is Kind.EARLY)
    assert (early.earlier, early.previous) == (2, None), "it has to cover less, or it is the same edge"


def test_a_recording_that_nobody_waits_for_is_no_edge() -> None:
    script = Script()
    script.record(MAIN)
    assert mutations_of(script.records, INFO) == []


def test_waits_of_the_host_are_edges_and_what_orders_nothing_is_none() -> None:
    script = Script()
    script.op(MAIN, 0, write=True)
    script.wait(0, script.record(MAIN))
    script.add(HostWait, "allocation", None, (), 0)
    script.add(WaitEvent, SIDE, -1, 0, "wait_event")
    kinds = [each.kind for each in mutations_of(script.records, INFO)]
    assert kinds.count(Kind.WAIT_DROPPED) == 1
    assert Kind.RECORD_DROPPED in kinds


def test_a_redundant_wait_survives() -> None:
    """What nothing needs may go without notice: that is what survivors are to tell."""
    script = hand_over()
    script.wait(SIDE, script.record(MAIN))
    script.op(SIDE, 0, write=False)
    killed = {m.index: cause for m, cause in first_races(script.records, mutations_of(script.records, INFO))}
    assert [index for index, cause in killed.items() if cause is None] == [7, 8]


def test_a_mutation_of_another_trace_is_refused() -> None:
    mutation = mutations_of(hand_over().records, INFO)[-1]
    with pytest.raises(ValueError, match="record 5 is not in this trace"):
        mutated(hand_over().records[:4], mutation)


# -- thinning ---------------------------------------------------------------------------------------------


def at_random(seed: int, *, careful: bool = False) -> list[Record]:
    """A trace in which lanes allocate, use, hand over and free blocks, mostly their own.

    ``careful``: who uses or frees what another lane used last waits for that first.
    """
    draw = Random(seed)
    script = Script()
    last: dict[int, int] = {}

    def use(block: int, lane: int) -> None:
        if careful and last.get(block, lane) != lane:
            script.wait(lane, script.record(last[block]))
        last[block] = lane

    live: dict[int, int] = {}
    events: list[int] = []
    for block in range(draw.randint(20, 90)):
        what = draw.random()
        lane = draw.choice((MAIN, MAIN, MAIN, SIDE, THIRD))
        if what < 0.25 or not live:
            live[block] = last[block] = lane
            script.alloc(block, lane)
        elif what < 0.7:
            used, owner = draw.choice(list(live.items()))
            lane = lane if draw.random() < 0.2 else owner
            use(used, lane)
            script.op(lane, used, write=draw.random() < 0.6)
        elif what < 0.85:
            gone = draw.choice(list(live))
            use(gone, live.pop(gone))
            if draw.random() < 0.3:
                script.add(UseStream, gone, lane, 0)
            script.add(Free, gone, 0)
        elif what < 0.93 or not events:
            events.append(script.record(lane))
        else:
            script.wait(draw.choice((0, MAIN, SIDE, THIRD)), draw.choice(events))
    return script.records


def test_thinning_changes_no_verdict() -> None:
    verdicts = []
    for seed in range(120):
        records = at_random(seed, careful=seed % 2 == 0)
        thin = thinned(records)
        verdicts.append(races(records))
        assert races(thin) == verdicts[-1], f"seed {seed}"
        for mutation in mutations_of(records, INFO):
            expected = races(mutated(records, mutation))
            verdicts.append(expected)
            assert races(mutated(thin, mutation)) == expected, f"seed {seed}, {mutation}"
    # The comparison says something only if both answers come often.
    assert 0.1 < sum(verdicts) / len(verdicts) < 0.9


def test_going_on_from_a_copy_changes_no_verdict() -> None:
    killed = []
    for seed in range(50):
        records = at_random(seed, careful=True)
        if races(records):
            continue
        for mutation, cause in first_races(records, mutations_of(records, INFO)):
            killed.append(cause is not None)
            assert races(mutated(records, mutation)) == killed[-1], f"seed {seed}, {mutation}"
    assert 0.1 < sum(killed) / len(killed) < 0.9


def test_thinning_leaves_out_what_one_lane_does_for_itself() -> None:
    script = hand_over()
    for block in range(1, 50):
        script.alloc(block, MAIN)
        for _ in range(5):
            script.op(MAIN, block, write=True)
        script.add(Free, block, 0)
    assert len(thinned(script.records)) < len(hand_over().records) + 20


# -- the score --------------------------------------------------------------------------------------------


def mutant(what: str, killed_by: str, reason: str = "") -> Mutant:
    return Mutant(kind="wait dropped", place="in the loop", what=what, killed_by=killed_by, reason=reason)


def test_survivors_are_told_with_their_reasons() -> None:
    score = merged(
        [Score(mutants=(mutant("a", "the detector"),)), Score(mutants=(mutant("b[0]", "", "redundant"),))]
    )
    assert str(score) == "1 of 2 mutants killed (50.0%)"
    told = score.as_json()
    assert (told["mutants"], told["killed"]) == (2, 1)
    assert told["by_kind_and_place"] == [
        {"kind": "wait dropped", "place": "in the loop", "killed": 1, "mutants": 2}
    ]
    assert [(each["what"], each["reason"]) for each in told["survivors"]] == [("b[0]", "redundant")]
    table = mutations_table(score)
    assert table.row_count == 2


# -- the gradient -----------------------------------------------------------------------------------------


def short(num_tokens: int = 40) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids, targets = make_batches()[0]
    return [(ids[:, :num_tokens], targets[:, : num_tokens - 3])]


@pytest.fixture(scope="module")
def recording() -> Recording:
    with Cuda.available().context():
        return recorded(LASTREC, short(), keep=True)


def test_every_sync_edge_of_the_gradient_is_needed(recording: Recording) -> None:
    edges = judged(recording)
    mutants = [edge_mutant(recording, *each) for each in edges]
    assert Score(mutants=tuple(mutants)).survivors == ()
    assert disagreement_with_advice(recording, edges) == ""
    assert {each.kind for each in mutants} == {kind.value for kind in Kind}
    places = {each.place for each in mutants}
    if torch.cuda.is_available():
        # Whether an upload finds a buffer whose copy is done, and asks for its event, is a matter of time.
        places.add(Part.UPLOAD.value)
    assert places == {part.value for part in Part}
    assert all(each.killed_by.startswith("the detector: ") for each in mutants)


def test_on_the_gradient_thinning_changes_no_verdict(recording: Recording) -> None:
    records = list(recording.seen.records)
    thin = thinned(records)
    assert len(thin) < len(records) / 2
    edges = judged(recording)
    for mutation, cause in edges[:: len(edges) // 8]:
        assert races(mutated(records, mutation)) == (cause is not None)


def test_a_mutant_of_each_kind_changes_gradients_in_some_schedule(recording: Recording) -> None:
    edges = edges_of(recording)
    of_each_kind = {each.kind: each for each in sample(edges, len(edges))}
    assert of_each_kind.keys() == set(Kind)
    for mutation in of_each_kind.values():
        witness = witness_of(recording, mutation)
        assert witness.proven, f"{mutation}: {witness.unproven}"
        assert any(change.name.startswith("batch 1 ") for change in witness.changes), str(mutation)


@pytest.mark.usefixtures("_cuda")
def test_a_lane_that_waits_too_often_has_survivors() -> None:
    """The gradient as it would be if its lanes did not leave out waits that add nothing."""

    def always(before: Any) -> Any:
        def behind(lane: Lane, moment: Any) -> Any:
            event = before(lane, moment)
            return moment.event if event is None and moment is not None and moment.lane != lane._id else event

        return behind

    with replaced((Lane, "behind", always)):
        wasteful = recorded(LASTREC, short())
    edges = judged(wasteful)
    assert not wasteful.seen.findings
    survivors = [edge_mutant(wasteful, *each) for each in edges if each[1] is None]
    assert any(each.kind == Kind.WAIT_DROPPED.value and "redundant" in each.reason for each in survivors)
    assert disagreement_with_advice(wasteful, edges) == ""


@pytest.mark.usefixtures("_cuda")
def test_a_mutated_program_has_the_findings_of_the_mutated_trace(recording: Recording) -> None:
    edges = edges_of(recording)
    of_each_kind = {each.kind: each for each in sample(edges, len(edges))}
    assert of_each_kind.keys() == set(Kind)
    for mutation in of_each_kind.values():
        assert disagreement_with_program(recording, LASTREC, mutation, short()) == ""


@pytest.mark.usefixtures("_cuda")
def test_another_mutant_disagrees(recording: Recording) -> None:
    """The bad twin: the program's mutant is not the trace's."""
    waits = [each for each in edges_of(recording) if each.kind is Kind.WAIT_DROPPED]
    one = next(each for each in waits if each.site.function == "Incoming.receive")
    other = next(each for each in waits if each.site.function == "Outgoing.send")
    said = disagreement_with_program(recording, LASTREC, replace(one, site=other.site), short())
    assert "the program has the findings" in said


def test_a_sample_takes_every_kind_and_place_before_any_twice(recording: Recording) -> None:
    edges = edges_of(recording)
    groups = {(each.kind, each.site.line, each.place) for each in edges if each.occurrence}
    chosen = sample(edges, len(groups))
    assert {(each.kind, each.site.line, each.place) for each in chosen} == groups
    assert sample(edges, 3) == sample(edges, 3)
    assert len(sample(edges, 3)) == 3


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("number", [0, 2], ids=lambda number: DOUBLE_BUFFERS[number])
def test_one_slot_is_noticed(number: int) -> None:
    """One that leaves, which is right and only slow, and one that comes in, which is wrong."""
    with unflipped() as twice, one_slot(number):
        record(make_model(LASTREC), short())
    assert twice


@pytest.mark.usefixtures("_cuda")
def test_two_slots_flip() -> None:
    with unflipped() as twice:
        record(make_model(LASTREC), short())
    assert twice == []


@pytest.mark.usefixtures("_cuda")
def test_mutants_of_buffers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them; all under the stress marker."""
    pairs = structure._pairs
    monkeypatch.setattr(structure, "_pairs", lambda sizes: pairs(sizes)[::7])
    monkeypatch.setattr(structure, "DOUBLE_BUFFERS", DOUBLE_BUFFERS)
    mutants = list(structural_mutants(LASTREC))
    assert Score(mutants=tuple(mutants)).survivors == ()
    assert [each.kind for each in mutants].count(ONE_SLOT) == len(DOUBLE_BUFFERS)
    assert [each.kind for each in mutants].count(REUSED_EARLY) >= 2


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("bad", [-0.0, torch.nan])
def test_a_mutant_of_which_a_zero_changes_its_sign_or_of_which_both_runs_are_nan_is_noticed(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = "batch 1 loss"
    monkeypatch.setattr(structure, "steps", lambda *_: {named: torch.tensor([bad])})
    expected = {named: torch.tensor([bad if bad else 0.0])}
    assert structure._judged(make_model(LASTREC), expected).startswith(f"the values: {named}: ")


@pytest.mark.usefixtures("_cuda")
def test_every_pinned_buffer_is_in_some_pair() -> None:
    sizes = make_model(LASTREC)._make_format(2, 50).sizes()
    assert {key for pair in structure._pairs(sizes) for key in pair} == sizes.keys()


@pytest.mark.stress
@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("scenario", scenarios(everything=True), ids=lambda scenario: scenario.name)
def test_the_layer_holds(scenario: Scenario) -> None:
    outcome = Mutations().check(scenario)
    assert outcome.verdict is Verdict.HELD, outcome.detail


@pytest.mark.stress
@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("scenario", scenarios(), ids=lambda scenario: scenario.name)
def test_every_kind_of_mutated_program_agrees_everywhere(scenario: Scenario) -> None:
    recording = recorded(scenario)
    edges = edges_of(recording)
    groups = {(each.kind, each.site.line, each.place) for each in edges if each.occurrence}
    for mutation in sample(edges, len(groups)):
        assert disagreement_with_program(recording, scenario, mutation) == ""
