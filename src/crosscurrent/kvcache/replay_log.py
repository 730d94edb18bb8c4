"""The replay log: every eviction of every layer and chunk, to be done again.

Usage:

    log = ReplayLog(num_layers)
    log.append(layer, policy.place(length))
    log[layer][chunk].place_(...)

    # A cell's slots in one flat buffer, to be kept in (pinned) CPU memory:
    evictions = log.cell(range(0, 2), range(3, 5))
    flat = torch.empty(num_slots(evictions), dtype=flat_dtype(evictions), pin_memory=True)
    pack_(evictions, on_device)                    # then one copy to flat
    evictions = unpack(evictions, flat_on_device)  # views of it; host-known evictions pass through
    log.replace(range(0, 2), range(3, 5), unpack(evictions, flat))

What is known on the host (the integers, the runs of slots) stays there. Only the device slots of
h2o grow with sequence times groups, so only they need a place to go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from crosscurrent.kvcache.placement import Eviction, GroupedEviction, SharedEviction


class ReplayLog:
    """Evictions by layer, then by chunk."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[list[Eviction]] = [[] for _ in range(num_layers)]

    def append(self, layer: int, eviction: Eviction) -> None:
        """Add the next chunk's eviction of a layer."""
        self._layers[layer].append(eviction)

    def __getitem__(self, layer: int) -> Sequence[Eviction]:
        return self._layers[layer]

    def __len__(self) -> int:
        return len(self._layers)

    def cell(self, layers: Iterable[int], chunks: Sequence[int]) -> list[Eviction]:
        """The evictions of some layers and chunks, layer by layer."""
        return [self._layers[layer][chunk] for layer in layers for chunk in chunks]

    def replace(self, layers: Iterable[int], chunks: Sequence[int], evictions: Iterable[Eviction]) -> None:
        """Put others in the place of what `cell` gives, for instance with their slots elsewhere."""
        where = [(layer, chunk) for layer in layers for chunk in chunks]
        for (layer, chunk), eviction in zip(where, evictions, strict=True):
            self._layers[layer][chunk] = eviction

    def same_as(self, other: ReplayLog) -> bool:
        """Whether both made the same decisions. Reads the slots, so it waits for the device."""
        if [len(chunks) for chunks in self._layers] != [len(chunks) for chunks in other._layers]:
            return False
        return all(
            same_decision(mine, theirs)
            for layer, chunks in enumerate(self._layers)
            for mine, theirs in zip(chunks, other[layer], strict=True)
        )


def same_decision(a: Eviction, b: Eviction) -> bool:
    """Whether two evictions of the same kind displace the same slots in the same order."""
    integers = [(e.filled_before, e.chunk_length, e.cache_length) for e in (a, b)]
    if integers[0] != integers[1]:
        return False
    if isinstance(a, SharedEviction) and isinstance(b, SharedEviction):
        return a.runs == b.runs
    if isinstance(a, GroupedEviction) and isinstance(b, GroupedEviction):
        return torch.equal(a.slots_BGm.cpu().long(), b.slots_BGm.cpu().long())
    return False


def num_slots(evictions: Iterable[Eviction]) -> int:
    """Elements that `pack_` writes for these evictions."""
    return sum(e.slots_BGm.numel() for e in _grouped(evictions))


def flat_dtype(evictions: Iterable[Eviction]) -> torch.dtype:
    """The dtype that holds the slots of all of them; int16 if there is nothing to hold."""
    dtype = torch.int16
    for eviction in _grouped(evictions):
        dtype = torch.promote_types(dtype, eviction.slots_BGm.dtype)
    return dtype


def pack_(evictions: Iterable[Eviction], out: Tensor) -> None:
    """Write the device slots of the evictions one after the other to a flat tensor."""
    flat = [eviction.slots_BGm.flatten() for eviction in _grouped(evictions)]
    if flat:
        torch.cat(flat, out=out[: sum(map(len, flat))])


def joined_slots(evictions: Iterable[Eviction], *, like: Tensor) -> Tensor:
    """The device slots of the evictions, one after the other, in a new tensor where `like` is."""
    flat = [eviction.slots_BGm.flatten() for eviction in _grouped(evictions)]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.int16, device=like.device)


def unpack(evictions: Iterable[Eviction], flat: Tensor) -> list[Eviction]:
    """The same evictions with their slots in `flat`, wherever that is: no copy."""
    result: list[Eviction] = []
    start = 0
    for eviction in evictions:
        if isinstance(eviction, GroupedEviction):
            stop = start + eviction.slots_BGm.numel()
            result.append(eviction.with_slots(flat[start:stop].view(eviction.slots_BGm.shape)))
            start = stop
        else:
            result.append(eviction)
    return result


def _grouped(evictions: Iterable[Eviction]) -> Iterator[GroupedEviction]:
    return (eviction for eviction in evictions if isinstance(eviction, GroupedEviction))
