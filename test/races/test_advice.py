"""Which waits are needed: against dropping them from the trace and asking the oracle again."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from race_oracle import Oracle, Pair
from race_programs import (
    EXTRA,
    FETCH,
    HOST,
    MAIN,
    STORE,
    Step,
    alloc,
    at,
    copy,
    edge,
    free,
    info_for,
    lines,
    op,
    read,
    record,
    records_of,
    sync,
    sync_lanes,
    update,
    use_stream,
    wait,
    write,
)
from race_strategies import programs, repaired_programs

from crosscurrent.races.advice import Advice, Verdict, advise
from crosscurrent.races.causes import Cause
from crosscurrent.races.needs import skeleton_of
from crosscurrent.trace.records import HostWait, Record, WaitEvent


def advice(steps: list[Step]) -> list[Advice]:
    return advise(records_of(steps), info_for(steps))


def pairs_of(causes: list[Cause]) -> set[Pair]:
    return {Pair(cause.kind.value, cause.first.index, cause.second.index) for cause in causes}


def new_pairs(records: list[Record], dropped: Collection[int]) -> set[Pair]:
    """The races that the oracle sees once the edges of these numbers are gone."""
    edges = [each.index for each in records if isinstance(each, WaitEvent | HostWait)]
    gone = {edges[number] for number in dropped}
    return Oracle([each for each in records if each.index not in gone]).pairs - Oracle(records).pairs


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(repaired_programs(), st.data())
def test_an_edge_is_necessary_exactly_when_the_oracle_sees_a_race_without_it(
    steps: list[Step], data: st.DataObject
) -> None:
    records = records_of(steps)
    skeleton = skeleton_of(records)
    every = range(len(skeleton.edges))
    some = data.draw(st.sets(st.sampled_from(every))) if every else set()
    for masked in (*({number} for number in every), some):
        broken = pairs_of(skeleton.broken(masked))
        expected = new_pairs(records, masked)
        assert broken <= expected
        assert bool(broken) == bool(expected)
        assert bool(skeleton.broken(masked, first_only=True)) == bool(expected)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_an_edge_of_a_racy_program_protects_only_what_it_protects(steps: list[Step]) -> None:
    records = records_of(steps)
    skeleton = skeleton_of(records)
    for number in range(len(skeleton.edges)):
        assert pairs_of(skeleton.broken({number})) <= new_pairs(records, {number})


def double_buffer(num_steps: int) -> list[Step]:
    """Slots refilled on one lane and read on another; the same call sites (lines) in each step."""
    steps: list[Step] = []
    for number in range(num_steps):
        slot = f"slot {number % 2}"
        steps += [
            at(1, wait(FETCH, f"consumed {slot}")),
            at(2, copy(FETCH, slot, "pinned source", kept=True)),
            at(3, record(FETCH, f"filled {slot}")),
            at(4, wait(MAIN, f"filled {slot}")),
            at(5, read(MAIN, slot)),
            at(6, record(MAIN, f"consumed {slot}")),
        ]
    return steps


def test_both_waits_of_a_double_buffer_are_necessary() -> None:
    refill, fetch = advice(double_buffer(6))
    assert (refill.site.line, refill.verdict, refill.waiter) == (1, Verdict.NECESSARY, "host_to_device")
    assert [lines(finding) for finding in refill.protects] == [("write-after-read", 5, 2)]
    assert (fetch.site.line, fetch.verdict, fetch.waited_for) == (4, Verdict.NECESSARY, "host_to_device")
    assert [lines(finding) for finding in fetch.protects] == [("read-after-write", 2, 5)]


def test_single_waits_are_told_apart() -> None:
    """The first two refills have nothing to wait for; each of the other four is needed by itself."""
    refill, fetch = advice(double_buffer(6))
    assert (refill.count, refill.num_needed, refill.redundant_alone) == (6, 4, 2)
    assert (fetch.count, fetch.num_needed) == (6, 6)


def test_a_second_wait_for_the_same_is_redundant_alone() -> None:
    steps = [write(MAIN, "x"), record(MAIN), wait(FETCH), at(7, wait(FETCH)), read(FETCH, "x")]
    assert [(each.site.line, each.verdict) for each in advice(steps)] == [
        (2, Verdict.REDUNDANT),
        (7, Verdict.REDUNDANT),
    ]


def test_two_waits_of_one_call_site_that_back_each_other_up_are_necessary_together() -> None:
    steps = [write(MAIN, "x"), record(MAIN), at(2, wait(FETCH)), at(2, wait(FETCH)), read(FETCH, "x")]
    (both,) = advice(steps)
    assert (both.verdict, both.count, both.num_needed) == (Verdict.NECESSARY, 2, 0)


def test_a_wait_for_what_nobody_touches_is_redundant() -> None:
    (only,) = advice([write(MAIN, "x"), edge(MAIN, FETCH), read(FETCH, "y")])
    assert (only.kind, only.verdict) == ("wait_stream", Verdict.REDUNDANT)


def test_a_wait_for_an_event_that_nobody_recorded_is_no_edge() -> None:
    (only,) = advice([wait(FETCH), read(FETCH, "x")])
    assert (only.verdict, only.waited_for) == (Verdict.NO_EDGE, "")


def test_a_wait_that_only_guards_the_reuse_of_memory_is_necessary() -> None:
    steps = [
        alloc(MAIN, "x"),
        write(MAIN, "x"),
        edge(MAIN, STORE),
        read(STORE, "x"),
        edge(STORE, MAIN),
        free("x"),
        alloc(MAIN, "y"),
        write(MAIN, "y"),
    ]
    out, back = advice(steps)
    assert [lines(finding) for finding in out.protects] == [("read-after-write", 1, 3)]
    assert [lines(finding) for finding in back.protects] == [("reuse", 3, 7)]


def test_the_same_wait_beside_record_stream_is_redundant() -> None:
    steps = [
        alloc(MAIN, "x"),
        write(MAIN, "x"),
        edge(MAIN, STORE),
        read(STORE, "x"),
        use_stream("x", STORE),
        edge(STORE, MAIN),
        free("x"),
        alloc(MAIN, "y"),
        write(MAIN, "y"),
    ]
    assert [each.verdict for each in advice(steps)] == [Verdict.NECESSARY, Verdict.REDUNDANT]


def test_a_synchronize_between_streams_is_told_its_gpu_side_edge() -> None:
    (only,) = advice([write(MAIN, "x"), sync_lanes(MAIN), read(FETCH, "x")])
    assert only.blocks_host
    assert only.verdict is Verdict.NECESSARY
    assert "host_to_device.wait_event(event)" in only.replacement


def test_a_synchronize_before_the_host_reads_is_told_to_wait_late() -> None:
    steps = [copy(MAIN, "pinned", "x"), record(MAIN), sync(), update(MAIN, "x"), read(HOST, "pinned")]
    (only,) = advice(steps)
    assert only.verdict is Verdict.NECESSARY
    assert "train.py:4" in only.replacement


def test_a_synchronize_that_protects_nothing_is_told_to_go() -> None:
    (only,) = advice([write(MAIN, "x"), sync_lanes(MAIN), read(MAIN, "x")])
    assert only.verdict is Verdict.REDUNDANT
    assert only.replacement.startswith("drop it")


@pytest.mark.parametrize("kind", ["item", "blocking copy", "pageable copy", "data-dependent shape"])
def test_a_wait_for_a_value_is_not_called_redundant(kind: str) -> None:
    """The op writes nothing that the trace follows, so its result is the host's, to do with as it likes."""
    (only,) = advice([write(MAIN, "x"), read(MAIN, "x"), sync_lanes(MAIN, kind=kind)])
    assert only.verdict is Verdict.VALUE
    assert "copy the value to pinned memory with `non_blocking=True`" in only.replacement


def test_a_blocking_copy_to_the_device_is_redundant() -> None:
    (only,) = advice([copy(MAIN, "x", "pinned"), sync_lanes(MAIN, kind="blocking copy"), read(MAIN, "x")])
    assert only.verdict is Verdict.REDUNDANT
    assert only.replacement == "copy with `non_blocking=True`, and pinned memory on the host's side"


def test_a_blocking_copy_that_lets_the_host_refill_its_source_is_necessary() -> None:
    refill = [copy(MAIN, "x", "pinned"), sync_lanes(MAIN, kind="blocking copy"), write(HOST, "pinned")]
    (only,) = advice(refill)
    assert [lines(finding) for finding in only.protects] == [("write-after-read", 0, 2)]


def test_a_query_does_not_block() -> None:
    steps = [copy(MAIN, "pinned", "x"), record(MAIN), sync(kind="query"), read(HOST, "pinned")]
    (only,) = advice(steps)
    assert (only.blocks_host, only.verdict, only.replacement) == (False, Verdict.NECESSARY, "")


def test_what_raced_already_is_not_credited_to_an_edge() -> None:
    steps = [write(MAIN, "x"), read(STORE, "x"), write(MAIN, "y"), edge(MAIN, FETCH), op(FETCH, reads=["y"])]
    (only,) = advice(steps)
    assert [lines(finding) for finding in only.protects] == [("read-after-write", 2, 4)]


def test_an_event_that_passes_the_order_on_keeps_an_edge_necessary() -> None:
    """The clocks agree again after the second edge; the event recorded before that is what differs."""
    steps = [
        write(MAIN, "x"),
        edge(MAIN, FETCH),
        record(FETCH, "passed on"),
        edge(MAIN, FETCH),
        wait(STORE, "passed on"),
        read(STORE, "x"),
    ]
    first, second, passed_on = advice(steps)
    assert [lines(finding) for finding in first.protects] == [("read-after-write", 0, 5)]
    assert second.verdict is Verdict.REDUNDANT
    assert passed_on.verdict is Verdict.NECESSARY


def test_what_record_stream_covers_keeps_an_edge_necessary() -> None:
    """The clocks agree again after the second edge; what the pool holds back is what differs."""
    steps = [
        alloc(MAIN, "x"),
        write(MAIN, "x"),
        edge(MAIN, STORE),
        read(STORE, "x"),
        edge(STORE, FETCH),
        use_stream("x", FETCH),
        free("x"),
        edge(STORE, FETCH),
        edge(FETCH, EXTRA),
        alloc(MAIN, "y"),
        write(MAIN, "y"),
    ]
    by_line = {each.site.line: each for each in advice(steps)}
    assert [lines(finding) for finding in by_line[4].protects] == [("reuse", 3, 10)]
    assert by_line[7].verdict is Verdict.REDUNDANT


def test_an_edge_after_a_race_is_still_credited_with_what_it_protects() -> None:
    steps = [
        alloc(MAIN, "x"),
        read(STORE, "x"),
        free("x"),
        alloc(MAIN, "racy"),
        write(MAIN, "racy"),
        edge(STORE, MAIN),
        alloc(MAIN, "fine"),
        write(MAIN, "fine"),
    ]
    (only,) = advice(steps)
    assert [lines(finding) for finding in only.protects] == [("reuse", 1, 7)]


def test_advice_prints_what_it_holds() -> None:
    (only,) = advice([write(MAIN, "x"), sync_lanes(MAIN), read(FETCH, "x")])
    text = str(only)
    assert text.startswith("necessary: synchronize at /program/train.py:1")
    assert "protects read-after-write" in text
    assert "instead:" in text
