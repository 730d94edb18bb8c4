"""What orders what: for each rule a program that relies on it, and its twin that must be flagged."""

from __future__ import annotations

import pytest
from race_programs import (
    EXTRA,
    FETCH,
    HOST,
    MAIN,
    NBYTES,
    SLOT,
    STORE,
    Step,
    alloc,
    copy,
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

LARGE = (1 << 20) + 1


def kinds(steps: list[Step]) -> list[str]:
    return [finding.kind.value for finding in races(steps)]


# Lanes and events.


def test_work_of_one_stream_is_ordered() -> None:
    assert not races([write(MAIN, SLOT), read(MAIN, SLOT), write(MAIN, SLOT)])


def test_work_of_two_streams_is_not() -> None:
    assert kinds([write(MAIN, SLOT), read(FETCH, SLOT)]) == ["read-after-write"]
    assert kinds([read(MAIN, SLOT), write(FETCH, SLOT)]) == ["write-after-read"]
    assert kinds([write(MAIN, SLOT), write(FETCH, SLOT)]) == ["write-after-write"]
    assert kinds([read(MAIN, SLOT), read(FETCH, SLOT)]) == []


def test_the_default_stream_is_a_stream_like_any_other() -> None:
    assert races([write(EXTRA, SLOT), read(MAIN, SLOT)])
    assert races([write(MAIN, SLOT), read(EXTRA, SLOT)])


def test_what_the_host_did_comes_before_what_it_issues() -> None:
    assert not races([write(HOST, "pinned"), copy(MAIN, SLOT, "pinned"), copy(FETCH, "x", "pinned")])


def test_what_was_issued_does_not_come_before_what_the_host_does_next() -> None:
    assert kinds([write(HOST, "pinned"), copy(MAIN, SLOT, "pinned"), write(HOST, "pinned")]) == [
        "write-after-read"
    ]
    assert kinds([copy(MAIN, "pinned", SLOT), read(HOST, "pinned")]) == ["read-after-write"]
    assert not races([copy(MAIN, SLOT, "pinned"), read(HOST, "pinned")])


def test_a_refill_without_a_wait_is_a_race() -> None:
    assert races([write(FETCH, SLOT), edge(FETCH, MAIN), read(MAIN, SLOT), write(FETCH, SLOT)])


def test_a_refill_after_the_reader_is_ordered() -> None:
    assert not races(
        [write(FETCH, SLOT), edge(FETCH, MAIN), read(MAIN, SLOT), edge(MAIN, FETCH), write(FETCH, SLOT)]
    )


def test_an_event_marks_what_came_before_it() -> None:
    assert not races([write(MAIN, SLOT), record(MAIN), wait(FETCH), read(FETCH, SLOT)])


def test_an_event_does_not_mark_what_came_after_it() -> None:
    assert races([record(MAIN), write(MAIN, SLOT), wait(FETCH), read(FETCH, SLOT)])


def test_a_wait_holds_back_what_is_issued_after_it_only() -> None:
    assert races([write(MAIN, SLOT), record(MAIN), read(FETCH, SLOT), wait(FETCH)])


def test_a_wait_binds_to_the_recording_at_the_time_of_the_call() -> None:
    """Recorded again on the other stream later: the wait does not move along."""
    steps = [write(MAIN, SLOT), record(MAIN), wait(FETCH), record(EXTRA), read(FETCH, SLOT)]
    assert not races(steps)


def test_a_wait_after_a_second_recording_has_lost_the_first() -> None:
    assert races([write(MAIN, SLOT), record(MAIN), record(EXTRA), wait(FETCH), read(FETCH, SLOT)])


def test_a_wait_for_an_event_not_yet_recorded_orders_nothing() -> None:
    assert races([write(MAIN, SLOT), wait(FETCH), record(MAIN), read(FETCH, SLOT)])


def test_order_is_transitive() -> None:
    chain = [edge(MAIN, FETCH), edge(FETCH, STORE), edge(STORE, EXTRA)]
    assert not races([write(MAIN, SLOT), *chain, write(EXTRA, SLOT)])
    for missing in range(3):
        assert races([write(MAIN, SLOT), *chain[:missing], *chain[missing + 1 :], write(EXTRA, SLOT)])


def test_order_has_a_direction() -> None:
    assert races([write(MAIN, SLOT), edge(FETCH, MAIN), read(FETCH, SLOT)])


def test_a_stream_that_waits_for_itself_waits_for_nothing() -> None:
    assert races([write(MAIN, SLOT), edge(FETCH, FETCH), read(FETCH, SLOT)])


# The host as a way from lane to lane.


@pytest.mark.parametrize(
    "kind", ["synchronize", "item", "blocking copy", "pageable copy", "strided copy", "data-dependent shape"]
)
def test_a_host_that_waited_for_a_lane_orders_all_that_it_issues(kind: str) -> None:
    assert not races([write(MAIN, SLOT), sync_lanes(MAIN, kind=kind), write(FETCH, SLOT)])
    assert not races([copy(MAIN, "pinned", SLOT), sync_lanes(MAIN, kind=kind), write(HOST, "pinned")])


def test_a_host_that_waited_for_another_lane_orders_nothing_of_this_one() -> None:
    assert races([write(MAIN, SLOT), sync_lanes(STORE), write(FETCH, SLOT)])
    assert races([copy(MAIN, "pinned", SLOT), sync_lanes(STORE), write(HOST, "pinned")])


@pytest.mark.parametrize("kind", ["pageable copy", "allocation"])
def test_a_call_that_only_held_up_the_host_orders_nothing(kind: str) -> None:
    assert races([copy(MAIN, "pinned", SLOT), sync_lanes(kind=kind), read(HOST, "pinned")])


def test_a_device_synchronize_covers_all_lanes() -> None:
    steps = [copy(MAIN, "pinned a", "x"), copy(STORE, "pinned b", "y"), sync_lanes(MAIN, FETCH, STORE)]
    assert not races([*steps, op(HOST, reads=["pinned a", "pinned b"])])


@pytest.mark.parametrize("kind", ["event", "query"])
def test_a_host_that_saw_an_event_done_orders_what_it_marks(kind: str) -> None:
    assert not races([copy(MAIN, "pinned", SLOT), record(MAIN), sync(kind=kind), read(HOST, "pinned")])
    assert races([record(MAIN), copy(MAIN, "pinned", SLOT), sync(kind=kind), read(HOST, "pinned")])


def test_a_host_wait_covers_what_the_lane_had_waited_for() -> None:
    assert not races([write(MAIN, SLOT), edge(MAIN, FETCH), sync_lanes(FETCH), write(STORE, SLOT)])
    assert races([write(MAIN, SLOT), sync_lanes(FETCH), edge(MAIN, FETCH), write(STORE, SLOT)])


def test_an_event_knows_what_the_host_had_waited_for_when_it_was_recorded() -> None:
    """Even for a lane that runs nothing: everything on it is issued later."""
    assert not races([write(MAIN, SLOT), sync_lanes(MAIN), record(FETCH), wait(STORE), write(STORE, SLOT)])


def test_a_strided_copy_makes_the_host_touch_the_pinned_side() -> None:
    """It goes through a temporary: the host writes the pinned memory, after it waited for the stream."""
    issued = [write(HOST, "pinned"), copy(FETCH, "x", "pinned")]
    strided = [sync_lanes(MAIN, kind="strided copy"), write(HOST, "pinned")]
    assert kinds([*issued, *strided]) == ["write-after-read"]
    assert not races([*issued, sync_lanes(FETCH), *strided])


# Regions.


def test_disjoint_halves_do_not_meet() -> None:
    assert not races([write(MAIN, SLOT, (0, 32)), write(FETCH, SLOT, (32, 64))])
    assert races([write(MAIN, SLOT, (0, 33)), write(FETCH, SLOT, (32, 64))])


def test_interleaved_combs_do_not_meet() -> None:
    even, odd = Region(0, 56, 8, ((4, 16),)), Region(8, 64, 8, ((4, 16),))
    assert not races([write(MAIN, SLOT, even), write(FETCH, SLOT, odd)])
    assert races([write(MAIN, SLOT, even), write(FETCH, SLOT, Region(4, 60, 8, ((4, 16),)))])


def test_an_op_without_accesses_touches_nothing() -> None:
    assert not races([write(MAIN, SLOT), op(FETCH)])


def test_a_write_that_covers_a_part_leaves_the_rest_to_be_found() -> None:
    steps = [write(MAIN, SLOT), edge(MAIN, FETCH), write(FETCH, SLOT, (0, 32)), edge(FETCH, STORE)]
    assert not races([*steps, read(STORE, SLOT, (32, 64))])
    late = [write(MAIN, SLOT), write(FETCH, "other", (0, 32)), edge(FETCH, STORE)]
    assert races([*late, read(STORE, SLOT, (32, 64))])


# Freed memory.


def freed_while_read(*before_free: Step, allocated: list[Step] | None = None) -> list[Step]:
    return [
        alloc(MAIN, "old"),
        write(MAIN, "old"),
        edge(MAIN, STORE),
        read(STORE, "old"),
        *before_free,
        free("old"),
        *(allocated if allocated is not None else [alloc(MAIN, "new"), write(MAIN, "new")]),
    ]


def test_a_block_freed_while_another_stream_reads_it_may_be_overwritten() -> None:
    assert kinds(freed_while_read()) == ["reuse"]


def test_record_stream_holds_the_block_back() -> None:
    assert not races(freed_while_read(use_stream("old", STORE)))


def test_record_stream_of_another_stream_does_not() -> None:
    assert races(freed_while_read(use_stream("old", FETCH)))


def test_record_stream_covers_what_that_stream_had_waited_for_at_the_free() -> None:
    assert not races(freed_while_read(use_stream("old", FETCH), edge(STORE, FETCH)))
    late = [edge(STORE, FETCH), alloc(MAIN, "new"), write(MAIN, "new")]
    assert races(freed_while_read(use_stream("old", FETCH), allocated=late))


def test_record_stream_is_no_access() -> None:
    assert not races([write(MAIN, SLOT), use_stream(SLOT, FETCH)])


def test_record_stream_with_the_own_stream_of_the_block_does_nothing() -> None:
    """Even where that stream has waited for the reader: a use on a third one is not held back."""
    use_elsewhere = [alloc(MAIN, "new"), write(EXTRA, "new")]
    assert races(freed_while_read(use_stream("old", MAIN), edge(STORE, MAIN), allocated=use_elsewhere))


@pytest.mark.parametrize("place", ["before the free", "before the allocation", "before the first use"])
def test_a_wait_of_the_own_stream_is_as_good_as_record_stream(place: str) -> None:
    back = edge(STORE, MAIN)
    steps = {
        "before the free": freed_while_read(back),
        "before the allocation": freed_while_read(allocated=[back, alloc(MAIN, "new"), write(MAIN, "new")]),
        "before the first use": freed_while_read(allocated=[alloc(MAIN, "new"), back, write(MAIN, "new")]),
    }
    assert not races(steps[place])


def test_an_allocation_that_nothing_touches_is_no_race() -> None:
    assert not races(freed_while_read(allocated=[alloc(MAIN, "new")]))


def test_two_reads_of_reused_memory_are_no_race() -> None:
    assert not races(freed_while_read(allocated=[alloc(MAIN, "new"), read(MAIN, "new")]))


def test_any_size_of_the_class_may_be_served() -> None:
    assert races(freed_while_read(allocated=[alloc(MAIN, "new", 4 * NBYTES), write(MAIN, "new")]))
    assert not races(freed_while_read(allocated=[alloc(MAIN, "new", LARGE), write(MAIN, "new")]))


def test_blocks_come_from_the_pool_of_the_current_stream() -> None:
    assert not races(freed_while_read(allocated=[alloc(EXTRA, "new"), write(EXTRA, "new")]))


def test_blocks_older_than_the_free_cannot_be_reuse() -> None:
    steps = freed_while_read(allocated=[write(MAIN, "new")])
    assert not races([alloc(MAIN, "new"), *steps])
    assert not races(steps), "nor can one that the trace meets later, but that is older than the trace"


def test_a_block_is_freed_once_for_all_later_allocations() -> None:
    later = [alloc(MAIN, "first"), write(MAIN, "first"), alloc(MAIN, "second"), write(MAIN, "second")]
    (finding,) = races(freed_while_read(allocated=later))
    assert lines(finding) == ("reuse", 3, 6)
    assert [pair.second.site.line for pair in finding.also] == [8]


def test_memory_reused_on_its_own_stream_is_ordered_there() -> None:
    steps = [alloc(MAIN, "x"), write(MAIN, "x"), free("x"), alloc(MAIN, "y")]
    assert not races([*steps, write(MAIN, "y")])


def test_memory_reused_on_its_own_stream_is_not_ordered_elsewhere() -> None:
    """A fresh allocation is ordered with its own stream only: a use on another one has to wait for that."""
    steps = [alloc(MAIN, "x"), write(MAIN, "x"), free("x"), alloc(MAIN, "y")]
    assert kinds([*steps, write(FETCH, "y")]) == ["reuse"]
    assert not races([*steps, edge(MAIN, FETCH), write(FETCH, "y")])


def test_a_freed_block_that_the_host_waited_for_is_free() -> None:
    assert not races(freed_while_read(sync_lanes(STORE)))
    assert not races(freed_while_read(allocated=[sync_lanes(STORE), alloc(MAIN, "n"), write(MAIN, "n")]))


def test_copies_keep_the_pinned_memory_that_they_use() -> None:
    later = [alloc(MAIN, "pinned new"), write(HOST, "pinned new")]
    kept = [alloc(MAIN, "pinned"), copy(MAIN, SLOT, "pinned", kept=True), free("pinned"), *later]
    assert not races(kept)
    seen_by_a_kernel = [alloc(MAIN, "pinned"), read(MAIN, "pinned"), free("pinned"), *later]
    assert kinds(seen_by_a_kernel) == ["reuse"]


def test_pinned_memory_is_not_reused_for_device_memory() -> None:
    steps = [alloc(MAIN, "pinned"), read(STORE, "pinned"), free("pinned")]
    assert not races([*steps, alloc(MAIN, "new"), write(MAIN, "new")])


def test_a_reader_of_released_storage_is_found_beside_its_other_races() -> None:
    steps = [alloc(MAIN, "x"), write(MAIN, "x"), update(STORE, "x"), free("x"), alloc(MAIN, "y")]
    assert kinds([*steps, write(MAIN, "y")]) == ["read-after-write", "reuse"]


# What is forgotten is not what is still needed.


def test_a_reader_that_waited_does_not_hide_the_writer_from_another_reader() -> None:
    steps = [write(MAIN, SLOT), edge(MAIN, FETCH), read(FETCH, SLOT)]
    assert [lines(finding) for finding in races([*steps, read(STORE, SLOT)])] == [("read-after-write", 0, 3)]
    assert not races([*steps, edge(FETCH, STORE), read(STORE, SLOT)])


def test_what_the_host_saw_done_does_not_hide_what_comes_after() -> None:
    steps = [copy(MAIN, "pinned", "x"), sync_lanes(MAIN), read(HOST, "pinned"), copy(MAIN, "pinned", "x")]
    assert [lines(finding) for finding in races([*steps, read(HOST, "pinned")])] == [
        ("read-after-write", 3, 4)
    ]
    assert not races([*steps, sync_lanes(MAIN), read(HOST, "pinned")])


def test_a_write_that_waited_for_one_reader_does_not_hide_the_other() -> None:
    readers = [read(FETCH, SLOT), read(STORE, SLOT)]
    assert [lines(finding) for finding in races([*readers, edge(FETCH, MAIN), write(MAIN, SLOT)])] == [
        ("write-after-read", 1, 3)
    ]
    assert not races([*readers, edge(FETCH, MAIN), edge(STORE, MAIN), write(MAIN, SLOT)])


def test_an_ordered_write_of_a_part_does_not_hide_an_unordered_one_of_the_rest() -> None:
    steps = [write(FETCH, SLOT, (0, 32)), write(STORE, SLOT, (32, 64)), edge(FETCH, MAIN)]
    assert [lines(finding) for finding in races([*steps, read(MAIN, SLOT)])] == [("read-after-write", 1, 3)]


def test_a_later_free_does_not_hide_an_earlier_one() -> None:
    """The pool remembers for each cause the use that is done last, whichever block is freed last."""
    first, second = [alloc(MAIN, "a"), alloc(MAIN, "b")], [alloc(MAIN, "new"), write(FETCH, "new")]
    used = [write(MAIN, "a"), record(MAIN), write(MAIN, "b")]
    assert races([*first, *used, wait(FETCH), free("b"), free("a"), *second])
    assert races([*first, *used, wait(FETCH), free("a"), free("b"), *second])
    assert not races([*first, *used, edge(MAIN, FETCH), free("b"), free("a"), *second])
