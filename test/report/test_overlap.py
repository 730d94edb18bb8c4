"""The analysis of overlap on timelines made by hand, whose answers are whole numbers."""

from __future__ import annotations

import json

import pytest

from crosscurrent.report.bounds import bounds
from crosscurrent.report.costs import Direction
from crosscurrent.report.makespan import Mark, Step, Stop, Wait, Work
from crosscurrent.report.overlap import Activity, Blocked, Timeline, analyse
from crosscurrent.trace.records import Site

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
LOAD, STORE = Site("train.py", 10, "load"), Site("train.py", 20, "store")
MAIN, FETCH = 1, 2


def kernel(start: int, stop: int, device: int = 0) -> Activity:
    return Activity(start, stop, device, "main", "kernel")


def copy(
    start: int,
    stop: int,
    direction: Direction = IN,
    *,
    stream: str = "fetch",
    site: Site = LOAD,
    device: int = 0,
    pageable: bool = False,
) -> Activity:
    return Activity(start, stop, device, stream, "copy", direction, stop - start, site, pageable)


def test_a_copy_behind_a_kernel_is_hidden() -> None:
    found = analyse(Timeline(activities=[kernel(0, 100), copy(20, 60)]))
    assert (found.transfer, found.hidden, found.exposed, found.hidden_share) == (40, 40, 0, 1.0)
    assert found.copies == ()


def test_a_copy_before_the_kernel_is_exposed() -> None:
    found = analyse(Timeline(activities=[copy(0, 40), kernel(40, 100)]))
    assert (found.transfer, found.hidden, found.exposed, found.hidden_share) == (40, 0, 40, 0.0)
    assert [part.exposed for part in found.copies] == [40]


def test_intervals_are_united_and_not_added() -> None:
    # Two copies at once, 0..40 and 20..60; a kernel 30..50, and another inside of it.
    activities = [copy(0, 40), copy(20, 60, OUT, stream="send"), kernel(30, 50), kernel(35, 45)]
    found = analyse(Timeline(activities=activities))
    assert (found.transfer, found.kernel, found.hidden, found.exposed) == (60, 20, 20, 40)
    assert found.idle == 0


def test_parts_have_the_times_of_their_own_copies() -> None:
    activities = [copy(0, 40), copy(20, 60, OUT, stream="send", site=STORE), kernel(30, 50)]
    found = analyse(Timeline(activities=activities))
    by_direction = {
        part.name: (part.num, part.time, part.hidden, part.exposed) for part in found.by_direction
    }
    assert by_direction == {"host to device": (1, 40, 10, 30), "device to host": (1, 40, 20, 20)}
    assert [part.name for part in found.by_stream] == ["fetch", "send"]
    assert [(part.name, part.exposed) for part in found.by_site] == [("train.py:10", 30), ("train.py:20", 20)]


def test_a_kernel_of_another_device_hides_nothing() -> None:
    found = analyse(Timeline(activities=[kernel(0, 100, device=1), copy(20, 60)]))
    assert (found.hidden, found.exposed) == (0, 40)


def test_a_kernel_that_only_touches_hides_nothing() -> None:
    assert analyse(Timeline(activities=[kernel(0, 20), copy(20, 60), kernel(60, 80)])).hidden == 0


def test_the_most_exposed_copies_come_first() -> None:
    found = analyse(Timeline(activities=[copy(0, 10), kernel(10, 100), copy(95, 130), copy(50, 90)]))
    assert [(part.time, part.exposed) for part in found.copies] == [(35, 30), (10, 10)]


def test_host_waits_are_united_by_call_site() -> None:
    blocked = [
        Blocked(0, 10, "item", LOAD),
        Blocked(50, 60, "item", LOAD),
        Blocked(55, 75, "stream synchronize", STORE),
    ]
    found = analyse(Timeline(activities=[kernel(0, 100)], blocked=blocked))
    assert found.blocked == 35
    assert [(part.call, part.num, part.time) for part in found.blocked_by] == [
        ("item", 2, 20),
        ("stream synchronize", 1, 20),
    ]


def test_idle_is_what_neither_computes_nor_copies() -> None:
    found = analyse(Timeline(activities=[kernel(10, 20), copy(40, 50)], stop=100))
    assert (found.total, found.idle) == (100, 80)


def test_nothing_ran() -> None:
    found = analyse(Timeline(activities=[]))
    assert (found.total, found.transfer, found.hidden_share, found.idle) == (0, 0, None, 0)
    assert any("nothing to hide" in sentence for sentence in found.sentences)


# The sentences: each reason for a small gain, and its twin for which it is not said.


def said(*activities: Activity, blocked: tuple[Blocked, ...] = ()) -> str:
    return " ".join(analyse(Timeline(activities=activities, blocked=blocked)).sentences)


def test_hidden_already() -> None:
    assert "hidden already" in said(kernel(0, 1000), copy(0, 500))
    assert "hidden already" not in said(kernel(0, 1000), copy(900, 1500))


def test_little_to_transfer() -> None:
    assert "little to transfer" in said(copy(0, 10), kernel(10, 1000))
    assert "little to transfer" not in said(copy(0, 300), kernel(300, 1000))


def test_copies_longer_than_kernels() -> None:
    assert "kernels can hide at most 25 %" in said(copy(0, 400), kernel(400, 500))
    assert "can hide at most" not in said(copy(0, 100), kernel(100, 500))


def test_a_share_that_is_not_the_whole_does_not_read_100_percent() -> None:
    text = said(kernel(0, 999_999), copy(0, 1_000_000))
    assert text.startswith("99 % of the transfer time")
    assert said(kernel(0, 100), copy(0, 100)).startswith("100 % of the transfer time")


def test_pageable_copies_are_told() -> None:
    assert "1 of 2 copies is with pageable memory" in said(
        kernel(0, 9), copy(0, 2, pageable=True), copy(2, 4)
    )
    assert "pageable" not in said(kernel(0, 9), copy(0, 2), copy(2, 4))


def test_blocked_host_is_told() -> None:
    text = said(kernel(0, 100), copy(0, 2), blocked=(Blocked(0, 60, "item", STORE),))
    assert "blocked in 1 call for 60 ns (60 %)" in text
    assert "item at train.py:20" in text
    assert "blocked nowhere" in said(kernel(0, 100), copy(0, 2))


# The makespans.


def prefetch(*, num_slots: int) -> tuple[list[Step], list[tuple[str, Site | None] | None]]:
    """Four batches: a copy of 30 each, a kernel of 50 each; a slot is filled when its reader is done."""
    steps: list[Step] = []
    waits: list[tuple[str, Site | None] | None] = []

    def add(step: Step, wait: tuple[str, Site | None] | None = None) -> None:
        steps.append(step)
        waits.append(wait)

    for batch in range(4):
        if batch >= num_slots:
            add(Wait(FETCH, 100 + batch - num_slots), ("wait_event", LOAD))
        add(Work(FETCH, 30, 0, "copies"))
        add(Mark(FETCH, batch))
        add(Wait(MAIN, batch), ("wait_event", STORE))
        add(Work(MAIN, 50))
        add(Mark(MAIN, 100 + batch))
    return steps, waits


def test_two_slots_hide_all_copies_but_the_first() -> None:
    found = bounds(*prefetch(num_slots=2))
    assert (found.edges, found.device_edges, found.busiest, found.busiest_name) == (230, 230, 200, "kernels")


def test_one_slot_hides_none_and_the_wait_for_the_reader_is_named() -> None:
    found = bounds(*prefetch(num_slots=1))
    assert found.edges == 4 * (30 + 50)
    # Without the waits for the reader it is as with two slots: 230. Without those for the copies, the
    # kernels run one after the other from the start: 200, and the last copy is done at 180.
    assert [(obstacle.site, obstacle.gain) for obstacle in found.obstacles] == [(STORE, 120), (LOAD, 90)]


def test_a_host_wait_stands_in_the_way() -> None:
    with_stop: list[Step] = [Work(FETCH, 30), Stop(None, (FETCH,)), Work(MAIN, 50)]
    found = bounds(with_stop, [None, ("item", LOAD), None])
    assert (found.edges, found.device_edges, found.busiest) == (80, 50, 50)
    assert [(obstacle.call, obstacle.gain) for obstacle in found.obstacles] == [("item", 30)]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_no_makespan_is_below_the_busiest_lane(num_slots: int) -> None:
    found = bounds(*prefetch(num_slots=num_slots))
    assert found.busiest <= found.device_edges <= found.edges


def test_makespans_are_told() -> None:
    program, waits = prefetch(num_slots=1)
    timeline = Timeline(activities=[copy(0, 30), kernel(30, 400)], program=program, waits=waits)
    text = " ".join(analyse(timeline).sentences)
    assert "would allow 320 ns" in text
    assert "In the way stands `wait_event`" in text


def test_the_document_holds_it_all() -> None:
    program, waits = prefetch(num_slots=1)
    activities = [copy(0, 30), kernel(20, 400), copy(390, 410, OUT, site=STORE)]
    blocked = [Blocked(0, 10, "item", None)]
    found = analyse(Timeline(activities=activities, blocked=blocked, program=program, waits=waits))
    document = json.loads(json.dumps(found.to_json()))
    assert (document["transfer"], document["hidden"], document["exposed"]) == (50, 20, 30)
    assert document["hidden_share"] == 0.4
    assert document["by_site"][0] == {
        "name": "train.py:10",
        "copies": 1,
        "bytes": 30,
        "time": 30,
        "hidden": 10,
        "exposed": 20,
    }
    assert document["blocked_by"][0]["file"] is None
    assert document["bounds"]["edges"] == 320
    assert document["bounds"]["obstacles"][0]["line"] == STORE.line
    assert document["sentences"] == list(found.sentences)
