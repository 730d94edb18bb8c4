"""A finding: one for each missing edge, the same each time, and in words that name the fix."""

from __future__ import annotations

import re

import pytest
from race_programs import (
    EXTRA,
    FETCH,
    HOST,
    MAIN,
    NAMES,
    STORE,
    Step,
    alloc,
    at,
    copy,
    detect,
    edge,
    free,
    info_for,
    lines,
    op,
    races,
    read,
    record,
    sync,
    update,
    use_stream,
    wait,
    write,
)

from crosscurrent.races import regions
from crosscurrent.races.causes import RaceKind
from crosscurrent.races.detector import Detector
from crosscurrent.trace.records import (
    Access,
    Free,
    Lane,
    MemoryKind,
    Op,
    Region,
    Site,
    TraceInfo,
    Unknown,
)

# One cause, one finding.


def test_ten_tensors_of_one_line_are_one_finding() -> None:
    steps = [at(1, write(MAIN, f"tensor {i}")) for i in range(10)]
    steps += [at(2, read(FETCH, f"tensor {i}")) for i in range(10)]
    (finding,) = races(steps)
    assert finding.count == 10


def test_an_op_on_a_list_of_tensors_counts_once() -> None:
    names = [f"tensor {i}" for i in range(10)]
    (finding,) = races([op(MAIN, writes=names), op(FETCH, reads=names)])
    assert finding.count == 1


def test_lines_that_lack_the_same_edge_are_one_finding_that_names_them_all() -> None:
    steps = [write(MAIN, f"tensor {i}") for i in range(4)] + [read(FETCH, f"tensor {i}") for i in range(4)]
    (finding,) = races(steps)
    assert lines(finding) == ("read-after-write", 0, 4)
    assert {(pair.first.site.line, pair.second.site.line) for pair in finding.also} == {
        (1, 5),
        (2, 6),
        (3, 7),
    }
    assert "after op at /program/train.py:3" in finding.fix, "the edge has to come after the last of them"
    assert "before op at /program/train.py:4" in finding.fix


def test_two_missing_edges_are_two_findings() -> None:
    """One edge cannot repair both: the second write is issued after the first read."""
    steps = [write(MAIN, "x"), read(FETCH, "x"), write(MAIN, "y"), read(FETCH, "y")]
    assert [lines(finding) for finding in races(steps)] == [
        ("read-after-write", 0, 1),
        ("read-after-write", 2, 3),
    ]


def test_missing_edges_between_other_lanes_are_other_findings() -> None:
    steps = [write(MAIN, "x"), write(STORE, "y"), read(FETCH, "x"), read(FETCH, "y")]
    assert len(races(steps)) == 2


def test_a_loop_over_streams_that_lacks_its_edge_is_one_finding() -> None:
    steps = [at(1, write(lane, f"part {lane}")) for lane in (FETCH, STORE, EXTRA)]
    steps += [at(2, op(MAIN, reads=[f"part {lane}" for lane in (FETCH, STORE, EXTRA)]))]
    (finding,) = races(steps)
    assert finding.count == 3
    assert {finding.first.lane, *(pair.first.lane for pair in finding.also)} == {
        NAMES[lane] for lane in (FETCH, STORE, EXTRA)
    }
    # The fix is told for the headline's lanes; the others lack the same in the same lines.
    assert f"event.record({finding.first.lane})" in finding.fix


def test_two_ops_that_conflict_in_every_way_are_one_finding() -> None:
    (finding,) = races([update(MAIN, "x"), update(FETCH, "x")])
    assert finding.kind is RaceKind.READ_AFTER_WRITE
    assert finding.count == 1
    # The first op's write covers its own read, so there is no need to remember that.
    assert [pair.kind for pair in finding.also] == [RaceKind.WRITE_AFTER_WRITE]


def test_a_pair_in_a_loop_is_one_finding_with_a_count() -> None:
    loop = [
        step
        for _ in range(5)
        for step in (at(1, write(MAIN, "x")), at(2, read(FETCH, "x")), at(3, edge(FETCH, MAIN)))
    ]
    (finding,) = races(loop)
    assert finding.count == 5


def test_tensors_of_one_line_freed_too_early_are_one_finding() -> None:
    steps = [step for i in range(3) for step in (at(1, alloc(FETCH, f"w{i}")), at(2, write(FETCH, f"w{i}")))]
    steps += [at(3, edge(FETCH, MAIN))]
    steps += [step for i in range(3) for step in (at(4 + i, read(MAIN, f"w{i}")), at(9, free(f"w{i}")))]
    steps += [at(10, alloc(FETCH, "new")), at(11, write(FETCH, "new"))]
    (finding,) = races(steps)
    assert lines(finding) == ("reuse", 6, 11)
    assert {pair.first.site.line for pair in finding.also} == {4, 5}


# Ids and order.


def test_findings_come_in_the_order_in_which_they_happen() -> None:
    steps = [write(MAIN, "x"), write(STORE, "y"), read(FETCH, "y"), read(FETCH, "x")]
    assert [finding.second.site.line for finding in races(steps)] == [2, 3]


def test_ids_do_not_depend_on_lane_numbers_blocks_or_what_ran_before() -> None:
    plain = [at(11, write(MAIN, "x")), at(12, read(FETCH, "x"))]
    longer = [*(at(1, write(EXTRA, f"other {i}")) for i in range(7)), alloc(MAIN, "more"), *plain[:0]]
    longer += [at(11, write(STORE, "x")), at(12, read(EXTRA, "x"))]
    assert [finding.id for finding in races(plain)] == [finding.id for finding in races(longer)]


def test_ids_do_not_depend_on_where_the_program_lies() -> None:
    detector = detect([write(MAIN, "x"), read(FETCH, "x")])
    lanes = [Lane(number, name) for number, name in NAMES.items()]
    here, there = (
        TraceInfo(lanes, [Site(f"{folder}/train.py", line, "step") for line in range(2)])
        for folder in ("/home/one", "/tmp/build-7")
    )
    assert [f.id for f in detector.findings(here)] == [f.id for f in detector.findings(there)]


def test_ids_tell_lines_ops_and_kinds_apart() -> None:
    ids = {
        races(steps)[0].id
        for steps in (
            [write(MAIN, "x"), read(FETCH, "x")],
            [write(MAIN, "x"), at(5, read(FETCH, "x"))],
            [write(MAIN, "x", name="mul"), read(FETCH, "x")],
            [write(MAIN, "x"), write(FETCH, "x")],
            [copy(MAIN, "pinned", "x"), read(HOST, "pinned")],
        )
    }
    assert len(ids) == 5


def test_an_id_is_a_short_word() -> None:
    (finding,) = races([write(MAIN, "x"), read(FETCH, "x")])
    assert re.fullmatch(r"raw-[0-9a-f]{10}", finding.id)


# Words.


def test_a_finding_names_both_accesses() -> None:
    (finding,) = races([at(11, write(MAIN, "pinned", (8, 24))), read(HOST, "pinned", (16, 64))])
    first, second = finding.first, finding.second
    assert (first.op, first.lane, first.write, first.start, first.stop) == ("op", "main", True, 8, 24)
    assert (second.lane, second.write, second.shape, second.dtype) == ("host", False, (64,), "uint8")
    assert (first.site.file, first.site.line, first.site.function) == ("/program/train.py", 11, "step")
    assert finding.memory is MemoryKind.PINNED
    assert first.index < second.index


def test_a_missing_edge_between_streams_is_an_event_and_a_wait() -> None:
    (finding,) = races([at(11, write(MAIN, "x")), read(FETCH, "x")])
    assert "event.record(main)" in finding.fix
    assert "host_to_device.wait_event(event)" in finding.fix
    assert finding.missing.startswith("nothing orders op on main at /program/train.py:11 (step) before ")


def test_a_missing_edge_to_the_host_is_a_synchronize_on_an_event() -> None:
    (finding,) = races([copy(STORE, "pinned", "x"), read(HOST, "pinned")])
    assert "record an event on device_to_host after copy_" in finding.fix
    assert "event.synchronize()" in finding.fix


def test_an_event_that_is_there_already_is_named() -> None:
    (finding,) = races([copy(STORE, "pinned", "x"), at(7, record(STORE)), read(HOST, "pinned")])
    assert finding.fix.startswith("call `event.synchronize()` on the event recorded on device_to_host at")
    assert "train.py:7" in finding.fix


def test_an_event_recorded_too_early_is_named() -> None:
    steps = [at(3, record(MAIN)), write(MAIN, "x"), at(4, wait(FETCH)), read(FETCH, "x")]
    (note,) = races(steps)[0].notes
    assert "train.py:4" in note
    assert "train.py:3" in note
    assert "too early" in note


def test_a_wait_for_nothing_is_named() -> None:
    (note,) = races([at(3, wait(MAIN)), read(MAIN, "x"), write(FETCH, "x")])[0].notes
    assert "train.py:3" in note
    assert "had not been recorded" in note


def test_an_old_wait_for_nothing_is_not_blamed() -> None:
    steps = [wait(MAIN), write(STORE, "y"), edge(STORE, MAIN), read(MAIN, "x"), write(FETCH, "x")]
    assert races(steps)[0].notes == ()


def test_a_wait_for_the_wrong_stream_is_named() -> None:
    steps = [write(MAIN, "x"), record(EXTRA), at(6, wait(FETCH)), read(FETCH, "x")]
    (note,) = races(steps)[0].notes
    assert "train.py:6" in note
    assert "is for extra, not for main" in note


def test_a_host_wait_for_the_wrong_stream_is_named() -> None:
    steps = [copy(STORE, "pinned", "x"), record(MAIN), at(6, sync()), read(HOST, "pinned")]
    (note,) = races(steps)[0].notes
    assert "the wait of host at /program/train.py:6" in note


@pytest.mark.parametrize("hold", [[], [use_stream("w", FETCH)]])
def test_a_reuse_is_told_of_record_stream(hold: list[Step]) -> None:
    steps = [
        alloc(FETCH, "w"),
        write(FETCH, "w"),
        edge(FETCH, MAIN),
        read(MAIN, "w"),
        *hold,
        at(8, free("w")),
    ]
    (finding,) = races([*steps, alloc(FETCH, "new"), write(FETCH, "new")])
    assert "tensor.record_stream(main)" in finding.fix
    assert "host_to_device.wait_stream(main)" in finding.fix
    assert finding.freed_at is not None
    assert finding.freed_at.line == 8


def test_a_reuse_of_the_own_streams_memory_elsewhere_is_told_to_wait() -> None:
    steps = [alloc(MAIN, "x"), write(MAIN, "x"), free("x"), alloc(MAIN, "y"), write(FETCH, "y")]
    (finding,) = races(steps)
    assert "record_stream" not in finding.fix
    assert "host_to_device.wait_stream(main)" in finding.fix


def test_a_reuse_of_pinned_memory_is_told_to_keep_it() -> None:
    steps = [alloc(MAIN, "pinned"), read(MAIN, "pinned"), free("pinned")]
    (finding,) = races([*steps, alloc(MAIN, "pinned new"), write(HOST, "pinned new")])
    assert "keep the pinned tensor alive" in finding.fix


def test_a_finding_prints_what_it_holds() -> None:
    (finding,) = races([update(MAIN, "x"), update(FETCH, "x")])
    text = str(finding)
    for part in (finding.id, finding.missing, finding.fix, "also:", "read-after-write"):
        assert part in text


# Uncertainty is said.


def test_an_overlap_that_could_not_be_decided_is_an_uncertain_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regions, "SEARCH_LIMIT", 3)
    one = Region(0, 1 + 8 * (1021 + 1031 + 1033), 1, ((9, 1033), (9, 1031), (9, 1021)))
    two = Region(5, 6 + 8 * (2017 + 2027), 1, ((9, 2027), (9, 2017)))
    (finding,) = races([write(MAIN, "x", one), write(FETCH, "x", two)])
    assert not finding.certain
    assert "uncertain" in str(finding)


def test_a_decided_overlap_is_certain() -> None:
    assert races([write(MAIN, "x"), read(FETCH, "x")])[0].certain


def test_a_free_without_an_allocation_is_not_passed_over() -> None:
    detector = Detector()
    access = Access(7, Region(0, 4, 4), True)
    for record_ in (Op(0, MAIN, "op", 0, (access,)), Free(1, 7, 0)):
        detector.feed(record_)
    (unknown,) = detector.unknown
    assert "reuse cannot be judged" in unknown.record.reason


def test_what_was_not_understood_is_counted() -> None:
    detector = Detector()
    for index in range(3):
        detector.feed(Unknown(index, "triton kernel", 4, "its accesses cannot be seen"))
    assert [(each.record.op, each.times) for each in detector.unknown] == [("triton kernel", 3)]


def test_a_trace_without_names_can_still_be_told() -> None:
    detector = detect([write(MAIN, "x"), read(FETCH, "x")])
    (finding,) = detector.findings(TraceInfo([], []))
    assert (finding.first.lane, finding.first.site.file) == ("lane 1", "<unknown>")
    assert detector.findings(info_for([write(MAIN, "x"), read(FETCH, "x")]))[0].first.lane == "main"
