"""The lattice: every token once, chunks that fit, columns of about a cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscurrent.gradient.plan import make_plan


def lengths(sequence_length: int, **changes: object) -> list[list[int]]:
    settings = {
        "cache_lengths": [8, 8],
        "chunk_size": 2,
        "layers_per_cell": 1,
        "chunks_per_cell_multiplier": 1.0,
    } | changes
    plan = make_plan(sequence_length, **settings)
    return [[chunk.length for chunk in column.chunks] for column in plan.columns]


def test_the_first_chunk_fills_the_cache_and_the_others_are_chunks() -> None:
    assert lengths(8 + 8 + 3) == [[8], [2, 2, 2, 2], [2, 1]]


def test_a_sequence_shorter_than_the_cache_is_one_chunk() -> None:
    assert lengths(5) == [[5]]


def test_a_sequence_as_long_as_the_cache_is_one_chunk() -> None:
    assert lengths(8) == [[8]]


def test_one_token_more_than_the_cache_is_a_chunk_of_its_own() -> None:
    assert lengths(9) == [[8], [1]]


def test_the_shortest_cache_counts() -> None:
    assert lengths(10, cache_lengths=[16, 4, 8]) == [[4], [2, 2], [2]]


def test_a_multiplier_widens_the_columns() -> None:
    assert lengths(20, chunks_per_cell_multiplier=1.5) == [[8, 2, 2], [2, 2, 2, 2]]


def test_a_small_multiplier_leaves_one_chunk_a_column() -> None:
    assert lengths(12, chunks_per_cell_multiplier=0.01) == [[8], [2], [2]]


def test_layers_that_do_not_divide_leave_a_smaller_top_row() -> None:
    plan = make_plan(
        4, cache_lengths=[4] * 5, chunk_size=2, layers_per_cell=2, chunks_per_cell_multiplier=1.0
    )
    assert [list(row.layers) for row in plan.rows] == [[0, 1], [2, 3], [4]]


def test_a_chunk_as_long_as_the_cache_is_allowed() -> None:
    assert lengths(20, chunk_size=8) == [[8], [8], [4]]


def test_a_chunk_longer_than_a_cache_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"grad\.chunk_size is 9, .* 8 slots"):
        lengths(20, chunk_size=9)


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token, got 0"):
        lengths(0)


@given(
    sequence_length=st.integers(1, 400),
    cache_lengths=st.lists(st.integers(3, 40), min_size=1, max_size=5),
    chunk_size=st.integers(1, 3),
    layers_per_cell=st.integers(1, 6),
    multiplier=st.floats(0.1, 4.0),
)
def test_every_token_and_every_layer_lie_in_one_cell(
    sequence_length: int,
    cache_lengths: list[int],
    chunk_size: int,
    layers_per_cell: int,
    multiplier: float,
) -> None:
    plan = make_plan(
        sequence_length,
        cache_lengths=cache_lengths,
        chunk_size=chunk_size,
        layers_per_cell=layers_per_cell,
        chunks_per_cell_multiplier=multiplier,
    )
    chunks = [chunk for column in plan.columns for chunk in column.chunks]
    tokens = [token for chunk in chunks for token in range(chunk.start, chunk.stop)]
    assert tokens == list(range(sequence_length))
    assert [layer for row in plan.rows for layer in row.layers] == list(range(len(cache_lengths)))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    limit = max(1, int(min(cache_lengths) * multiplier))
    assert all(len(column.chunks) == 1 or column.length <= limit for column in plan.columns)
    assert plan.longest_column == max(column.length for column in plan.columns)
