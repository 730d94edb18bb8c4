"""Where the entries of a chunk go in a bounded cache.

Usage, for one layer's cache [N, G, L, D] and a chunk of C tokens:

    eviction = policy.place(C)                      # decides; host integers or device slots
    eviction.place_(cache_NGLD, new_NGCD)           # moves, then writes
    attend(q, *(t[:, :, : eviction.filled_after] for t in (keys, values)))

    # Where several chunks of one length move entries to, without a cache:
    slots_BnGm = eviction.stack_slots(evictions, all_slots)

Note [Newest at the tail]
Occupied slots are always 0 .. n-1. After a chunk of C there are n' = min(L, n + C), and the new
entries are in the tail n'-C .. n'-1, in order. So attention reads the cache's front in place, and
its mask is lower-right causal, for which fused kernels exist. To make room, m = n + C - n' entries
are evicted. The tail's m occupied slots (n'-C .. n-1) lose their entries to the m evicted slots:
`dest[i]` is where the entry of slot n'-C+i moves. The set of all dest[i] is the set of evicted
slots. An evicted slot that lies in the tail itself is paired with itself, so no slot that an
entry moves to is one that an entry moves from, and the moves can be made in any order:

    cache[dest] = cache[occupied tail]; cache[tail] = new

Any dtype and any last dimension will do: the same eviction moves keys, values, packed codes and
their scales. N is a multiple of the batch B: keys and values of a batch, one behind the other, are
moved by one call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from crosscurrent.operators.rows import place_


@dataclass(frozen=True, kw_only=True, slots=True)
class Eviction(ABC):
    """One entry of the replay log: how a chunk was placed. The integers are known on the host."""

    filled_before: int
    """Occupied slots before the chunk: n."""
    chunk_length: int
    """Tokens of the chunk: C."""
    cache_length: int
    """Slots of the cache: L."""

    @property
    def filled_after(self) -> int:
        """Occupied slots after the chunk: n'."""
        return min(self.cache_length, self.filled_before + self.chunk_length)

    @property
    def num_evicted(self) -> int:
        """Entries that go: m."""
        return self.filled_before + self.chunk_length - self.filled_after

    @property
    def tail(self) -> slice:
        """Slots of the new entries."""
        return slice(self.filled_after - self.chunk_length, self.filled_after)

    @abstractmethod
    def place_(self, buffer_NGLX: Tensor, new_NGCX: Tensor) -> None:
        """Place the chunk's rows in a cache, or in anything that has a row for each slot."""

    @classmethod
    @abstractmethod
    def stack_slots(cls, evictions: Sequence[Self], all_slots_L: Tensor) -> Tensor:
        """`dest` of n chunks that evict equally many entries each, and some: [B, n, G, m].

        1 in place of B and G if it is the same for all. `all_slots_L` is 0, 1, 2 ... on the device, at least
        as long as the cache.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedEviction(Eviction):
    """The same slots for the whole batch and all groups, as runs known on the host: slices only."""

    runs: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of slots; one after the other they are `dest`."""

    def __post_init__(self) -> None:
        total = sum(stop - start for start, stop in self.runs)
        if total != self.num_evicted:
            raise ValueError(f"the runs {self.runs} hold {total} slots, expected {self.num_evicted}")

    def place_(self, buffer_NGLX: Tensor, new_NGCX: Tensor) -> None:
        source = self.tail.start
        for start, stop in self.runs:
            # No overlap: see Note [Newest at the tail]. A self-paired run stays where it is.
            if source != start:
                buffer_NGLX[:, :, start:stop].copy_(buffer_NGLX[:, :, source : source + stop - start])
            source += stop - start
        buffer_NGLX[:, :, self.tail].copy_(new_NGCX)

    @classmethod
    def stack_slots(cls, evictions: Sequence[Self], all_slots_L: Tensor) -> Tensor:
        slots = torch.cat([all_slots_L[start:stop] for each in evictions for start, stop in each.runs])
        return slots.view(1, len(evictions), 1, -1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupedEviction(Eviction):
    """Own slots for each sequence and group, on the device."""

    slots_BGm: Tensor = field(repr=False)
    """`dest`, in any integer dtype that can hold the cache length; the log keeps a small one."""

    def __post_init__(self) -> None:
        if self.slots_BGm.dim() != 3 or self.slots_BGm.shape[-1] != self.num_evicted:
            raise ValueError(
                f"slots must be [batch, groups, {self.num_evicted}], got {list(self.slots_BGm.shape)}"
            )

    def place_(self, buffer_NGLX: Tensor, new_NGCX: Tensor) -> None:
        place_(buffer_NGLX, self.slots_BGm, new_NGCX, self.tail.start)

    @classmethod
    def stack_slots(cls, evictions: Sequence[Self], all_slots_L: Tensor) -> Tensor:
        return torch.stack([each.slots_BGm for each in evictions], dim=1)

    @classmethod
    def of_chunks(
        cls,
        flat: Tensor,
        shape_BG: tuple[int, int],
        lengths: Sequence[int],
        *,
        filled: int,
        cache_length: int,
    ) -> tuple[list[Eviction], Tensor]:
        """The evictions of chunks that were placed one after the other, with their slots in `flat`.

        What evicts nothing has no slots there. `shape_BG` is (1, 1) for slots that are the same for all. Also
        gives the rest of `flat`.
        """
        evictions: list[Eviction] = []
        start = 0
        for length in lengths:
            num_evicted = max(0, filled + length - cache_length)
            stop = start + math.prod(shape_BG) * num_evicted
            slots_BGm = flat[start:stop].view(*shape_BG, num_evicted)
            make = partial(cls, slots_BGm=slots_BGm) if num_evicted else SharedEviction
            evictions.append(make(filled_before=filled, chunk_length=length, cache_length=cache_length))
            start = stop
            filled = min(cache_length, filled + length)
        return evictions, flat[start:]

    def with_slots(self, slots_BGm: Tensor) -> GroupedEviction:
        """The same decision with its slots in another place or dtype."""
        return replace(self, slots_BGm=slots_BGm)
