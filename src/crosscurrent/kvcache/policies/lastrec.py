"""lastrec: the oldest tokens are evicted, except for the first `init_grace_tokens`.

Usage: `LastRecent(cache_length, init_grace_tokens=4)`; see `crosscurrent.kvcache.policies`.

With grace tokens this is the window with attention sinks of Xiao et al. 2023, arXiv:2309.17453;
unlike there, rotary positions stay absolute in the sequence. All is decided on the host, in runs
of slots: no tensor is made.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from crosscurrent.kvcache.placement import Eviction, SharedEviction
from crosscurrent.kvcache.policies.base import check_room

Run = tuple[int, int]


class LastRecent:
    """Keeps the first few and the most recent tokens."""

    needs_weights = False

    def __init__(self, cache_length: int, *, init_grace_tokens: int = 0) -> None:
        self._cache_length = cache_length
        self._num_grace = init_grace_tokens
        self.filled = 0
        self._by_age: list[Run] = []
        """The occupied slots from the oldest entry to the newest, grace tokens left out."""

    def reset(self, batch_size: int, num_groups: int, device: torch.device) -> None:
        self.filled = 0
        self._by_age = []

    def place(self, length: int) -> Eviction:
        check_room(length, filled=self.filled, cache_length=self._cache_length, num_grace=self._num_grace)
        after = min(self._cache_length, self.filled + length)
        evicted, kept = _split(self._by_age, self.filled + length - after)
        occupied_tail = (after - length, self.filled)
        dest = _pair(evicted, occupied_tail)
        runs = _merge(slots for _, slots in dest)
        # Grace tokens never move, so they are the first slots; they have no place in the queue.
        first_new = max(after - length, min(self._num_grace, after))
        self._by_age = _merge([*_moved(kept, occupied_tail, dest), (first_new, after)])
        eviction = SharedEviction(
            filled_before=self.filled,
            chunk_length=length,
            cache_length=self._cache_length,
            runs=tuple(runs),
        )
        self.filled = after
        return eviction

    def observe(self, eviction: Eviction, weights_BGS: Tensor) -> None:
        """Nothing to learn."""


def _split(runs: list[Run], count: int) -> tuple[list[Run], list[Run]]:
    """The first `count` slots of the runs, and the rest."""
    head: list[Run] = []
    for i, (start, stop) in enumerate(runs):
        cut = min(stop, start + count)
        head.append((start, cut))
        count -= cut - start
        if count == 0:
            rest = [(cut, stop)] if cut < stop else []
            return [run for run in head if run[0] < run[1]], rest + runs[i + 1 :]
    return head, []


def _pair(evicted: list[Run], tail: Run) -> list[tuple[int, Run]]:
    """Give each slot of the occupied tail an evicted slot: (first tail slot, evicted run), in order.

    See Note [Newest at the tail]: evicted tail slots get themselves, the others the rest in order.
    """
    start, stop = tail
    inside = sorted((max(a, start), min(b, stop)) for a, b in evicted if b > start)
    outside = _merge(sorted((a, min(b, start)) for a, b in evicted if a < start))
    pairs = [(a, (a, b)) for a, b in inside]
    cursor = start
    for gap in [*inside, (stop, stop)]:
        taken, outside = _split(outside, gap[0] - cursor) if gap[0] > cursor else ([], outside)
        for a, b in taken:
            pairs.append((cursor, (a, b)))
            cursor += b - a
        cursor = gap[1]
    return sorted(pairs)


def _moved(kept: list[Run], tail: Run, moves: list[tuple[int, Run]]) -> list[Run]:
    """The kept runs, in the same order of age, at the slots where they are after the moves."""
    result: list[Run] = []
    for a, b in kept:
        result.append((a, min(b, tail[0])))
        for source, (start, stop) in moves:
            low, high = max(a, source), min(b, source + stop - start)
            if low < high:
                result.append((start + low - source, start + high - source))
    return [run for run in result if run[0] < run[1]]


def _merge(runs: Iterable[Run]) -> list[Run]:
    """Join runs that continue each other, in the order given."""
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged
