"""What orders the operations of a trace, each rule with a twin that shows what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crosscurrent.schedules.order import Frontier, PartialOrder
from crosscurrent.trace.records import HOST, NO_EVENT

if TYPE_CHECKING:
    from .conftest import Script

MAIN, SIDE, THIRD = 1, 2, 3


def test_operations_of_one_lane_keep_their_order(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    script.op(MAIN, (2, "w"))
    assert script.order.before(0, 1)
    assert not script.order.before(1, 0)


def test_two_lanes_are_free(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    script.op(SIDE, (2, "w"))
    assert not script.order.ordered(0, 1)


def test_an_event_orders_what_the_lane_had_been_given_and_nothing_later(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    event = script.record(MAIN)
    script.op(MAIN, (2, "w"))
    script.wait(SIDE, event)
    script.op(SIDE, (3, "w"))
    assert script.order.before(0, 2)
    assert not script.order.ordered(1, 2)


def test_work_given_to_the_waiter_before_the_wait_is_free(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    event = script.record(MAIN)
    script.op(SIDE, (3, "w"))
    script.wait(SIDE, event)
    assert not script.order.ordered(0, 1)


def test_waits_are_transitive_over_a_lane_without_operations(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    script.edge(MAIN, SIDE)
    script.edge(SIDE, THIRD)
    script.op(THIRD, (1, "r"))
    assert script.order.before(0, 1)


def test_waiting_on_an_event_that_nobody_recorded_orders_nothing(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    script.wait(SIDE, NO_EVENT)
    script.op(SIDE, (1, "r"))
    assert not script.order.ordered(0, 1)


def test_launching_comes_after_what_the_host_did(script: Script) -> None:
    script.op(HOST, (1, "w"))
    script.op(MAIN, (1, "r"))
    script.op(HOST, (1, "w"))
    assert script.order.before(0, 1)
    assert not script.order.ordered(1, 2)


def test_a_wait_of_the_host_orders_its_later_acts_and_all_that_it_issues(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    script.synchronize(MAIN)
    script.op(HOST, (1, "r"))
    script.op(SIDE, (1, "r"))
    assert script.order.before(0, 1)
    assert script.order.before(0, 2)


def test_a_wait_of_the_host_for_one_lane_says_nothing_of_another(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    script.op(SIDE, (2, "w"))
    script.synchronize(SIDE)
    script.op(HOST, (1, "r"))
    assert not script.order.ordered(0, 2)
    assert script.order.before(1, 2)


def test_a_host_wait_on_an_event_orders_what_was_recorded(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    event = script.record(MAIN)
    script.op(MAIN, (1, "w"))
    script.wait(HOST, event)
    script.op(HOST, (1, "r"))
    assert script.order.before(0, 2)
    assert not script.order.ordered(1, 2)


def test_memory_that_is_handed_out_again_waits_for_what_the_allocator_was_told_of(script: Script) -> None:
    script.alloc(1, MAIN)
    script.op(MAIN, (1, "w"))
    script.edge(MAIN, SIDE)
    script.op(SIDE, (1, "r"))  # record_stream covers this
    script.use(1, SIDE)
    script.free(1)
    script.op(SIDE, (3, "w"))  # and not this
    script.alloc(2, MAIN)
    script.op(MAIN, (2, "w"))
    fresh, reused = PartialOrder.of(script.records), PartialOrder.of(script.records, {2: 1})
    assert not fresh.ordered(1, 3)
    assert reused.before(1, 3)
    assert not reused.ordered(2, 3)


def test_memory_that_is_handed_out_again_does_not_wait_for_what_it_was_not_told_of(script: Script) -> None:
    script.alloc(1, MAIN)
    script.op(SIDE, (1, "r"))
    script.free(1)
    script.alloc(2, MAIN)
    script.op(MAIN, (2, "w"))
    assert not PartialOrder.of(script.records, {2: 1}).ordered(0, 1)


def test_only_program_order_and_its_like_are_schedules(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    script.edge(MAIN, SIDE)
    script.op(SIDE, (1, "r"))
    script.op(THIRD, (2, "w"))
    order = script.order
    assert order.allows(order.program)
    assert order.allows((2, 0, 1))
    assert not order.allows((1, 0, 2))
    assert not order.allows((0, 1))
    assert not order.allows((0, 0, 1))
    assert not order.allows((0, 1, 3))


def test_edges_are_reduced_to_those_that_say_something(script: Script) -> None:
    script.op(MAIN, (1, "w"))
    script.edge(MAIN, SIDE)
    script.op(SIDE, (1, "r"))
    script.edge(MAIN, THIRD)
    script.edge(SIDE, THIRD)
    script.op(THIRD, (1, "r"))
    assert script.order.predecessors == ((), (0,), (1,))


def test_the_frontier_offers_at_most_one_operation_of_a_lane(script: Script) -> None:
    for _ in range(2):
        script.op(MAIN, (1, "w"))
        script.op(SIDE, (2, "w"))
    frontier = Frontier(script.order)
    assert frontier.ready == [0, 1]
    frontier.run(1)
    assert frontier.ready == [0, 3]


def test_operations_that_touch_nothing_are_no_part_of_the_order(script: Script) -> None:
    script.op(MAIN)
    script.op(MAIN, (1, "w"))
    assert len(script.order) == 1
