"""Programs whose makespan can be worked out by hand, with and without each edge."""

from __future__ import annotations

from crosscurrent.report.makespan import Mark, Step, Stop, Wait, Work, play
from crosscurrent.trace.records import HOST, NO_EVENT

MAIN, FETCH = 1, 2


def test_lanes_without_an_edge_run_side_by_side() -> None:
    run = play([Work(MAIN, 10), Work(FETCH, 7)])
    assert (run.start, run.stop, run.makespan) == ([0, 0], [10, 7], 10)


def test_work_of_one_lane_runs_in_order() -> None:
    run = play([Work(MAIN, 10), Work(MAIN, 7)])
    assert (run.start, run.makespan, run.path) == ([0, 10], 17, [0, 1])


def test_an_edge_holds_the_waiter_back() -> None:
    run = play([Work(FETCH, 7), Mark(FETCH, 5), Wait(MAIN, 5), Work(MAIN, 10)])
    assert (run.makespan, run.path, run.edges) == (17, [0, 3], [2])


def test_a_wait_covers_only_what_was_recorded_before() -> None:
    run = play([Mark(FETCH, 5), Work(FETCH, 7), Wait(MAIN, 5), Work(MAIN, 10)])
    assert (run.makespan, run.edges) == (10, [])


def test_a_wait_for_nothing_orders_nothing() -> None:
    assert play([Work(FETCH, 7), Wait(MAIN, NO_EVENT), Work(MAIN, 10)]).makespan == 10


def test_a_wait_that_comes_too_late_holds_nothing_back() -> None:
    run = play([Work(FETCH, 7), Mark(FETCH, 5), Work(MAIN, 10), Wait(MAIN, 5)])
    assert (run.makespan, run.edges) == (10, [])


def test_a_dropped_edge_is_gone() -> None:
    program: list[Step] = [Work(FETCH, 7), Mark(FETCH, 5), Wait(MAIN, 5), Work(MAIN, 10)]
    assert play(program, dropped={2}).makespan == 10


def test_the_host_issues_one_after_the_other() -> None:
    run = play([Work(MAIN, 1, issue=4), Work(FETCH, 1, issue=4)])
    assert (run.start, run.makespan) == ([4, 8], 9)
    assert play([Work(MAIN, 1, issue=4), Work(FETCH, 1, issue=4)], host_is_free=True).start == [0, 0]


def test_a_host_wait_holds_up_all_that_is_issued_later() -> None:
    run = play([Work(FETCH, 7), Stop(None, (FETCH,)), Work(MAIN, 10)], host_is_free=True)
    assert (run.makespan, run.path, run.edges) == (17, [0, 2], [1])
    assert (run.start[1], run.stop[1]) == (0, 7), "the host stood still for as long"


def test_a_host_wait_for_another_lane_does_not() -> None:
    assert play([Work(FETCH, 7), Stop(None, (MAIN,)), Work(MAIN, 10)], host_is_free=True).makespan == 10


def test_a_host_wait_for_an_event_waits_for_what_it_covers() -> None:
    program: list[Step] = [Work(FETCH, 7), Mark(FETCH, 5), Work(FETCH, 50), Stop(5, ()), Work(MAIN, 1)]
    run = play(program, host_is_free=True)
    assert (run.start[4], run.makespan) == (7, 57)


def test_work_of_the_host_holds_up_what_it_issues() -> None:
    run = play([Work(HOST, 6), Work(MAIN, 2)], host_is_free=True)
    assert (run.start[1], run.path) == (6, [0, 1])


def test_a_wait_reaches_through_a_lane_that_only_waits() -> None:
    program: list[Step] = [
        Work(FETCH, 7),
        Mark(FETCH, 5),
        Wait(MAIN, 5),
        Mark(MAIN, 6),
        Wait(3, 6),
        Work(3, 1),
    ]
    assert play(program).makespan == 8


def test_nothing_takes_no_time() -> None:
    assert play([]) == ([], [], 0, [], [])
