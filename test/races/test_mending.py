"""What a race lacks itself, and what the waits that others lack mend.

The oracle puts the waits into the trace, where they are said to be missing, and judges it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from race_programs import (
    EXTRA,
    FETCH,
    HOST,
    MAIN,
    STORE,
    Step,
    alloc,
    at,
    causes,
    copy,
    edge,
    free,
    info_for,
    op,
    races,
    read,
    records_of,
    sync_lanes,
    use_stream,
    write,
)
from race_strategies import programs

from crosscurrent.races.causes import Cause, LackedWait
from crosscurrent.races.detector import Detector
from crosscurrent.races.findings import Finding, findings_of
from crosscurrent.races.wording import MissingWait, in_names
from crosscurrent.report.missing import num_missing, shared_waits
from crosscurrent.trace.records import HostWait, Op, Record, RecordEvent, WaitEvent


def with_waits(records: Sequence[Record], waits: Collection[LackedWait]) -> list[Record]:
    """The trace of the program in whose lines these waits are."""
    event = 1_000_000
    mended: list[Record] = []
    for record in records:
        if isinstance(record, Op):
            for wait in sorted(waits):
                if wait[1:] == (record.lane, record.site, record.name):
                    if record.lane == HOST:
                        mended.append(HostWait(0, "synchronize", None, (wait.lane,), record.site))
                        continue
                    event += 1
                    mended.append(RecordEvent(0, wait.lane, event, record.site, "wait_stream"))
                    mended.append(WaitEvent(0, record.lane, event, record.site, "wait_stream"))
        mended.append(record)
    return [record._replace(index=index) for index, record in enumerate(mended)]


def judged(records: Sequence[Record]) -> list[Cause]:
    detector = Detector()
    for record in records:
        detector.feed(record)
    return detector.causes


def name(cause: Cause) -> tuple[object, ...]:
    """The same cause in two traces."""
    lanes, sites = (cause.first_lane, cause.second_lane), (cause.first.site, cause.second.site)
    names = cause.first.name, cause.second.name
    return cause.kind, cause.memory, lanes, sites, names, cause.freed and cause.freed.allocated


def sites_of(steps: Sequence[Step]) -> list[tuple[bool, bool, bool]]:
    return [(bool(each.lacks), each.lacks_care, bool(each.mended_by)) for each in causes(steps)]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(1, 40))
def test_with_the_waits_no_race_is_left_but_those_of_the_allocator(steps: list[Step], lines: int) -> None:
    """In a few lines, too, each of which is executed often."""
    steps = [at(number % lines, each) for number, each in enumerate(steps)]
    records = records_of(steps)
    before = judged(records)
    assert all(cause.lacks or cause.lacks_care or cause.mended_by for cause in before)
    waits = {wait for cause in before for wait in cause.lacks}
    left = {name(cause) for cause in judged(with_waits(records, waits))}
    assert left <= {name(cause) for cause in before if cause.lacks_care}


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(1, 40))
def test_what_others_mend_is_mended_by_those_that_are_named(steps: list[Step], lines: int) -> None:
    records = records_of([at(number % lines, each) for number, each in enumerate(steps)])
    for cause in judged(records):
        if not cause.lacks_care:
            left = judged(with_waits(records, cause.lacks | cause.mended_by))
            assert name(cause) not in {name(other) for other in left}


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_all_that_is_lacked_is_needed_where_each_line_is_executed_once(steps: list[Step]) -> None:
    records = records_of(steps)
    before = judged(records)
    waits = {wait for cause in before for wait in cause.lacks}
    left = {name(cause) for cause in judged(with_waits(records, waits))}
    assert left == {name(cause) for cause in before if cause.lacks_care}
    for wait in waits:
        assert judged(with_waits(records, waits - {wait})), wait


def keys(finding: Finding) -> set[tuple[object, ...]]:
    """What a finding stands for, as far as it tells."""
    return {
        (
            pair.kind,
            *((side.lane_index, side.site, side.op) for side in (pair.first, pair.second)),
        )
        for pair in (finding, *finding.also)
    }


class Program:
    """The findings of a program, and what is left of them with some of the waits."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._records, self._info = records_of(steps), info_for(steps)
        before = judged(self._records)
        self.findings = findings_of(before, self._info)
        self._waits = {in_names(wait, self._info): wait for cause in before for wait in cause.lacks}
        times = Counter(key for finding in self.findings for key in keys(finding))
        self._shared = {key for key, found in times.items() if found > 1}

    def left(self, waits: Iterable[MissingWait]) -> set[tuple[object, ...]]:
        """Without those that two findings have (of two allocations): nobody knows whose they are."""
        found = judged(with_waits(self._records, {self._waits[wait] for wait in waits}))
        return {key for finding in findings_of(found, self._info) for key in keys(finding)} - self._shared


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(1, 40))
def test_what_a_finding_names_mends_it(steps: list[Step], lines: int) -> None:
    program = Program([at(number % lines, each) for number, each in enumerate(steps)])
    lacking = {finding.id: finding.lacks for finding in program.findings}
    for finding in program.findings:
        if finding.takes_care:
            assert not finding.mended_by
        else:
            named = {*finding.lacks, *(wait for each in finding.mended_by for wait in lacking[each])}
            assert not program.left(named) & keys(finding)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(1, 40))
def test_a_shared_wait_mends_what_it_says(steps: list[Step], lines: int) -> None:
    program = Program([at(number % lines, each) for number, each in enumerate(steps)])
    for shared in shared_waits(program.findings):
        assert len({wait.place for wait in shared.waits}) == 1
        left = program.left(shared.waits)
        for number in shared.findings:
            assert not left & keys(program.findings[number])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(1, 40))
def test_with_as_many_edges_as_are_counted_no_race_is_left(steps: list[Step], lines: int) -> None:
    program = Program([at(number % lines, each) for number, each in enumerate(steps)])
    waits = {wait for finding in program.findings for wait in finding.lacks}
    care = [finding for finding in program.findings if finding.takes_care]
    assert program.left(waits) <= {key for finding in care for key in keys(finding)}
    places = {wait.place for wait in waits}
    assert len(places) <= num_missing(program.findings) - len(care) <= len(waits)


def test_the_waits_of_a_reuse_in_two_lines_are_two_edges() -> None:
    steps = [
        alloc(MAIN, "a"),
        write(MAIN, "a"),
        free("a"),
        alloc(MAIN, "b"),
        op(FETCH, writes=[("b", (0, 32))]),
        op(STORE, writes=[("b", (32, 64))]),
    ]
    (finding,) = races(steps)
    assert [wait.site.line for wait in finding.lacks] == [4, 5]
    assert num_missing([finding]) == 2


def test_two_lanes_that_one_op_has_to_wait_for_are_two_edges() -> None:
    found = races([write(FETCH, "x"), write(STORE, "y"), op(MAIN, reads=["x", "y"])])
    assert num_missing(found) == 2
    assert shared_waits(found) == []


def test_one_line_on_several_lanes_lacks_one_edge() -> None:
    found = races([at(0, write(MAIN, "x")), at(1, read(FETCH, "x")), at(1, read(STORE, "x"))])
    assert len(found[0].lacks) == 2
    assert num_missing(found) == 1


MIXED = [
    at(0, write(EXTRA, "b")),
    at(1, op(EXTRA, reads=["w"])),
    at(2, op(FETCH, reads=["b"], writes=["w"])),
    at(3, op(MAIN, reads=["w"])),
    at(2, op(MAIN, reads=["b"])),
]
"""Line 0 races with line 2 on two lanes; on the second, the wait before line 3 mends that."""


def test_a_finding_may_take_waits_of_its_own_and_those_of_others() -> None:
    found = races(MIXED)
    mixed = next(finding for finding in found if finding.lacks and finding.mended_by)
    (owner,) = (finding for finding in found if finding.id in mixed.mended_by)
    (wait,) = owner.lacks
    assert mixed.notes[-1] == f"the wait that {owner.id} lacks mends some of these pairs, too: {wait}"
    mixed_is = found.index(mixed)
    assert not any(mixed_is in shared.findings for shared in shared_waits(found))


def test_a_note_names_the_first_few_waits_and_counts_the_rest() -> None:
    """What comes to the last line along two chains, with each link missing in a line of its own."""
    steps: list[Step] = []
    for line in (10, 20):
        steps.append(at(0, write(FETCH, "slot")))
        for number, (first, second) in enumerate(pairwise([FETCH, STORE, EXTRA, MAIN])):
            block = f"link {line + number}"
            steps += [at(line + number, write(first, block)), at(line + number + 5, read(second, block))]
        steps.append(at(1, read(MAIN, "slot")))
    found = races(steps)
    (last,) = (finding for finding in found if finding.second.site.line == 1)
    assert len(last.mended_by) == len(last.helpers) == 6
    one, two, three, *_ = last.mended_by
    note = last.notes[-1]
    assert note.startswith(f"the waits that {one}, {two}, {three} and 3 more lack mend this, too: `")
    assert note.count(" before op at ") == 3
    assert note.endswith("; 3 more")


CHAIN = [write(FETCH, "slot"), read(MAIN, "slot"), edge(MAIN, STORE), read(STORE, "slot")]


def test_a_link_of_a_chain_mends_what_follows() -> None:
    first, second = causes(CHAIN)
    (link,) = first.lacks
    assert (link.lane, link.second, link.site) == (FETCH, MAIN, 1)
    assert second.lacks == set()
    assert second.mended_by == {link}
    head, tail = races(CHAIN)
    (wait,) = head.lacks
    assert str(wait) == "`main.wait_stream(host_to_device)` before op at /program/train.py:1 (step)"
    assert tail.mended_by == (head.id,)
    assert tail.notes[-1] == f"the wait that {head.id} lacks mends this, too: {wait}"


def test_a_finding_that_is_told_alone_names_no_other() -> None:
    (finding,) = findings_of(causes(CHAIN)[1:], info_for(CHAIN))
    assert finding.mended_by == ()
    assert finding.notes == races(CHAIN)[1].notes[:-1]


def test_two_ends_lack_a_wait_each() -> None:
    first, second = causes([write(FETCH, "slot"), read(MAIN, "slot"), read(STORE, "slot")])
    assert [wait.second for cause in (first, second) for wait in cause.lacks] == [MAIN, STORE]
    assert first.mended_by == second.mended_by == set()


def test_of_two_lanes_the_one_that_knows_the_other_is_waited_for() -> None:
    steps = [
        write(FETCH, "slot"),
        edge(FETCH, STORE),
        write(STORE, "other"),
        op(MAIN, reads=["slot", "other"]),
    ]
    found = {cause.first_lane: cause for cause in causes(steps)}
    (wait,) = found[STORE].lacks
    assert wait.lane == STORE
    assert found[FETCH].lacks == set()
    assert found[FETCH].mended_by == {wait}


def test_a_race_may_take_the_waits_of_two_others() -> None:
    steps = [
        write(FETCH, "slot"),
        write(FETCH, "x"),
        read(STORE, "x"),  # lacks a wait for the fetch
        write(STORE, "y"),
        read(EXTRA, "y"),  # lacks a wait for the store
        read(EXTRA, "slot"),
    ]
    *ends, last = causes(steps)
    assert last.lacks == set()
    assert last.mended_by == {wait for cause in ends for wait in cause.lacks}
    assert "the waits that" in races(steps)[-1].notes[-1]


def test_the_host_lacks_a_wait_and_serves_all_streams() -> None:
    steps = [write(FETCH, "pinned"), read(HOST, "pinned"), write(MAIN, "pinned")]
    first, second = causes(steps)
    assert [wait.second for wait in first.lacks] == [HOST]
    assert second.mended_by == first.lacks
    (wait,) = races(steps)[0].lacks
    assert str(wait) == "`host_to_device.synchronize()` before op at /program/train.py:1 (step)"


def test_an_early_recording_is_no_better_for_a_later_wait() -> None:
    """The chain goes on from what was recorded before the missing wait."""
    steps = [
        write(FETCH, "slot"),
        edge(MAIN, STORE),
        read(MAIN, "slot"),
        read(STORE, "slot"),
    ]
    assert all(cause.lacks for cause in causes(steps))


REUSED = [
    alloc(MAIN, "a"),
    write(MAIN, "a"),
    edge(MAIN, FETCH),
    read(FETCH, "a"),
    free("a"),
    alloc(MAIN, "b"),
    write(MAIN, "b"),
]


def test_a_reuse_takes_care_and_mends_nothing_else() -> None:
    after = [copy(FETCH, "z", "z"), read(MAIN, "z")]
    assert sites_of(REUSED) == [(False, True, False)]
    assert sites_of([*after[:1], *REUSED, *after[1:]]) == [(False, True, False), (True, False, False)]
    assert not races([*REUSED[:4], use_stream("a", FETCH), *REUSED[4:]])


def test_a_wait_that_is_missing_before_mends_a_reuse() -> None:
    steps = [write(FETCH, "z"), *REUSED]
    steps.insert(5, read(MAIN, "z"))
    plain, reuse = causes(steps)
    assert plain.lacks
    assert not reuse.lacks_care
    assert reuse.mended_by == plain.lacks


def test_a_wait_of_the_lane_that_a_block_is_held_for_mends_its_reuse() -> None:
    steps = [
        alloc(MAIN, "a"),
        edge(MAIN, FETCH),
        write(FETCH, "a"),
        read(STORE, "a"),  # lacks a wait for the fetch, with which the allocator would wait for it, too
        use_stream("a", STORE),
        free("a"),
        alloc(MAIN, "b"),
        write(MAIN, "b"),
    ]
    *_, plain, reuse = causes(steps)
    assert plain.lacks
    assert not reuse.lacks_care
    assert reuse.mended_by == plain.lacks


def test_a_reuse_of_the_pools_own_memory_lacks_a_wait() -> None:
    steps = [alloc(MAIN, "a"), write(MAIN, "a"), free("a"), alloc(MAIN, "b"), write(FETCH, "b")]
    (finding,) = races(steps)
    (lacked,) = finding.lacks
    assert str(lacked) == "`host_to_device.wait_stream(main)` before op at /program/train.py:4 (step)"


def test_what_was_waited_for_in_vain_stays_mended_later() -> None:
    steps = [*CHAIN, sync_lanes(FETCH), read(MAIN, "slot")]
    assert sites_of(steps) == sites_of(CHAIN)
