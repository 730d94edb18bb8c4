"""How a sequence is cut into chunks, columns, rows and cells: integers only.

The first chunk is as long as the shortest cache, so that it fills a cache in one step; the others
have `chunk_size` tokens, and the last one what is left. A column is a group of neighbouring chunks
whose lengths sum to at most the shortest cache times a multiplier (never fewer than one chunk). A row
is `layers_per_cell` neighbouring layers. A cell is where a row and a column cross.

The whole forward pass walks the columns from left to right, and in each the rows from the bottom; the
backward pass walks the rows from the top, and in each the columns from right to left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens [start, stop) that enter every cache in one step."""

    index: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Neighbouring chunks whose norms, projections and MLPs are computed at once."""

    index: int
    chunks: tuple[Chunk, ...]

    @property
    def start(self) -> int:
        """The position of the first token."""
        return self.chunks[0].start

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.chunks[-1].stop

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Layers [start, stop), whose input is checkpointed and whose gradients are computed together."""

    index: int
    start: int
    stop: int

    @property
    def layers(self) -> range:
        """The indices of the layers, lowest first."""
        return range(self.start, self.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The lattice of one sequence length."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def sequence_length(self) -> int:
        """The number of tokens of the sequence."""
        return self.columns[-1].stop

    @property
    def longest_column(self) -> int:
        """The largest number of tokens of any column, which device buffers must hold."""
        return max(column.length for column in self.columns)


def make_plan(
    sequence_length: int,
    *,
    cache_lengths: Sequence[int],
    chunk_size: int,
    layers_per_cell: int,
    chunks_per_cell_multiplier: float,
) -> Plan:
    """Cut a sequence of `sequence_length` tokens for a model with one cache length per layer.

    Raises ValueError if the sequence is empty or a chunk does not fit the shortest cache.
    """
    if sequence_length < 1:
        raise ValueError(f"the sequence must have at least one token, got {sequence_length}")
    shortest = min(cache_lengths)
    if chunk_size > shortest:
        raise ValueError(
            f"grad.chunk_size is {chunk_size}, but the shortest KV cache has {shortest} slots: a chunk must "
            "fit a cache; make the chunks shorter or the cache longer"
        )
    chunks = _cut(sequence_length, first=shortest, other=chunk_size)
    columns = _group(chunks, limit=max(1, int(shortest * chunks_per_cell_multiplier)))
    starts = range(0, len(cache_lengths), layers_per_cell)
    rows = tuple(
        Row(index=index, start=start, stop=min(start + layers_per_cell, len(cache_lengths)))
        for index, start in enumerate(starts)
    )
    return Plan(columns=columns, rows=rows)


def _cut(sequence_length: int, *, first: int, other: int) -> list[Chunk]:
    chunks = [Chunk(index=0, start=0, stop=min(first, sequence_length))]
    while chunks[-1].stop < sequence_length:
        start = chunks[-1].stop
        chunks.append(Chunk(index=len(chunks), start=start, stop=min(start + other, sequence_length)))
    return chunks


def _group(chunks: Sequence[Chunk], *, limit: int) -> tuple[Column, ...]:
    groups: list[list[Chunk]] = [[]]
    length = 0
    for chunk in chunks:
        if groups[-1] and length + chunk.length > limit:
            groups.append([])
            length = 0
        groups[-1].append(chunk)
        length += chunk.length
    return tuple(Column(index=index, chunks=tuple(group)) for index, group in enumerate(groups))
