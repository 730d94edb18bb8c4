"""Fetches start as early as they can, in order, and never before what they fetch was sent."""

from __future__ import annotations

from crosscurrent.gradient.traffic import Fetch, Prefetcher


class Work:
    """Numbered fetches, the numbers that were sent, and those that were started."""

    def __init__(self, number: int, *, sent: set[int]) -> None:
        self.sent = sent
        self.started: list[int] = []
        self.prefetcher = Prefetcher(
            (Fetch(lambda i=i: i in self.sent, lambda i=i: self.started.append(i)) for i in range(number)), 2
        )


def test_as_many_are_in_flight_as_there_are_slots() -> None:
    work = Work(5, sent={0, 1, 2, 3, 4})
    assert work.started == [0, 1]
    work.prefetcher.done()
    assert work.started == [0, 1, 2]


def test_nothing_is_fetched_before_it_was_sent() -> None:
    work = Work(3, sent=set())
    assert work.started == []
    work.sent.add(0)
    work.prefetcher.top_up()
    assert work.started == [0]


def test_what_was_sent_waits_for_those_before_it() -> None:
    work = Work(3, sent={1, 2})
    assert work.started == []
    work.sent.add(0)
    work.prefetcher.top_up()
    assert work.started == [0, 1]


def test_a_send_does_not_start_more_than_there_are_slots() -> None:
    work = Work(4, sent={0, 1})
    work.sent |= {2, 3}
    work.prefetcher.top_up()
    assert work.started == [0, 1]


def test_the_end_of_the_work_is_the_end_of_the_fetches() -> None:
    work = Work(2, sent={0, 1})
    work.prefetcher.done()
    work.prefetcher.done()
    assert work.started == [0, 1]
