"""Span sets against sets of whole moments."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscurrent.report.intervals import Span, common, length, united, without

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def moments(spans: list[Span]) -> set[int]:
    return {moment for start, stop in spans for moment in range(start, stop)}


@pytest.mark.parametrize(
    ("intervals", "spans"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(5, 2)], []),
        ([(0, 2), (4, 6)], [(0, 2), (4, 6)]),
        ([(4, 6), (0, 4)], [(0, 6)]),
        ([(0, 10), (2, 3)], [(0, 10)]),
        ([(0, 5), (3, 8), (8, 9)], [(0, 9)]),
    ],
)
def test_known_unions(intervals: list[Span], spans: list[Span]) -> None:
    assert united(intervals) == spans


def test_two_copies_at_once_count_once() -> None:
    assert length(united([(0, 10), (5, 15)])) == 15


@given(INTERVALS)
def test_uniting_keeps_the_moments_and_leaves_gaps(intervals: list[Span]) -> None:
    spans = united(intervals)
    assert moments(spans) == moments(intervals)
    assert length(spans) == len(moments(intervals))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


@given(INTERVALS, INTERVALS)
def test_common_and_without_are_those_of_sets(one: list[Span], other: list[Span]) -> None:
    first, second = united(one), united(other)
    assert moments(common(first, second)) == moments(first) & moments(second)
    assert moments(without(first, second)) == moments(first) - moments(second)
    assert length(common(first, second)) + length(without(first, second)) == length(first)
