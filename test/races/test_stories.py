"""Stream bugs that people met, as programs of integers: the racy form and the form that was right.

Each story yields its steps; ``fixed`` adds the missing step. The racy form must be flagged at the
marked pair of steps (``FIRST`` and ``SECOND`` lines) and nowhere else, the fixed form not at all.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from race_programs import (
    EXTRA,
    FETCH,
    HOST,
    MAIN,
    NBYTES,
    STORE,
    Step,
    alloc,
    at,
    copy,
    detect,
    edge,
    free,
    lines,
    op,
    races,
    read,
    record,
    sync,
    sync_lanes,
    update,
    use_stream,
    wait,
    write,
)

from crosscurrent.trace.records import Region

FIRST, SECOND = 100, 200
LEFT = Region(0, 40, 8, ((3, 16),))
RIGHT = Region(8, 48, 8, ((3, 16),))

Story = Callable[[bool], list[Step]]
STORIES: dict[str, tuple[str, Story]] = {}


def story(kind: str) -> Callable[[Story], Story]:
    def tell(function: Story) -> Story:
        STORIES[function.__name__] = (kind, function)
        return function

    return tell


def first(step: Step) -> Step:
    return at(FIRST, step)


def second(step: Step) -> Step:
    return at(SECOND, step)


def only(fixed: bool, *steps: Step) -> list[Step]:
    return list(steps) if fixed else []


@story("reuse")
def activation_restored_on_a_side_stream_and_freed_while_main_reads_it(fixed: bool) -> list[Step]:
    return [
        alloc(FETCH, "a"),
        copy(FETCH, "a", "pinned 1", kept=True),
        edge(FETCH, MAIN),
        alloc(MAIN, "y"),
        first(op(MAIN, reads=["a"], writes=["y"])),
        *only(fixed, use_stream("a", MAIN)),
        free("a"),
        alloc(FETCH, "b"),
        second(copy(FETCH, "b", "pinned 2", kept=True)),
    ]


@story("read-after-write")
def copy_out_issued_before_the_op_that_produces_its_source(fixed: bool) -> list[Step]:
    return [
        write(MAIN, "left"),
        write(MAIN, "right"),
        edge(MAIN, STORE),
        alloc(MAIN, "x"),
        first(op(MAIN, reads=["left", "right"], writes=["x"], name="cat")),
        *only(fixed, record(MAIN), wait(STORE)),
        second(copy(STORE, "pinned", "x")),
        edge(STORE, MAIN),
        sync_lanes(STORE),
    ]


@story("read-after-write")
def checkpoint_fetched_while_another_stream_still_stores_it(fixed: bool) -> list[Step]:
    return [
        write(MAIN, "x"),
        edge(MAIN, STORE),
        first(copy(STORE, "pinned", "x")),
        edge(STORE, MAIN),
        *only(fixed, edge(STORE, FETCH)),
        second(copy(FETCH, "y", "pinned")),
        edge(FETCH, MAIN),
    ]


@story("read-after-write")
def current_stream_remembered_from_another_place(fixed: bool) -> list[Step]:
    return [
        first(write(EXTRA, "act")),
        edge(EXTRA if fixed else MAIN, STORE),
        second(copy(STORE, "pinned", "act")),
        sync_lanes(STORE),
    ]


@story("write-after-read")
def layer_marked_done_before_backward_read_its_weights(fixed: bool) -> list[Step]:
    return [
        op(MAIN, reads=["weights"], writes=["y"]),
        record(MAIN),
        first(op(MAIN, reads=["weights"], writes=["gradient"])),
        *only(fixed, record(MAIN)),
        wait(FETCH),
        second(copy(FETCH, "weights", "pinned")),
    ]


@story("reuse")
def reduce_output_freed_while_another_stream_copies_it(fixed: bool) -> list[Step]:
    return [
        alloc(MAIN, "reduced"),
        write(MAIN, "reduced"),
        edge(MAIN, STORE),
        first(copy(STORE, "pinned", "reduced", kept=True)),
        *only(fixed, use_stream("reduced", STORE)),
        free("reduced"),
        alloc(MAIN, "next"),
        second(write(MAIN, "next")),
        sync_lanes(STORE),
    ]


@story("read-after-write")
def host_waits_for_the_event_of_the_wrong_stream(fixed: bool) -> list[Step]:
    return [
        write(MAIN, "gradient"),
        edge(MAIN, STORE),
        first(copy(STORE, "pinned", "gradient")),
        record(STORE if fixed else FETCH),
        sync(),
        second(read(HOST, "pinned")),
    ]


@story("read-after-write")
def bucket_filled_from_two_streams_and_waited_for_on_one(fixed: bool) -> list[Step]:
    return [
        write(MAIN, "bucket"),
        *(edge(MAIN, lane) for lane in (FETCH, STORE, EXTRA)),
        first(update(FETCH, "bucket", (32, 64))),
        update(STORE, "bucket", (0, 32)),
        edge(STORE, EXTRA),
        *only(fixed, edge(FETCH, EXTRA)),
        second(read(EXTRA, "bucket")),
    ]


@story("read-after-write")
def host_reads_the_copy_of_the_step_before(fixed: bool) -> list[Step]:
    steps: list[Step] = []
    for number in range(2):
        if number and fixed:
            steps.append(sync())
        if number:
            steps.append(second(read(HOST, "pinned")))
        steps += [update(MAIN, "acc"), first(copy(MAIN, "pinned", "acc")), record(MAIN)]
    return steps


@story("write-after-read")
def host_refills_a_staging_buffer_that_is_still_being_sent(fixed: bool) -> list[Step]:
    steps: list[Step] = []
    for number in range(2):
        if fixed and number:
            steps.append(sync())
        steps += [
            second(write(HOST, "pinned")),
            alloc(MAIN, f"sent {number}"),
            first(copy(MAIN, f"sent {number}", "pinned", kept=True)),
            record(MAIN),
        ]
    return steps


@story("write-after-read")
def cache_page_refilled_while_attention_still_reads_it(fixed: bool) -> list[Step]:
    return [
        write(MAIN, "cache"),
        edge(MAIN, FETCH),
        first(read(MAIN, "cache", (32, 48))),
        *only(fixed, edge(MAIN, FETCH)),
        second(write(FETCH, "cache", (32, 48))),
    ]


@story("read-after-write")
def one_event_recorded_on_two_streams_and_waited_for_once(fixed: bool) -> list[Step]:
    return [
        first(update(FETCH, "x")),
        record(FETCH),
        *only(fixed, wait(EXTRA)),
        update(STORE, "y"),
        record(STORE),
        wait(EXTRA),
        second(op(EXTRA, reads=["x", "y"])),
    ]


@story("write-after-read")
def wait_for_an_event_that_nobody_has_recorded_yet(fixed: bool) -> list[Step]:
    produce = [second(copy(FETCH, "buffer", "pinned")), record(FETCH)]
    consume = [wait(MAIN), first(read(MAIN, "buffer"))]
    return produce + consume if fixed else consume + produce


@story("reuse")
def storage_released_under_a_copy_that_still_reads_it(fixed: bool) -> list[Step]:
    return [
        alloc(MAIN, "weights"),
        write(MAIN, "weights"),
        edge(MAIN, STORE),
        first(copy(STORE, "pinned", "weights", kept=True)),
        *only(fixed, use_stream("weights", STORE)),
        free("weights"),
        alloc(MAIN, "activation"),
        second(write(MAIN, "activation")),
        edge(STORE, MAIN),
        copy(MAIN, "restored", "pinned"),
    ]


@story("reuse")
def record_stream_with_the_stream_that_owns_the_block(fixed: bool) -> list[Step]:
    return [
        alloc(FETCH, "weights"),
        copy(FETCH, "weights", "pinned 1"),
        use_stream("weights", MAIN if fixed else FETCH),
        edge(FETCH, MAIN),
        first(read(MAIN, "weights")),
        free("weights"),
        alloc(FETCH, "next"),
        second(copy(FETCH, "next", "pinned 2")),
    ]


@story("write-after-read")
def slot_handed_back_when_its_read_was_issued_not_when_it_was_done(fixed: bool) -> list[Step]:
    steps: list[Step] = []
    for number in range(4):
        slot = f"slot {number % 2}"
        if fixed:
            steps.append(wait(FETCH, slot))
        steps += [
            second(copy(FETCH, slot, f"pinned {number}")),
            edge(FETCH, MAIN),
            first(read(MAIN, slot)),
            record(MAIN, slot),
        ]
    return steps


@story("read-after-write")
def helper_thread_runs_on_the_default_stream(fixed: bool) -> list[Step]:
    lane = FETCH if fixed else MAIN
    return [
        write(MAIN, "x"),
        edge(MAIN, FETCH),
        first(update(FETCH, "x")),
        second(copy(lane, "pinned", "x")),
        record(lane),
        sync(),
        read(HOST, "pinned"),
    ]


@pytest.mark.parametrize("name", STORIES)
def test_the_racy_form_is_one_finding_at_the_right_pair(name: str) -> None:
    kind, tell = STORIES[name]
    assert [lines(finding) for finding in races(tell(False))] == [(kind, FIRST, SECOND)]


@pytest.mark.parametrize("name", STORIES)
def test_the_fixed_form_is_silent(name: str) -> None:
    _, tell = STORIES[name]
    assert races(tell(True)) == []


SILENT: dict[str, list[Step]] = {
    "two streams write strided halves": [
        write(MAIN, "x"),
        edge(MAIN, FETCH),
        edge(MAIN, STORE),
        update(FETCH, "x", LEFT),
        update(STORE, "x", RIGHT),
    ],
    "order through a stream that runs nothing": [
        write(MAIN, "x"),
        edge(MAIN, FETCH),
        update(FETCH, "x"),
        edge(FETCH, STORE),
        edge(STORE, EXTRA),
        read(EXTRA, "x"),
    ],
    "order through the host": [
        write(FETCH, "x"),
        sync_lanes(FETCH),
        update(STORE, "x"),
    ],
    "a ring of pinned slots, each rewritten after its own event": [
        step
        for number in range(6)
        for step in (
            sync(f"slot {number % 2}"),
            write(HOST, f"pinned {number % 2}"),
            copy(MAIN, "device", f"pinned {number % 2}", kept=True),
            record(MAIN, f"slot {number % 2}"),
        )
    ],
    "memory reused on its own stream": [
        alloc(MAIN, "x"),
        write(MAIN, "x"),
        read(MAIN, "x"),
        free("x"),
        alloc(MAIN, "z"),
        write(MAIN, "z"),
    ],
    "busy waiting on a query": [
        write(MAIN, "x"),
        edge(MAIN, STORE),
        copy(STORE, "pinned", "x"),
        record(STORE),
        sync(kind="query"),
        read(HOST, "pinned"),
    ],
    "the pool's stream waited before the free": [
        alloc(MAIN, "x"),
        write(MAIN, "x"),
        edge(MAIN, STORE),
        copy(STORE, "pinned", "x"),
        edge(STORE, MAIN),
        free("x"),
        alloc(MAIN, "y"),
        write(MAIN, "y"),
    ],
    "the pool's stream waited between the allocation and its first use": [
        alloc(MAIN, "x"),
        write(MAIN, "x"),
        edge(MAIN, STORE),
        copy(STORE, "pinned", "x"),
        free("x"),
        alloc(MAIN, "y"),
        edge(STORE, MAIN),
        write(MAIN, "y"),
    ],
    "two streams read one weight": [
        write(MAIN, "weight"),
        edge(MAIN, FETCH),
        edge(MAIN, STORE),
        read(FETCH, "weight"),
        read(STORE, "weight"),
    ],
    "out and back in on one stream": [
        write(MAIN, "x"),
        edge(MAIN, STORE),
        copy(STORE, "pinned", "x"),
        copy(STORE, "y", "pinned"),
        edge(STORE, MAIN),
        read(MAIN, "y"),
    ],
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_right_is_silent(name: str) -> None:
    assert races(SILENT[name]) == []


def test_host_waits_are_counted_by_call_site() -> None:
    loop = [
        step for _ in range(3) for step in (at(1, write(MAIN, "x")), at(2, sync_lanes(MAIN, kind="item")))
    ]
    waits = detect(loop).host_waits
    assert [(each.record.kind, each.record.site, each.lanes, each.times) for each in waits] == [
        ("item", 2, (MAIN,), 3)
    ]


def test_a_loop_without_host_waits_has_none() -> None:
    assert detect([write(MAIN, "x"), record(MAIN), wait(FETCH), read(FETCH, "x")]).host_waits == []


def test_whole_blocks_and_named_regions_have_the_same_size() -> None:
    assert max(LEFT.stop, RIGHT.stop) <= NBYTES


def test_a_host_wait_without_work_left_is_idle() -> None:
    allocation = at(3, sync_lanes(kind="allocation"))
    story = [
        allocation,
        at(1, write(MAIN, "x")),
        allocation,
        at(2, sync_lanes(MAIN, kind="synchronize")),
        at(2, sync_lanes(MAIN, kind="synchronize")),
        allocation,
    ]
    waits = detect(story).host_waits
    assert [(each.record.kind, each.times, each.idle) for each in waits] == [
        ("allocation", 3, 2),
        ("synchronize", 2, 1),
    ]
