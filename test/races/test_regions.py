"""Overlap of strided regions, against sets of bytes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from race_oracle import bytes_of

from crosscurrent.races import regions
from crosscurrent.races.regions import Overlap, contains, overlap
from crosscurrent.trace.records import Region


def region(start: int, run: int, *dims: tuple[int, int]) -> Region:
    return Region(start, start + run + sum((count - 1) * stride for count, stride in dims), run, dims)


@st.composite
def small_regions(draw: st.DrawFn) -> Region:
    run = draw(st.integers(1, 5))
    dims = draw(st.lists(st.tuples(st.integers(2, 5), st.integers(run, 60)), max_size=4))
    return region(draw(st.integers(0, 80)), run, *dims)


@settings(max_examples=1500, deadline=None)
@given(small_regions(), small_regions())
def test_overlap_is_a_shared_byte(a: Region, b: Region) -> None:
    assert overlap(a, b) is (Overlap.YES if bytes_of(a) & bytes_of(b) else Overlap.NO)
    assert overlap(a, b) is overlap(b, a)


@settings(max_examples=500, deadline=None)
@given(small_regions(), small_regions())
def test_contained_regions_are_subsets(a: Region, b: Region) -> None:
    if contains(a, b):
        assert bytes_of(b) <= bytes_of(a)
    if not a.dims:
        assert contains(a, b) == (bytes_of(b) <= bytes_of(a))


def test_left_and_right_half_of_each_row_do_not_meet() -> None:
    left, right = region(0, 32, (1000, 64)), region(32, 32, (1000, 64))
    assert overlap(left, right) is Overlap.NO


def test_halves_that_share_a_column_meet() -> None:
    left, right = region(0, 33, (1000, 64)), region(32, 32, (1000, 64))
    assert overlap(left, right) is Overlap.YES


@pytest.mark.parametrize(("start", "expected"), [(0, Overlap.YES), (4, Overlap.NO), (8, Overlap.YES)])
def test_even_and_odd_elements(start: int, expected: Overlap) -> None:
    assert overlap(region(0, 4, (1 << 20, 8)), region(start, 4, (1 << 20, 8))) is expected


def test_pages_of_heads_in_a_big_cache_are_decided_at_once() -> None:
    """Two heads of a cache of shape (layers, batch, heads, slots, head size): exact and cheap."""
    head = 4096 * 256
    dims = ((48, 8 * 32 * head), (8, 32 * head))
    start = time.perf_counter()
    assert overlap(region(0, head, *dims), region(head, head, *dims)) is Overlap.NO
    assert overlap(region(0, head + 1, *dims), region(head, head, *dims)) is Overlap.YES
    # Interval and gcd tests and at most one value for each counter: microseconds. A search through the
    # 384 * 384 pairs of rows would take far more than this tenth of a second.
    assert time.perf_counter() - start < 0.1


def test_diagonals_with_coprime_strides_are_exact() -> None:
    # 1009 * i == 1013 * j + 7 has no solution for i, j below 10, though the gcd of the strides is 1.
    rows, columns = region(0, 1, (10, 1009)), region(7, 1, (10, 1013))
    assert overlap(rows, columns) is Overlap.NO
    # 1009 * 10 == 10090 == 1013 * 10 - 40: shifted by -40 they meet at i = j = 10.
    assert overlap(region(40, 1, (11, 1009)), region(0, 1, (11, 1013))) is Overlap.YES


def test_many_coprime_dims_stay_within_the_bound() -> None:
    """A lattice made to be hard: the answer comes within the bound, and is right or says MAYBE."""
    a = region(0, 1, (50, 10007), (50, 10009), (50, 10037))
    b = region(3, 1, (50, 20011), (50, 20021), (50, 20023))
    start = time.perf_counter()
    answer = overlap(a, b)
    # SEARCH_LIMIT nodes of a few microseconds each; two seconds leave room for a slow machine.
    assert time.perf_counter() - start < 2
    assert answer in (Overlap.YES, Overlap.MAYBE)


def test_a_search_that_gives_up_does_not_say_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "SEARCH_LIMIT", 3)
    hard = region(0, 1, (9, 1009), (9, 1013), (9, 1019)), region(5, 1, (9, 2003), (9, 2011))
    assert overlap(*hard) is Overlap.MAYBE


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 400), st.integers(0, 400))
def test_the_first_multiple_in_a_window(modulus: int, a: int, start: int, width: int) -> None:
    start, width, a = start % modulus, width % modulus, a % modulus
    expected = next((n for n in range(modulus) if (a * n - start) % modulus <= width), None)
    assert regions._first_in_window(a, modulus, start, width) == expected
