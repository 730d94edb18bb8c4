"""Schedules as strings: short, exact, and refused for a reason."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from crosscurrent.schedules import run_schedule
from crosscurrent.schedules.errors import DamagedError, ProgramMismatchError, ReplayError, VersionError
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.reuse import Reuse
from crosscurrent.schedules.schedule import VERSION, Schedule, from_ranks, ranks
from crosscurrent.schedules.strategies import from_recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Hand

MAIN, SIDE = 1, 2


@pytest.fixture
def program(hand: Hand) -> Program:
    return write(hand, 6)


def write(hand: Hand, steps: int) -> Program:
    x = hand.full(MAIN, torch.zeros(2, dtype=torch.float64))
    for i in range(steps):
        hand.call(MAIN, "aten::add_.Scalar", x, i, 1, inplace=True)
        hand.call(SIDE, "aten::mul_.Scalar", x, 2.0, inplace=True)
    hand.free(x.block)
    y = hand.empty(MAIN, 2)
    hand.call(MAIN, "aten::fill_.Scalar", y, 1.0, inplace=True)
    return hand.program()


def test_a_schedule_reads_back_as_itself(program: Program) -> None:
    for seed in range(20):
        linear = from_recipe(program.order(), f"random.{seed}")
        for recipe in ("", f"random.{seed}"):
            for reuse in ((), (Reuse(1, 0),)):
                # The allocator holds back nothing here, so that the order is the same with and without reuse.
                schedule = Schedule(program=program.fingerprint, linear=linear, reuse=reuse, recipe=recipe)
                assert Schedule.parse(str(schedule), program) == schedule


def test_ranks_are_a_code_of_orders() -> None:
    draw = Random(3)
    for length in range(12):
        linear = list(range(length))
        draw.shuffle(linear)
        assert from_ranks(ranks(linear), length) == tuple(linear)


def test_an_order_close_to_the_programs_is_short(new_hand: Callable[[], Hand]) -> None:
    program = write(new_hand(), 1000)
    length = len(program.order())
    linear = (*range(500), *range(501, 900), 500, *range(900, length))
    text = str(Schedule(program=program.fingerprint, linear=linear))
    assert len(text) < 50
    assert from_ranks(ranks(linear), length) == linear


def test_the_string_needs_no_quoting(program: Program) -> None:
    schedule = Schedule(
        program=program.fingerprint, linear=from_recipe(program.order(), "random.5"), reuse=(Reuse(1, 0),)
    )
    assert set(str(schedule)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:._=+-,")


def test_a_changed_letter_is_noticed(program: Program) -> None:
    text = str(Schedule(program=program.fingerprint, linear=program.order().program, recipe="program"))
    for at in range(len(VERSION), len(text)):
        changed = text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :]
        with pytest.raises((DamagedError, VersionError)):
            Schedule.parse(changed, program)
    for cut in (0, 1, 5, len(text) - 1):
        with pytest.raises(DamagedError):
            Schedule.parse(text[:cut], program)


def test_another_version_is_named(program: Program) -> None:
    text = str(Schedule(program=program.fingerprint, linear=program.order().program, recipe="program"))
    with pytest.raises(VersionError, match=r"'cc9'.*'cc1'"):
        Schedule.parse("cc9" + text[3:], program)


def test_another_program_is_named(program: Program, new_hand: Callable[[], Hand]) -> None:
    other = write(new_hand(), 5)
    text = str(Schedule(program=other.fingerprint, linear=other.order().program, recipe="program"))
    with pytest.raises(ProgramMismatchError, match=f"{other.fingerprint}.*{program.fingerprint}"):
        Schedule.parse(text, program)


def test_values_and_source_lines_do_not_make_another_program(program: Program) -> None:
    moved = [record._replace(site=9) for record in program.records]
    assert (
        Program(records=tuple(moved), info=program.info, buffers={}, actions={}).fingerprint
        == program.fingerprint
    )


def test_the_order_in_which_a_function_frees_its_variables_makes_no_other_program(
    new_hand: Callable[[], Hand],
) -> None:
    """That differs between versions of Python."""
    up, down = new_hand(), new_hand()
    for hand in (up, down):
        x, y = hand.full(MAIN, torch.zeros(2)), hand.full(MAIN, torch.ones(2))
        for view in (x, y) if hand is up else (y, x):
            hand.free(view.block)
    assert up.program().records != down.program().records
    assert up.program().fingerprint == down.program().fingerprint


def test_a_free_before_or_after_an_op_makes_another_program(new_hand: Callable[[], Hand]) -> None:
    early, late = new_hand(), new_hand()
    for hand in (early, late):
        x, y = hand.full(MAIN, torch.zeros(2)), hand.full(MAIN, torch.ones(2))
        if hand is early:
            hand.free(x.block)
        hand.call(SIDE, "aten::zero_", y, inplace=True)
        if hand is late:
            hand.free(x.block)
        hand.free(y.block)
    assert early.program().fingerprint != late.program().fingerprint


def test_a_wait_more_or_less_makes_another_program(new_hand: Callable[[], Hand]) -> None:
    with_wait, without = new_hand(), new_hand()
    for hand in (with_wait, without):
        x = hand.full(MAIN, torch.zeros(2))
        hand.call(MAIN, "aten::zero_", x, inplace=True)
        if hand is with_wait:
            hand.edge(MAIN, SIDE)
        hand.call(SIDE, "aten::zero_", x, inplace=True)
    assert with_wait.program().fingerprint != without.program().fingerprint


@pytest.mark.parametrize(
    ("linear", "reuse"),
    [
        ((1, 0, *range(2, 13)), (Reuse(0, 1),)),
        ((1, 0, *range(2, 13)), (Reuse(1, 0, 7),)),
        ((1, 0, *range(2, 13)), (Reuse(1, 5),)),
        ((2, 0, 1, *range(3, 13)), ()),
    ],
)
def test_what_cannot_have_been_is_refused(
    program: Program, linear: tuple[int, ...], reuse: tuple[Reuse, ...]
) -> None:
    text = str(Schedule(program=program.fingerprint, linear=linear, reuse=reuse))
    with pytest.raises(DamagedError):
        Schedule.parse(text, program)


def test_a_string_is_all_that_it_takes_to_see_the_values_again(program: Program) -> None:
    linear = from_recipe(program.order(), "random.3")
    text = str(Schedule(program=program.fingerprint, linear=linear, recipe="random.3"))
    assert run_schedule(program, text) == Replayer(program).run(linear)
    assert not run_schedule(program, text).same
    with pytest.raises(ReplayError):
        run_schedule(program, text[:-1])
