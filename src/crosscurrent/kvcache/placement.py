"""Where the entries of a chunk go in a bounded cache, and how to take them back.

Usage, for one layer's cache [B, G, L, D] and a chunk of C tokens:

    eviction = policy.place(C)                          # decides; host integers or device slots
    eviction = eviction.widened()                       # optional, pays with several buffers
    overwritten = eviction.write_(cache, new_BGCD)      # move, then write
    attend(q, *(t[:, :, : eviction.filled_after] for t in (keys, values)))
    eviction.unwrite_(cache, overwritten)               # the exact reverse, to the bit
    grad_new_BGCD = eviction.unwrite_gradient_(grad_cache)  # the same for a gradient

Note [Newest at the tail]
Occupied slots are always 0 .. n-1. After a chunk of C there are n' = min(L, n + C), and the new
entries are in the tail n'-C .. n'-1, in order. So attention reads the cache's front in place, and
its mask is lower-right causal, for which fused kernels exist. To make room, m = n + C - n' entries
are evicted. The tail's m occupied slots (n'-C .. n-1) lose their entries to the m evicted slots:
`dest[i]` is where the entry of slot n'-C+i moves. The set of all dest[i] is the set of evicted
slots. An evicted slot that lies in the tail itself is paired with itself, so no slot that an
entry moves to is one that an entry moves from, and a move can be undone.

    write_:    overwritten = cache[dest]; cache[dest] = cache[occupied tail]; cache[tail] = new
    unwrite_:  cache[occupied tail] = cache[dest]; cache[dest] = overwritten

For gradients (of the cache after the chunk -> of the cache before it) the overwritten entries have
gradient zero, since nothing after the chunk can see them; nor does anything see an empty slot.

Any dtype and any last dimension will do: the same eviction moves keys, values, packed codes and
their scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


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

    @property
    def occupied_tail(self) -> slice:
        """Slots of the tail that were occupied before: m of them, the first ones of the tail."""
        return slice(self.tail.start, self.tail.start + self.num_evicted)

    @abstractmethod
    def take(self, buffer_BGLD: Tensor) -> Tensor:
        """A copy of the evicted slots' rows [B, G, m, D], in the order of `dest`."""

    @abstractmethod
    def put_(self, buffer_BGLD: Tensor, rows_BGmD: Tensor) -> None:
        """Write rows back to where `take` reads them."""

    @abstractmethod
    def zero_(self, buffer_BGLD: Tensor) -> None:
        """Write zeros to where `take` reads."""

    @abstractmethod
    def move_(self, buffer_BGLD: Tensor) -> None:
        """Copy the occupied tail's rows to the evicted slots."""

    @abstractmethod
    def unmove_(self, buffer_BGLD: Tensor) -> None:
        """Copy the evicted slots' rows back to the occupied tail."""

    def widened(self) -> Eviction:
        """The same decisions, ready for several buffers: what has to be converted is, once."""
        return self

    def write_(self, buffer_BGLD: Tensor, new_BGCD: Tensor) -> Tensor:
        """Place the chunk's rows and return those that were overwritten [B, G, m, D]."""
        overwritten = self.take(buffer_BGLD)
        if self.num_evicted:
            self.move_(buffer_BGLD)
        buffer_BGLD[:, :, self.tail].copy_(new_BGCD)
        return overwritten

    def unwrite_(self, buffer_BGLD: Tensor, overwritten_BGmD: Tensor) -> None:
        """Undo `write_`. Tail slots that were empty before keep what they hold: nobody reads them."""
        if self.num_evicted:
            self.unmove_(buffer_BGLD)
            self.put_(buffer_BGLD, overwritten_BGmD)

    def unwrite_gradient_(self, grad_BGLD: Tensor) -> Tensor:
        """Turn a cache's gradient after the chunk into the one before; return the chunk's own.

        Takes the gradient of the new entries [B, G, C, D] out of the tail, moves the gradients of
        the moved entries back, and leaves zeros for what was evicted or empty.
        """
        tail = grad_BGLD[:, :, self.tail]
        grad_new_BGCD = tail.clone()
        tail[:, :, self.num_evicted :].zero_()
        if self.num_evicted:
            # A self-paired slot first gets its own value back, then the zero that it should have.
            self.unmove_(grad_BGLD)
            self.zero_(grad_BGLD)
        return grad_new_BGCD


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedEviction(Eviction):
    """The same slots for the whole batch and all groups, as runs known on the host: slices only."""

    runs: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of slots; one after the other they are `dest`."""

    def __post_init__(self) -> None:
        total = sum(stop - start for start, stop in self.runs)
        if total != self.num_evicted:
            raise ValueError(f"the runs {self.runs} hold {total} slots, expected {self.num_evicted}")

    def take(self, buffer_BGLD: Tensor) -> Tensor:
        if len(self.runs) == 1:
            start, stop = self.runs[0]
            return buffer_BGLD[:, :, start:stop].clone(memory_format=torch.contiguous_format)
        if not self.runs:
            return buffer_BGLD.new_empty(*buffer_BGLD.shape[:2], 0, *buffer_BGLD.shape[3:])
        return torch.cat([buffer_BGLD[:, :, start:stop] for start, stop in self.runs], dim=2)

    def put_(self, buffer_BGLD: Tensor, rows_BGmD: Tensor) -> None:
        for offset, start, stop in self._placed():
            buffer_BGLD[:, :, start:stop].copy_(rows_BGmD[:, :, offset : offset + stop - start])

    def zero_(self, buffer_BGLD: Tensor) -> None:
        for start, stop in self.runs:
            buffer_BGLD[:, :, start:stop].zero_()

    def move_(self, buffer_BGLD: Tensor) -> None:
        for offset, start, stop in self._placed():
            source = self.tail.start + offset
            # No overlap: see Note [Newest at the tail]. A self-paired run stays where it is.
            if source != start:
                buffer_BGLD[:, :, start:stop].copy_(buffer_BGLD[:, :, source : source + stop - start])

    def unmove_(self, buffer_BGLD: Tensor) -> None:
        for offset, start, stop in self._placed():
            source = self.tail.start + offset
            if source != start:
                buffer_BGLD[:, :, source : source + stop - start].copy_(buffer_BGLD[:, :, start:stop])

    def _placed(self) -> Iterator[tuple[int, int, int]]:
        offset = 0
        for start, stop in self.runs:
            yield offset, start, stop
            offset += stop - start


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupedEviction(Eviction):
    """Own slots for each sequence and group, on the device: gathers and scatters."""

    slots_BGm: Tensor = field(repr=False)
    """`dest`, in any integer dtype that can hold the cache length; the log keeps a small one."""

    def __post_init__(self) -> None:
        if self.slots_BGm.dim() != 3 or self.slots_BGm.shape[-1] != self.num_evicted:
            raise ValueError(
                f"slots must be [batch, groups, {self.num_evicted}], got {list(self.slots_BGm.shape)}"
            )

    def take(self, buffer_BGLD: Tensor) -> Tensor:
        return torch.gather(buffer_BGLD, 2, self._index(buffer_BGLD))

    def put_(self, buffer_BGLD: Tensor, rows_BGmD: Tensor) -> None:
        buffer_BGLD.scatter_(2, self._index(buffer_BGLD), rows_BGmD)

    def zero_(self, buffer_BGLD: Tensor) -> None:
        buffer_BGLD.scatter_(2, self._index(buffer_BGLD), 0)

    def move_(self, buffer_BGLD: Tensor) -> None:
        # The copy is needed: scatter may not read what it writes.
        self.put_(buffer_BGLD, buffer_BGLD[:, :, self.occupied_tail].clone())

    def unmove_(self, buffer_BGLD: Tensor) -> None:
        buffer_BGLD[:, :, self.occupied_tail].copy_(self.take(buffer_BGLD))

    def widened(self) -> GroupedEviction:
        return self.with_slots(self.slots_BGm.long())

    def with_slots(self, slots_BGm: Tensor) -> GroupedEviction:
        """The same decision with its slots in another place or dtype."""
        return replace(self, slots_BGm=slots_BGm)

    def _index(self, buffer_BGLD: Tensor) -> Tensor:
        """The slots as gather wants them; the last dimension is expanded and takes no memory."""
        return self.slots_BGm.long().unsqueeze(-1).expand(-1, -1, -1, buffer_BGLD.shape[-1])
