"""The detector and the slow oracle agree on random programs.

A race is reported exactly when the oracle knows one, and every pair that is reported is one of the
oracle's. A pair that is not reported itself has to be *covered*: by a reported pair whose first op
is the same or comes later, and whose second op is the same or comes earlier. Any change that orders
the reported pair then orders the covered one, too: ``E <= E' -> X' <= X``.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from race_oracle import Oracle, Pair
from race_programs import (
    EXTRA,
    FETCH,
    HOST,
    MAIN,
    STORE,
    WHOLE,
    Step,
    alloc,
    causes,
    edge,
    free,
    op,
    races,
    record,
    records_of,
    sync,
    sync_lanes,
    use_stream,
    wait,
)

from crosscurrent.trace.records import Region

LANES = st.sampled_from([MAIN, FETCH, STORE, EXTRA])
EVENTS = st.sampled_from(["first", "second"])
# Halves, an overlap of both, and combs that interleave: bytes 0-7, 16-23, ... against 8-15, 24-31, ...
REGIONS = st.sampled_from(
    [
        WHOLE,
        WHOLE,
        (0, 32),
        (32, 64),
        (16, 48),
        Region(0, 56, 8, ((4, 16),)),
        Region(8, 64, 8, ((4, 16),)),
        Region(0, 42, 2, ((2, 32), (2, 8))),
    ]
)


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Random steps on live blocks: accesses, events (re-recorded, waited for too early), frees."""
    live = ["device a", "device b", "pinned c"]
    steps: list[Step] = []
    for number in range(draw(st.integers(2, 25))):
        choice = draw(st.sampled_from("oooooorwweeshafau"))
        if choice == "o" and live:
            targets = draw(st.lists(st.tuples(st.sampled_from(live), REGIONS), min_size=1, max_size=3))
            writes = [draw(st.booleans()) for _ in targets]
            pinned = all(block.startswith("pinned") for block, _ in targets)
            lane = draw(st.sampled_from([HOST, MAIN, FETCH])) if pinned else draw(LANES)
            steps.append(
                op(
                    lane,
                    reads=[target for target, is_write in zip(targets, writes, strict=True) if not is_write],
                    writes=[target for target, is_write in zip(targets, writes, strict=True) if is_write],
                    kept=lane != HOST and draw(st.booleans()),
                )
            )
        elif choice == "r":
            steps.append(record(draw(LANES), draw(EVENTS)))
        elif choice == "w":
            steps.append(wait(draw(LANES), draw(EVENTS)))
        elif choice == "e":
            steps.append(edge(draw(LANES), draw(LANES)))
        elif choice == "s":
            steps.append(sync(draw(EVENTS)))
        elif choice == "h":
            steps.append(sync_lanes(draw(LANES)))
        elif choice == "a":
            block = f"{draw(st.sampled_from(['device', 'pinned']))} {number}"
            nbytes = draw(st.sampled_from([64, 64, 128, 1 << 21]))
            steps.append(alloc(draw(st.sampled_from([MAIN, FETCH])), block, nbytes))
            live.append(block)
        elif choice == "f" and live:
            steps.append(free(live.pop(draw(st.integers(0, len(live) - 1)))))
        elif choice == "u" and live:
            steps.append(use_stream(draw(st.sampled_from(live)), draw(LANES)))
    return steps


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_the_detector_agrees_with_the_oracle(steps: list[Step]) -> None:
    oracle = Oracle(records_of(steps))
    reported = {Pair(cause.kind.value, cause.first.index, cause.second.index) for cause in causes(steps)}
    assert reported <= oracle.pairs, "false alarm"
    assert all(cause.certain for cause in causes(steps))
    assert bool(races(steps)) == bool(oracle.pairs)
    node = oracle.nodes
    for kind, first, second in oracle.pairs:
        assert any(
            (kind == "reuse") == (other.kind == "reuse")
            and oracle.ordered(node[first], node[other.first])
            and oracle.ordered(node[other.second], node[second])
            for other in reported
        ), f"missed: {kind} of {first} and {second}"


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_nothing_that_was_found_is_lost_in_the_findings(steps: list[Step]) -> None:
    shown = {
        (pair.kind, pair.first.index, pair.second.index)
        for finding in races(steps)
        for pair in (finding, *finding.also)
    }
    assert shown == {(cause.kind, cause.first.index, cause.second.index) for cause in causes(steps)}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_findings_are_the_same_each_time(steps: list[Step]) -> None:
    assert races(steps) == races(steps)
    ids = [finding.id for finding in races(steps)]
    assert len(set(ids)) == len(ids)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_the_edge_of_each_finding_repairs_all_its_pairs(steps: list[Step]) -> None:
    """One moment in issue order lies between the ops of all pairs of a finding, unless it is a reuse."""
    for finding in races(steps):
        pairs = [finding, *finding.also]
        if finding.kind.value != "reuse":
            assert max(pair.first.index for pair in pairs) < min(pair.second.index for pair in pairs)
