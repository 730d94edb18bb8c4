"""Whose memory can be whose, and what that means for the order and for conflicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from crosscurrent.races.blocks import SMALL_BLOCK
from crosscurrent.schedules.conflicts import conflicts
from crosscurrent.schedules.order import PartialOrder
from crosscurrent.schedules.reuse import Reuse, best_fit, candidates, check, places

if TYPE_CHECKING:
    from .conftest import Script

MAIN, SIDE, THIRD = 1, 2, 3


def used(script: Script, block: int, lane: int = MAIN, nbytes: int = 512, **how: bool) -> None:
    """A block that its own lane fills, and another one reads."""
    script.alloc(block, lane, nbytes, **how)
    script.op(lane, (block, "w"))
    script.edge(lane, THIRD)
    script.op(THIRD, (block, "r"))


def test_a_block_can_follow_a_freed_one_of_its_pool(script: Script) -> None:
    used(script, 1)
    script.free(1)
    used(script, 2)
    assert list(candidates(script.records, script.order)) == [Reuse(2, 1)]
    assert best_fit(script.records) == (Reuse(2, 1),)


def test_a_block_whose_uses_all_come_before_those_of_the_next_is_no_matter(script: Script) -> None:
    script.alloc(1, MAIN)
    script.op(MAIN, (1, "w"))
    script.free(1)
    used(script, 2)
    assert not list(candidates(script.records, script.order))
    assert best_fit(script.records) == (Reuse(2, 1),)


@pytest.mark.parametrize(
    "how",
    [
        {"lane": SIDE},  # another stream's pool
        {"pinned": True},  # another kind of memory
        {"nbytes": SMALL_BLOCK + 512},  # the pool of large blocks
        {"fresh": False},  # older than the trace
    ],
    ids=lambda how: next(iter(how)),
)
def test_other_blocks_cannot(script: Script, how: dict[str, bool]) -> None:
    used(script, 1)
    script.free(1)
    used(script, 2, **how)
    assert not list(candidates(script.records, script.order))
    assert best_fit(script.records) == ()
    with pytest.raises(ValueError, match="cannot have been handed"):
        check(script.records, [Reuse(2, 1)])


def test_a_block_that_lives_is_not_handed_out(script: Script) -> None:
    used(script, 1)
    used(script, 2)
    script.free(1)
    assert not list(candidates(script.records, script.order))


def test_the_smallest_block_that_fits_is_taken_and_only_once(script: Script) -> None:
    for block, nbytes in ((1, 4096), (2, 1024), (3, 512)):
        used(script, block, nbytes=nbytes)
    for block in (1, 2, 3):
        script.free(block)
    used(script, 4, nbytes=1024)
    used(script, 5, nbytes=1024)
    used(script, 6, nbytes=8192)
    assert best_fit(script.records) == (Reuse(4, 2), Reuse(5, 1))


def test_a_block_that_is_held_for_another_lane_is_not_the_likely_choice(script: Script) -> None:
    used(script, 1)
    script.use(1, SIDE)
    script.free(1)
    used(script, 2)
    assert best_fit(script.records) == ()
    assert list(candidates(script.records, script.order)) == [
        Reuse(2, 1)
    ]  # but a possible one: when it is done


def test_shifts_are_those_of_the_allocator(script: Script) -> None:
    used(script, 1, nbytes=1024)
    script.free(1)
    used(script, 2, nbytes=1024)
    check(script.records, [Reuse(2, 1, 512)])
    check(script.records, [Reuse(2, 1, -512)])
    for shift in (100, 1024, -1024):
        with pytest.raises(ValueError, match="shift"):
            check(script.records, [Reuse(2, 1, shift)])


def test_two_blocks_cannot_take_one_place_at_the_same_time(script: Script) -> None:
    used(script, 1)
    script.free(1)
    used(script, 2)
    used(script, 3)
    with pytest.raises(ValueError, match="in use"):
        places(script.records, [Reuse(2, 1), Reuse(3, 1)])


def test_blocks_can_take_one_place_in_turn(script: Script) -> None:
    used(script, 1, nbytes=2048)
    script.free(1)
    used(script, 2)
    script.free(2)
    used(script, 3)
    assert places(script.records, [Reuse(2, 1, 512), Reuse(3, 2, 0)]) == {1: (1, 0), 2: (1, 512), 3: (1, 512)}


def test_a_block_follows_one_other_only(script: Script) -> None:
    for block in (1, 2):
        used(script, block)
        script.free(block)
    used(script, 3)
    with pytest.raises(ValueError, match="one other block only"):
        check(script.records, [Reuse(3, 1), Reuse(3, 2)])


def test_what_is_done_to_one_place_conflicts_whatever_the_region(script: Script) -> None:
    script.alloc(1, MAIN)
    script.op(SIDE, (1, "r"))
    script.free(1)
    used(script, 2)
    assert conflicts(PartialOrder.of(script.records)) == ()
    assert conflicts(PartialOrder.of(script.records, {2: 1}), {2: 1}) == ((0, 1), (0, 2))


def test_reads_do_not_conflict_with_reads_nor_with_what_they_are_ordered_with(script: Script) -> None:
    script.op(MAIN, (1, "r"))
    script.op(SIDE, (1, "r"))
    script.op(SIDE, (1, "w"))
    script.edge(SIDE, MAIN)
    script.op(MAIN, (1, "r"))
    assert conflicts(script.order) == ((0, 2),)
