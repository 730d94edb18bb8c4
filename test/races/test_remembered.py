"""What is remembered of a block, in each form that the detector keeps it in."""

from __future__ import annotations

import pytest
from race_programs import (
    FETCH,
    MAIN,
    SLOT,
    STORE,
    Step,
    alloc,
    edge,
    free,
    races,
    read,
    sync_lanes,
    update,
    write,
)

LEFT, RIGHT = (0, 16), (32, 48)


def kinds(steps: list[Step]) -> list[str]:
    return [finding.kind.value for finding in races(steps)]


@pytest.mark.parametrize(("first", "second"), [(LEFT, RIGHT), (RIGHT, LEFT), (LEFT, (8, 24)), (LEFT, LEFT)])
def test_a_second_region_does_not_hide_the_first(first: tuple[int, int], second: tuple[int, int]) -> None:
    reads = [read(STORE, SLOT, first), read(STORE, SLOT, second)]
    assert kinds([*reads, write(MAIN, SLOT, first)]) == ["write-after-read"]
    writes = [write(STORE, SLOT, first), write(STORE, SLOT, second)]
    assert kinds([*writes, read(MAIN, SLOT, first)]) == ["read-after-write"]
    assert not races([*reads, write(MAIN, SLOT, (56, 64))])
    assert not races([*writes, read(MAIN, SLOT, (56, 64))])


def test_an_ordered_region_does_not_hide_the_one_that_came_later() -> None:
    for touch in (read, write):
        steps = [touch(STORE, SLOT, LEFT), edge(STORE, MAIN), touch(STORE, SLOT, RIGHT)]
        assert not races([*steps, write(MAIN, SLOT, LEFT)])
        assert races([*steps, write(MAIN, SLOT, RIGHT)])


def test_a_write_of_the_whole_stands_for_what_came_before_it_on_its_stream() -> None:
    steps = [read(STORE, SLOT, LEFT), read(STORE, SLOT, RIGHT), write(STORE, SLOT, LEFT), write(STORE, SLOT)]
    assert kinds([*steps, read(MAIN, SLOT)]) == ["read-after-write"]
    assert kinds([*steps, write(MAIN, SLOT)]) == ["write-after-write"]
    assert not races([*steps, edge(STORE, MAIN), write(MAIN, SLOT)])


def test_a_write_forgotten_for_an_ordered_one_does_not_come_back() -> None:
    steps = [write(STORE, SLOT, LEFT), edge(STORE, MAIN), write(MAIN, SLOT, LEFT), edge(MAIN, STORE)]
    assert not races([*steps, write(STORE, SLOT, RIGHT), read(MAIN, SLOT, LEFT)])
    assert races([*steps, write(STORE, SLOT, RIGHT), read(MAIN, SLOT, RIGHT)])


def several_freed(*names: str) -> list[Step]:
    """Blocks of one stream that nothing runs on any more when they are freed, all at the same time."""
    return [
        *(alloc(MAIN, name) for name in names),
        *(update(MAIN, name) for name in names),
        sync_lanes(MAIN),
        *(free(name) for name in names),
    ]


@pytest.mark.parametrize("num_freed", [0, 1, 2, 3])
def test_what_another_stream_still_does_meets_the_next_block(num_freed: int) -> None:
    steps = [
        *several_freed(*(f"freed {number}" for number in range(num_freed))),
        *(alloc(MAIN, "read"), write(MAIN, "read"), edge(MAIN, STORE), read(STORE, "read")),
        free("read"),
    ]
    assert kinds([*steps, alloc(MAIN, "next"), write(MAIN, "next")]) == ["reuse"]
    assert not races([*steps, edge(STORE, MAIN), alloc(MAIN, "next"), write(MAIN, "next")])


def test_a_block_knows_nothing_of_the_one_before_it() -> None:
    steps = [*several_freed("one", "two"), alloc(MAIN, "next")]
    assert not races([*steps, read(FETCH, "next"), write(FETCH, "next")])
    assert races([*steps, write(MAIN, "next"), read(FETCH, "next")])
