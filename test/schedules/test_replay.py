"""Running programs again that are written by hand: values, poison, reuse, and what is compared."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from crosscurrent.schedules import replay
from crosscurrent.schedules.errors import NotReplayableError
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.reuse import Reuse
from crosscurrent.schedules.strategies import Directed, Exhaustive
from crosscurrent.schedules.values import What

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Hand

MAIN, SIDE = 1, 2


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64)


def read_too_early(hand: Hand, *, fixed: bool) -> Replayer:
    x = hand.full(MAIN, ones(4))
    y, z = hand.empty(MAIN, 4), hand.empty(SIDE, 4)
    hand.call(MAIN, "aten::mul.Tensor", x, 3.0, out=y)
    if fixed:
        hand.edge(MAIN, SIDE)
    hand.call(SIDE, "aten::add.Tensor", y, 1.0, out=z)
    return Replayer(hand.program(z=z))


def test_a_value_read_too_early_is_nan(hand: Hand) -> None:
    replayer = read_too_early(hand, fixed=False)
    assert replayer.run((0, 1)).same
    outcome = replayer.run((1, 0))
    assert not outcome.same
    change = outcome.changes[0]
    assert (change.name, change.what, change.elements, change.nan) == ("z", What.VALUE, 4, 4)
    assert replayer.run((0, 1)).same


def test_a_value_read_in_time_has_one_schedule(hand: Hand) -> None:
    replayer = read_too_early(hand, fixed=True)
    assert [proposal.linear for proposal in Exhaustive().proposals(replayer.space)] == [(0, 1)]
    assert replayer.run((0, 1)).same
    assert replayer.final(replayer.program.names["z"]).tolist() == [4.0] * 4


def test_integers_that_were_never_written_are_garbage(hand: Hand) -> None:
    y = hand.empty(MAIN, 2, dtype=torch.int32)
    hand.call(MAIN, "aten::fill_.Scalar", y, 1, inplace=True)
    hand.read(SIDE, y, "seen")
    replayer = Replayer(hand.program())
    outcome = replayer.run((1, 0))
    assert [str(change) for change in outcome.changes] == [
        f"seen: 2 of 2 elements changed, off by up to {0x5A5A5A5A - 1:.6g}"
    ]


def test_an_op_that_cannot_run_on_garbage_is_a_failure_of_the_schedule(hand: Hand) -> None:
    table = hand.full(MAIN, torch.arange(3, dtype=torch.float64))
    index, picked = hand.empty(MAIN, 2, dtype=torch.int64), hand.empty(SIDE, 2)
    hand.call(MAIN, "aten::fill_.Scalar", index, 1, inplace=True)
    hand.call(SIDE, "aten::index_select", table, 0, index, out=picked)
    outcome = Replayer(hand.program()).run((1, 0))
    assert not outcome.same
    assert outcome.failure is not None
    assert "out of range" in str(outcome.failure)


def test_what_the_host_read_counts(hand: Hand) -> None:
    x = hand.full(MAIN, ones(1))
    hand.call(MAIN, "aten::mul.Tensor", x, 5.0, inplace=False, out=x)
    hand.read(SIDE, x, "item at train.py:3")
    outcome = Replayer(hand.program()).run((1, 0))
    assert [(change.name, change.what, change.distance) for change in outcome.changes] == [
        ("item at train.py:3", What.HOST_READ, 4.0)
    ]


def test_every_byte_of_a_block_counts(hand: Hand) -> None:
    """Also those that its widest view, here that of the even elements, leaves out."""
    x = hand.full(MAIN, torch.arange(8, dtype=torch.int64))
    even, odd = x._replace(shape=(4,), strides=(2,)), x._replace(shape=(4,), strides=(2,), offset=1)
    hand.update(MAIN, even)
    hand.update(MAIN, odd)
    hand.update(SIDE, odd)
    replayer = Replayer(hand.program())
    assert [change.elements for change in replayer.run((0, 2, 1)).changes] == [4]
    assert replayer.run((2, 0, 1)).changes == replayer.run((0, 2, 1)).changes


def test_binding_tells_how_far_it_is(hand: Hand) -> None:
    """In steps as large as the work: an op with much memory is a large one, one with little is one, too."""
    small, large = hand.full(MAIN, ones(4)), hand.full(MAIN, ones(1 << 15))
    for view in (small, large, small):
        hand.update(MAIN, view)
    told: list[tuple[float, int]] = []
    replayer = Replayer(hand.program(), told=lambda done, most: told.append((done, most)))
    most = told[0][1]
    assert {each for _, each in told} == {most}
    assert (told[0][0], told[-1][0]) == (0, most)
    steps = [done - before for (before, _), (done, _) in pairwise(told)]
    before, one, two, three, after = filter(None, steps)
    assert before == after > 0
    assert two > one == three > 0
    (accessed,) = {access.region.stop for access in replayer.order.ops[1].accesses}
    assert two - one == len(replayer.order.ops[1].accesses) * (accessed - small.numel * 8)


def test_binding_nothing_is_told_as_well(hand: Hand) -> None:
    shares: list[float] = []
    Replayer(hand.program(), told=lambda done, most: shares.append(done / most))
    assert (shares[0], shares[-1]) == (0, 1)


def test_the_binding_of_many_ops_is_not_told_for_each(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_TELLINGS", 5)
    x = hand.full(MAIN, ones(4))
    for _ in range(22):
        hand.update(MAIN, x)
    told: list[float] = []
    Replayer(hand.program(), told=lambda done, _: told.append(done))
    start, *ops, stop = (after - before for before, after in pairwise(told))
    assert start == stop
    op = ops[-1] / 2
    assert ops == [5 * op] * 4 + [2 * op], "a fifth or more each time, and what is left"


def refilled_while_read(hand: Hand, *, told: bool) -> tuple[Replayer, Replayer]:
    source, other = hand.full(MAIN, ones(4)), hand.full(MAIN, 7 * ones(4))
    a = hand.empty(MAIN, 4)
    y = hand.empty(SIDE, 4)
    hand.call(MAIN, "aten::clone", source, out=a)
    hand.edge(MAIN, SIDE)
    hand.call(SIDE, "aten::mul.Tensor", a, 10.0, out=y)
    if told:
        hand.use(a.block, SIDE)
    hand.free(a.block)
    b = hand.empty(MAIN, 4)
    hand.call(MAIN, "aten::clone", other, out=b)
    program = hand.program(y=y)
    return Replayer(program), Replayer(program, [Reuse(b.block, a.block)])


def test_memory_that_is_reused_too_early_changes_what_is_read(hand: Hand) -> None:
    fresh, reused = refilled_while_read(hand, told=False)
    linear = next(Directed(first=1, second=2).proposals(reused.space)).linear
    assert fresh.run(linear).same
    outcome = reused.run(linear)
    assert [(change.name, change.distance) for change in outcome.changes] == [("y", 60.0)]


def test_record_stream_keeps_the_memory(hand: Hand) -> None:
    fresh, reused = refilled_while_read(hand, told=True)
    assert reused.order.before(1, 2)
    assert all(reused.run(p.linear).same for p in Exhaustive().proposals(reused.space))
    assert all(fresh.run(p.linear).same for p in Exhaustive().proposals(fresh.space))


def test_program_order_gives_the_same_values_wherever_blocks_lie(hand: Hand) -> None:
    fresh, reused = refilled_while_read(hand, told=False)
    y = fresh.program.names["y"]
    fresh.run(fresh.order.program)
    reused.run(reused.order.program)
    assert torch.equal(fresh.final(y), reused.final(y))


def test_a_write_that_lands_in_memory_of_the_next_owner_corrupts_it(hand: Hand) -> None:
    a = hand.empty(MAIN, 4)
    hand.call(SIDE, "aten::fill_.Scalar", a, 1.0, inplace=True)
    hand.free(a.block)
    b = hand.empty(MAIN, 4)
    hand.call(MAIN, "aten::fill_.Scalar", b, 2.0, inplace=True)
    replayer = Replayer(hand.program(b=b), [Reuse(b.block, a.block)])
    assert [(c.name, c.distance) for c in replayer.run((1, 0)).changes] == [("b", 1.0)]


def test_a_block_at_a_shift_meets_the_access_that_is_still_running(hand: Hand) -> None:
    a = hand.empty(MAIN, 256)  # 2048 bytes
    part = a._replace(shape=(64,), offset=192)
    hand.call(SIDE, "aten::fill_.Scalar", part, 1.0, inplace=True)
    hand.free(a.block)
    b = hand.empty(MAIN, 64)
    hand.call(MAIN, "aten::fill_.Scalar", b, 2.0, inplace=True)
    program = hand.program(b=b)
    assert Replayer(program, [Reuse(b.block, a.block)]).run((1, 0)).same
    assert not Replayer(program, [Reuse(b.block, a.block, 3 * 512)]).run((1, 0)).same


def test_a_kernel_that_nobody_can_run_again_gives_poison_for_other_inputs(hand: Hand) -> None:
    x, y, z = hand.full(MAIN, ones(2)), hand.empty(MAIN, 2), hand.empty(SIDE, 2)
    hand.call(MAIN, "aten::mul.Tensor", x, 2.0, out=y)
    hand.give(SIDE, {y: 2 * ones(2)}, {z: 5 * ones(2)})
    replayer = Replayer(hand.program(z=z))
    assert replayer.run((0, 1)).same
    assert replayer.final(replayer.program.names["z"]).tolist() == [5.0, 5.0]
    assert replayer.run((1, 0)).changes[0].nan == 2


def test_an_operation_whose_values_were_not_kept_is_an_error(hand: Hand) -> None:
    x = hand.full(MAIN, ones(2))
    hand.call(MAIN, "aten::fill_.Scalar", x, 1.0, inplace=True)
    program = hand.program()
    hand.op(MAIN, (x.block, "w"), name="custom kernel")
    with pytest.raises(NotReplayableError, match="custom kernel"):
        Replayer(dataclasses.replace(program, records=tuple(hand.records)))


@pytest.mark.no_gpu
def test_a_program_of_a_gpu_needs_one(hand: Hand) -> None:
    x = hand.full(MAIN, ones(2))
    hand.call(MAIN, "aten::fill_.Scalar", x, 1.0, inplace=True)
    with pytest.raises(NotReplayableError, match="recorded on a GPU"):
        Replayer(dataclasses.replace(hand.program(), device="cuda"))


def test_an_op_that_is_not_registered_is_an_error(hand: Hand) -> None:
    x = hand.full(MAIN, ones(2))
    hand.call(MAIN, "nowhere::nothing", x, inplace=True)
    with pytest.raises(NotReplayableError, match="nowhere::nothing"):
        Replayer(hand.program())


def test_a_changed_shape_is_a_failure_of_the_schedule(hand: Hand) -> None:
    x = hand.full(MAIN, torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    found = hand.empty(SIDE, 3, 1, dtype=torch.int64)
    hand.call(MAIN, "aten::fill_.Scalar", x, 1.0, inplace=True)
    hand.call(SIDE, "aten::nonzero", x, out=found)
    replayer = Replayer(hand.program())
    assert "shape (2, 1), and had (3, 1)" in str(replayer.run((1, 0)).failure)
    assert replayer.run((0, 1)).same


def test_runs_that_share_a_prefix_give_what_runs_from_the_start_give(new_hand: Callable[[], Hand]) -> None:
    hand = new_hand()
    x = hand.full(MAIN, torch.arange(8, dtype=torch.int64))
    for i in range(5):
        hand.call(MAIN, "aten::mul_.Scalar", x, 2 * i + 3, inplace=True)
        hand.call(SIDE, "aten::add_.Scalar", x, 7 * i + 1, 1, inplace=True)
    program = hand.program(x=x)
    shared = Replayer(program)
    for at, proposal in enumerate(Exhaustive().proposals(shared.space)):
        outcome = shared.run(proposal.linear)
        if at % 17 == 0:
            alone = Replayer(program)
            assert alone.run(proposal.linear) == outcome
            assert torch.equal(alone.final(x), shared.final(x))


def test_runs_that_share_a_prefix_agree_where_memory_changes_hands(new_hand: Callable[[], Hand]) -> None:
    """What is kept of a run must not hold the takeover by an operation that another run does later."""
    hand = new_hand()
    a = hand.empty(MAIN, 64)
    hand.call(MAIN, "aten::fill_.Scalar", a, 1.0, fills=True)
    hand.edge(MAIN, SIDE)
    x = hand.full(SIDE, ones(64))
    for _ in range(12):
        hand.call(SIDE, "aten::add_.Tensor", x, a, inplace=True)
    hand.free(a.block)
    b = hand.empty(MAIN, 64)
    for _ in range(12):
        hand.call(MAIN, "aten::fill_.Scalar", b, 2.0, fills=True)
    program, reuse = hand.program(x=x), [Reuse(b.block, a.block)]
    shared = Replayer(program, reuse)
    late = tuple(range(25))
    for first in range(1, 13):  # the step at which the new block is first used
        early = (*range(first), *range(13, 25), *range(first, 13))
        for linear in (late, early):
            assert shared.run(linear) == Replayer(program, reuse).run(linear)
        later = (*range(first + 1), *range(13, 25), *range(first + 1, 13))
        shared.run(early)
        assert shared.run(later) == Replayer(program, reuse).run(later)
