"""The detector and the slow oracle agree on random programs.

A race is reported exactly when the oracle knows one, and every pair that is reported is one of the
oracle's. A pair that is not reported itself has to be *covered*: by a reported pair whose first op
is the same or comes later, and whose second op is the same or comes earlier. Any change that orders
the reported pair then orders the covered one, too: ``E <= E' -> X' <= X``. (A reuse may be covered by
a plain race of the block that reuses the memory.)
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from race_oracle import Oracle, Pair
from race_programs import FETCH, MAIN, Step, alloc, causes, free, races, records_of, sync_lanes, write
from race_strategies import programs

from crosscurrent.races import blocks


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_the_detector_agrees_with_the_oracle(steps: list[Step]) -> None:
    agree(steps)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_it_agrees_when_it_forgets_as_soon_as_it_may(
    monkeypatch: pytest.MonkeyPatch, steps: list[Step]
) -> None:
    """Otherwise it only looks for accesses to forget when a block has many regions."""
    monkeypatch.setattr(blocks, "REGIONS", 0)
    agree(steps)


NAMES = {lane: [f"freed {lane} {number}" for number in range(3)] for lane in (MAIN, FETCH)}
FREED = [
    *(alloc(lane, name) for lane in NAMES for name in NAMES[lane]),
    *(write(lane, name) for lane in NAMES for name in NAMES[lane]),
    *(sync_lanes(lane) for lane in NAMES),
    *(free(name) for lane in NAMES for name in NAMES[lane]),
]
"""Blocks freed when nothing runs on them: the detector keeps what it made for them, and uses it again."""


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_it_agrees_when_it_uses_again_what_it_made_for_freed_blocks(steps: list[Step]) -> None:
    agree([*FREED, *steps])


def agree(steps: list[Step]) -> None:
    oracle = Oracle(records_of(steps))
    reported = {Pair(cause.kind.value, cause.first.index, cause.second.index) for cause in causes(steps)}
    assert reported <= oracle.pairs, "false alarm"
    assert all(cause.certain for cause in causes(steps))
    assert bool(races(steps)) == bool(oracle.pairs)
    node = oracle.nodes
    for kind, first, second in oracle.pairs:
        assert any(
            oracle.ordered(node[first], node[other.first])
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
