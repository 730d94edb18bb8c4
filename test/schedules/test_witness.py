"""Findings and what they lead to: a schedule with a wrong number in it, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import crosscurrent
from crosscurrent.races.detector import Detector
from crosscurrent.races.findings import Finding, RaceKind
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.recording import keep_values
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.schedule import Schedule
from crosscurrent.schedules.witness import Prover, prove

if TYPE_CHECKING:
    from .conftest import Hand

MAIN, SIDE = 1, 2


def record(body: Callable[[], dict[str, Tensor]]) -> tuple[Program, list[Finding]]:
    with crosscurrent.simulate():
        with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
            keeper.name(body())
        return keeper.program(), seen.findings


def told_of(program: Program, findings: Sequence[Finding]) -> tuple[Prover, list[tuple[float, int]]]:
    """Who is going to prove these, and what is told meanwhile: the runs made, and the most there will be."""
    told: list[tuple[float, int]] = []
    prover = Prover(program, told=lambda runs, most: told.append((runs, most)))
    prover.expect(findings)
    return prover, told


def replays(program: Program, finding: Finding) -> tuple[float, int, str]:
    """The runs of a proof, how many it expected at most, and what it came to."""
    prover, told = told_of(program, [finding])
    witness = prover.prove(finding)
    return told[-1][0], told[0][1], str(witness)


def checkpoint_sent_too_early() -> dict[str, Tensor]:
    """A copy to the host that does not wait for the op that makes what it copies."""
    stream, host = torch.cuda.Stream(), torch.zeros(4, pin_memory=True)
    layer = torch.cat([torch.ones(2, device="cuda"), torch.full((2,), 2.0, device="cuda")])
    with torch.cuda.stream(stream):
        host.copy_(layer, non_blocking=True)
    stream.synchronize()
    return {"layers.0.input": host}


@pytest.mark.simulation
def test_a_value_that_was_not_there_yet_is_nan() -> None:
    program, findings = record(checkpoint_sent_too_early)
    (finding,) = prove(program, findings)
    assert finding.kind is RaceKind.READ_AFTER_WRITE
    assert finding.witness == "layers.0.input: 4 of 4 elements changed, all of them NaN"
    assert finding.schedule is not None
    schedule = Schedule.parse(finding.schedule, program)
    outcome = Replayer(program, schedule.reuse).run(schedule.linear)
    assert str(outcome.changes[0]) == finding.witness


@pytest.mark.simulation
def test_the_schedule_of_a_finding_works_on_another_recording() -> None:
    program, findings = record(checkpoint_sent_too_early)
    again, _ = record(checkpoint_sent_too_early)
    (finding,) = prove(program, findings)
    assert finding.schedule is not None
    schedule = Schedule.parse(finding.schedule, again)
    assert not Replayer(again).run(schedule.linear).same


def slot_refilled_while_read() -> dict[str, Tensor]:
    """A prefetch into a slot that the computation still reads."""
    fetch, host = torch.cuda.Stream(), torch.arange(4.0).pin_memory()
    slot = torch.full((4,), 10.0, device="cuda")
    head_gradient = slot * 2
    with torch.cuda.stream(fetch):
        slot.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return {"head.gradient": head_gradient, "slot": slot}


@pytest.mark.simulation
def test_how_far_a_value_is_off_is_said() -> None:
    program, findings = record(slot_refilled_while_read)
    proven = prove(program, findings)
    witnesses = {finding.kind: finding.witness for finding in proven}
    assert "head.gradient: 4 of 4 elements changed, off by up to 20" in str(
        witnesses[RaceKind.WRITE_AFTER_READ]
    )


def memory_reused_while_copied() -> dict[str, Tensor]:
    """A source that is freed, and its memory reused, while the copy runs."""
    stream, host = torch.cuda.Stream(), torch.zeros(4, pin_memory=True)
    source = torch.ones(4, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.copy_(source, non_blocking=True)
    del source
    other = torch.full((4,), 5.0, device="cuda")
    torch.cuda.synchronize()
    return {"host": host, "other": other}


@pytest.mark.simulation
def test_memory_that_is_handed_out_again_is_part_of_the_schedule() -> None:
    program, findings = record(memory_reused_while_copied)
    (finding,) = prove(program, findings)
    assert finding.kind is RaceKind.REUSE
    assert finding.witness == "host: 4 of 4 elements changed, off by up to 4"
    assert finding.schedule is not None
    assert Schedule.parse(finding.schedule, program).reuse


def item_read_too_early() -> dict[str, Tensor]:
    """A count that the host reads from a copy that nobody waited for."""
    count, host = torch.ones(1, device="cuda"), torch.zeros(1, pin_memory=True)
    count.add_(1)
    host.copy_(count, non_blocking=True)
    host.tolist()
    return {}


@pytest.mark.simulation
def test_what_the_host_read_too_early_counts() -> None:
    program, findings = record(item_read_too_early)
    (finding,) = prove(program, findings)
    assert finding.witness is not None
    assert "of the host)" in finding.witness
    assert "off by up to 2" in finding.witness


def index_that_is_not_there_yet() -> dict[str, Tensor]:
    stream = torch.cuda.Stream()
    table = torch.arange(4.0, device="cuda")
    torch.cuda.synchronize()
    index = torch.full((2,), 3, device="cuda")
    with torch.cuda.stream(stream):
        picked = table.index_select(0, index)
    torch.cuda.synchronize()
    return {"picked": picked}


@pytest.mark.simulation
def test_an_op_that_fails_on_garbage_is_a_witness() -> None:
    program, findings = record(index_that_is_not_there_yet)
    (finding,) = prove(program, findings)
    assert finding.witness is not None
    assert "index_select" in finding.witness
    assert "out of range" in finding.witness


def the_same_number_twice() -> dict[str, Tensor]:
    """A race that comes to the same: both write the same values."""
    stream = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    x.fill_(3)
    with torch.cuda.stream(stream):
        x.fill_(3)
    torch.cuda.synchronize()
    return {"x": x}


def overwritten_before_anybody_reads() -> dict[str, Tensor]:
    stream = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    x.fill_(1)
    with torch.cuda.stream(stream):
        x.fill_(2)
    torch.cuda.synchronize()
    x.fill_(3)
    return {"x": x}


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("body", "reason"),
    [(the_same_number_twice, "the same values"), (overwritten_before_anybody_reads, "overwritten")],
)
def test_a_race_that_changes_nothing_is_unproven_with_the_reason(
    body: Callable[[], dict[str, Tensor]], reason: str
) -> None:
    program, findings = record(body)
    (finding,) = prove(program, findings)
    assert finding.schedule is None
    assert finding.witness is not None
    assert finding.witness.startswith("unproven: ")
    assert reason in finding.witness


def test_a_program_that_cannot_be_run_again_leaves_its_findings_unproven(hand: Hand) -> None:
    x = hand.full(MAIN, torch.zeros(64, dtype=torch.float64))
    hand.call(MAIN, "aten::fill_.Scalar", x, 1.0, inplace=True)
    hand.op(SIDE, (x.block, "w"), name="kernel")
    program = hand.program(x=x)
    detector = Detector()
    for entry in program.records:
        detector.feed(entry)
    findings = detector.findings(program.info)[:1]
    prover, told = told_of(program, findings)
    witness = prover.prove(findings[0])
    assert not witness.proven
    assert "kernel" in str(witness)
    assert told[0][1] > 0
    assert told[-1] == (0, 0), "what will not be run is not waited for"


def the_same_number_again_and_again() -> dict[str, Tensor]:
    """One finding for many pairs, and in none of them a value changes."""
    stream = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    for _ in range(40):
        torch.cuda.synchronize()
        x.fill_(3)
        with torch.cuda.stream(stream):
            x.fill_(3)
    torch.cuda.synchronize()
    return {"x": x}


@pytest.mark.simulation
@pytest.mark.parametrize(
    "body",
    [
        checkpoint_sent_too_early,
        slot_refilled_while_read,
        memory_reused_while_copied,
        the_same_number_twice,
        the_same_number_again_and_again,
    ],
)
def test_every_run_is_counted_against_a_bound_that_only_shrinks(
    body: Callable[[], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, findings = record(body)
    runs = 2  # of the first replayer, before its first schedule
    for name in ("run", "left_by"):
        original = getattr(Replayer, name)

        def counted(*arguments: object, original: Callable[..., object] = original) -> object:
            nonlocal runs
            runs += 1
            return original(*arguments)

        monkeypatch.setattr(Replayer, name, counted)
    prover, told = told_of(program, findings)
    assert told[-1][0] == 0
    prover.prove_all(findings)
    bounds = [most for _, most in told]
    assert bounds == sorted(bounds, reverse=True)
    assert told[-1] == (runs, runs)


@pytest.mark.simulation
def test_a_witness_that_is_found_early_leaves_nothing_to_wait_for() -> None:
    program, findings = record(checkpoint_sent_too_early)
    prover, told = told_of(program, findings)
    prover.prove_all(findings)
    assert told[0][1] > 10
    assert told[-1] == (3, 3), "both runs of the replayer, and one schedule"
    binding = [runs for runs, _ in told if 0 < runs < 2]
    assert len(set(binding)) > 1, "in parts, as it goes on"
    assert binding == sorted(binding)


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("body", "num_alike"), [(the_same_number_twice, 0), (the_same_number_again_and_again, 32)]
)
def test_before_the_first_schedule_it_is_known_how_many_others_are_alike(
    body: Callable[[], dict[str, Tensor]], num_alike: int
) -> None:
    program, findings = record(body)
    (finding,) = findings
    assert not finding.also
    prover, told = told_of(program, findings)
    prover.prove(finding)
    before = [most for runs, most in told if runs == 2]
    # The replayer; two directed schedules and eight random ones; two for each pair alike; the reason.
    assert before[-1] == 2 + 2 + 8 + 2 * num_alike + 6


def two_ops_that_race_for_two_values() -> dict[str, Tensor]:
    stream = torch.cuda.Stream()
    x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    x.add_(y)
    with torch.cuda.stream(stream):
        y.copy_(x)
    torch.cuda.synchronize()
    return {"x": x, "y": y}


def two_races_that_one_edge_would_repair() -> dict[str, Tensor]:
    stream = torch.cuda.Stream()
    x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    x.mul_(2)
    y.mul_(2)
    with torch.cuda.stream(stream):
        x.mul_(3)
        y.mul_(3)
    torch.cuda.synchronize()
    return {"x": x, "y": y}


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("body", "num_pairs"), [(two_ops_that_race_for_two_values, 1), (two_races_that_one_edge_would_repair, 2)]
)
def test_the_same_two_ops_are_run_the_other_way_round_but_once(
    body: Callable[[], dict[str, Tensor]], num_pairs: int
) -> None:
    program, findings = record(body)
    (finding,) = findings
    pairs = [(pair.first.index, pair.second.index) for pair in (finding, *finding.also)]
    assert len(set(pairs)) == num_pairs < len(pairs)
    runs, most, witness = replays(program, finding)
    runs_alone, most_alone, witness_alone = replays(program, replace(finding, also=()))
    assert most == num_pairs * most_alone
    assert (runs > runs_alone) is (num_pairs > 1)
    assert witness == witness_alone
    assert witness.startswith("unproven")
