"""Large programs share memory between blocks only where no schedule can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from crosscurrent.schedules import replay
from crosscurrent.schedules.packing import pack
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.reuse import Reuse
from crosscurrent.schedules.strategies import Classes

if TYPE_CHECKING:
    from .conftest import Hand

MAIN, SIDE = 1, 2


def chain(hand: Hand, *, lane: int, ordered: bool) -> tuple[int, int]:
    first = hand.empty(MAIN, 64)
    hand.fill(MAIN, first)
    if ordered:
        hand.edge(MAIN, lane)
    hand.free(first.block)
    second = hand.empty(lane, 64)
    hand.fill(lane, second)
    return first.block, second.block


def test_blocks_in_turn_on_one_lane_share_a_place(hand: Hand) -> None:
    old, new = chain(hand, lane=MAIN, ordered=False)
    assert pack(hand.records, hand.order, ()) == (Reuse(new, old),)
    assert pack(hand.records, hand.order, {old}) == ()


def test_blocks_of_lanes_that_wait_share_a_place(hand: Hand) -> None:
    old, new = chain(hand, lane=SIDE, ordered=True)
    assert pack(hand.records, hand.order, ()) == (Reuse(new, old),)


def test_blocks_that_can_be_in_use_at_the_same_time_do_not(hand: Hand) -> None:
    chain(hand, lane=SIDE, ordered=False)
    assert pack(hand.records, hand.order, ()) == ()


def test_a_block_that_lives_is_not_taken(hand: Hand) -> None:
    for _ in range(2):
        hand.fill(MAIN, hand.empty(MAIN, 64))
    assert pack(hand.records, hand.order, ()) == ()


def test_packed_memory_gives_the_same_answers(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    x = hand.full(MAIN, torch.arange(64, dtype=torch.float64))
    for step in range(6):
        y = hand.empty(MAIN, 64)
        hand.call(MAIN, "aten::mul.Tensor", x, 1.0 + step, out=y)
        hand.call(MAIN, "aten::add_.Tensor", x, y, inplace=True)
        if step == 4:
            hand.call(SIDE, "aten::add_.Scalar", x, 5.0, inplace=True)
        hand.free(y.block)
    program = hand.program(x=x)
    roomy = Replayer(program)
    monkeypatch.setattr(replay, "_ROOMY", 0)
    packed = Replayer(program)
    assert packed._arena.bytes.nbytes < roomy._arena.bytes.nbytes
    outcomes = []
    for proposal in Classes().proposals(roomy.space):
        outcomes.append(roomy.run(proposal.linear))
        assert packed.run(proposal.linear) == outcomes[-1]
    assert len({outcome.same for outcome in outcomes}) == 2
