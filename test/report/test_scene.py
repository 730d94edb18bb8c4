"""Which records are drawn for a race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crosscurrent.report.html.scene import ROWS, SEARCH, Scene
from crosscurrent.trace.records import HostWait, Op, RecordEvent, WaitEvent

HOST, MAIN, FETCH, SEND = 0, 1, 2, 3


def chosen(trace: Any) -> list[int]:
    report = trace.report()
    return [record.index for record in Scene(report.findings[0], report.records).chosen]


def write_and_read(trace: Any, between: Callable[[], object] = lambda: None) -> tuple[int, int]:
    """A write on the lane that fetches and a read on the main lane, with nothing that orders them."""
    trace.alloc(1, MAIN, 64)
    first = trace.op(FETCH, "aten.copy_.default", (1, "w"), shape=(4,))
    between()
    return first, trace.op(MAIN, "aten.neg.default", (1, "r"), shape=(4,))


def test_the_pair_is_always_drawn(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    first, second = write_and_read(trace)
    assert chosen(trace) == [first, second]


def test_a_wait_that_came_too_early_is_drawn_with_its_recording(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    record = trace.record(FETCH)
    early = trace.wait(MAIN, record)
    first, second = write_and_read(trace)
    assert chosen(trace) == [early - 1, early, first, second]


def test_a_recording_that_nobody_waits_for_is_drawn(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    first, second = write_and_read(trace, lambda: trace.record(FETCH))
    assert chosen(trace) == [first, first + 1, second]


def test_a_wait_for_another_lane_in_between_is_drawn(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    first, second = write_and_read(trace, lambda: trace.wait(MAIN, trace.record(SEND)))
    assert chosen(trace) == [first, first + 1, first + 2, second]


def test_a_wait_of_a_third_lane_is_not(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    first, second = write_and_read(trace, lambda: trace.wait(SEND, trace.record(MAIN)))
    assert chosen(trace) == [first, second]


def test_a_host_wait_in_between_is_drawn(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    first, second = write_and_read(trace, lambda: trace.host_wait("synchronize", SEND))
    assert chosen(trace) == [first, first + 1, second]


def test_no_more_is_drawn_than_fits(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()

    def much() -> None:
        for _ in range(40):
            trace.wait(MAIN, trace.record(SEND))
            trace.op(FETCH, "aten.neg.default", (1, "r"), shape=(4,))

    first, second = write_and_read(trace, much)
    drawn = chosen(trace)
    assert len(drawn) <= ROWS
    assert {first, second} <= set(drawn)
    assert drawn == sorted(drawn)


def test_a_race_across_a_long_trace_is_drawn(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    trace.alloc(2, SEND, 64)

    def much() -> None:
        for _ in range(2 * SEARCH):
            trace.op(SEND, "aten.neg.default", (2, "w"), shape=(4,))

    first, second = write_and_read(trace, much)
    assert chosen(trace) == [first, second]
    report = trace.report()
    scene = Scene(report.findings[0], report.records)
    assert scene.left_out(*scene.chosen) == 2 * SEARCH


def test_a_trace_that_was_cut_is_drawn(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    trace.host_wait("item", SEND)
    first, second = write_and_read(trace)
    report = trace.report()
    scene = Scene(report.findings[0], report.records[1:])
    assert [record.index for record in scene.chosen] == [first, second]


def test_only_what_has_a_place_on_a_lane_is_drawn(racy: Any) -> None:
    report = racy.report()
    for record in Scene(report.findings[0], report.records).chosen:
        assert isinstance(record, Op | RecordEvent | WaitEvent | HostWait)
