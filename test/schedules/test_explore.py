"""Searches: what is found, when a bound is said, and that it does not matter who does the work."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from crosscurrent.errors import WrongUseError
from crosscurrent.schedules.engines import Processes, RayCluster, Serial, counting, engine_of, spread
from crosscurrent.schedules.explore import Share, explore, memory_choices, merge
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.reuse import Reuse
from crosscurrent.schedules.schedule import Schedule
from crosscurrent.schedules.strategies import PCT, Classes, Exhaustive, LatestAndEarliest, RandomWalk

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Hand

MAIN, SIDE, THIRD = 1, 2, 3


def two_lanes(hand: Hand, *, ordered: bool, steps: int = 4) -> Program:
    x = hand.full(MAIN, torch.arange(4, dtype=torch.int64))
    for _ in range(steps):
        hand.update(MAIN, x)
        if ordered:
            hand.edge(MAIN, SIDE)
        hand.update(SIDE, x)
        if ordered:
            hand.edge(SIDE, MAIN)
    return hand.program(x=x)


@pytest.fixture
def racy(hand: Hand) -> Program:
    return two_lanes(hand, ordered=False)


def test_a_race_is_found_and_its_schedule_shows_it_again(racy: Program) -> None:
    exploration = explore(racy, [Classes()])
    assert (exploration.tried, exploration.different, exploration.bounded) == (70, 69, False)
    schedule = Schedule.parse(exploration.differences[0].schedule, racy)
    outcome = Replayer(racy, schedule.reuse).run(schedule.linear)
    assert outcome.changes == exploration.differences[0].changes
    assert "x: 4 of 4 elements changed" in str(exploration.differences[0])


def test_a_program_without_a_race_is_the_same_in_all_schedules(hand: Hand) -> None:
    exploration = explore(two_lanes(hand, ordered=True), [Classes(), Exhaustive()])
    assert exploration.same
    assert str(exploration) == "2 schedules (all there are): all the same"


def test_a_bound_that_was_hit_is_said(racy: Program) -> None:
    assert explore(racy, [Classes()], limit=69).bounded
    assert not explore(racy, [Classes()], limit=70).bounded
    assert "bounded" in str(explore(racy, [Classes()], limit=3))


def test_a_bound_is_for_strategies_that_do_not_say_how_many_they_propose(racy: Program) -> None:
    assert explore(racy, [RandomWalk(count=20), Classes()], limit=3).tried == 20 + 3
    assert explore(racy, [Classes(), RandomWalk(count=2)], limit=3).tried == 3 + 2


def test_strategies_that_sample_are_bounded(racy: Program) -> None:
    for strategy in (RandomWalk(count=5), PCT(count=5), LatestAndEarliest()):
        assert explore(racy, [strategy]).bounded


def test_exhaustive_searches_try_every_pair_of_blocks_that_can_share_memory(hand: Hand) -> None:
    blocks = []
    for lane in (MAIN, MAIN, SIDE):
        block = hand.empty(lane, 64)
        hand.fill(lane, block)
        hand.read(THIRD, block, f"read {len(blocks)}")  # what the next owner does not wait for
        hand.free(block.block)
        blocks.append(block.block)
    new = hand.empty(MAIN, 64)
    hand.fill(MAIN, new)
    tried = set(memory_choices(hand.program(), every=True))
    assert {(), (Reuse(new.block, blocks[0]),), (Reuse(new.block, blocks[1]),)} <= tried
    assert not any(choice.old == blocks[2] for choices in tried for choice in choices)  # another pool


def test_pairs_that_no_schedule_can_tell_apart_are_not_tried(hand: Hand) -> None:
    for _ in range(5):
        block = hand.empty(MAIN, 64)
        hand.fill(MAIN, block)
        hand.free(block.block)
    exploration = explore(hand.program(), [Classes()])
    assert (exploration.tried, exploration.bounded, exploration.same) == (2, False, True)


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_the_parts_of_a_search_make_the_whole(racy: Program, workers: int) -> None:
    strategies = [RandomWalk(count=20), Classes()]
    parts = [explore(racy, strategies, share=Share(index=i, of=workers)) for i in range(workers)]
    assert all(part.tried < 90 for part in parts)
    assert merge(parts) == explore(racy, strategies)


def test_processes_find_what_one_process_finds(racy: Program) -> None:
    strategies = [RandomWalk(count=20), PCT(count=10)]
    assert spread(racy, strategies, Processes(workers=2)) == spread(racy, strategies, Serial())


def test_there_are_as_many_processes_as_cores_on_systems_without_affinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert Processes().num_workers == 3


def test_how_far_a_search_has_come_is_told(racy: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "EVERY", 0.0)
    told: list[int] = []
    strategies = [RandomWalk(count=20), PCT(count=10)]
    assert spread(racy, strategies, Serial(), told=told.append) == spread(racy, strategies, Serial())
    assert told == list(range(1, len(told) + 1))
    assert len(told) == explore(racy, strategies).tried


def test_ray_finds_what_one_process_finds(racy: Program) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    strategies = [RandomWalk(count=20), PCT(count=10)]
    with RayCluster(workers=2) as cluster:
        assert spread(racy, strategies, cluster) == spread(racy, strategies, Serial())


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(WrongUseError, match=r"crosscurrent\[ray\]"):
        engine_of("ray")


def test_an_engine_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="serial, processes, ray"):
        engine_of("threads")
    with pytest.raises(ValueError, match="at least 1"):
        Processes(workers=0)
    with pytest.raises(ValueError, match="0 to 1"):
        Share(index=2, of=2)


# Under pytest-xdist the parts of a search are tests of their own, and so run wherever there is a free
# process; the parts together are the whole (above).
SHARES = 4


@pytest.mark.parametrize("index", range(SHARES))
def test_an_ordered_program_is_the_same_in_every_part_of_a_search(
    new_hand: Callable[[], Hand], index: int
) -> None:
    program = two_lanes(new_hand(), ordered=True, steps=10)
    strategies = [RandomWalk(count=40), PCT(count=40)]
    assert explore(program, strategies, share=Share(index=index, of=SHARES)).same
