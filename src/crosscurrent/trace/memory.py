"""Storages as blocks, and tensors as regions of them.

A block is one allocation: a storage between two (re)allocations. It dies with its storage, which a weak
reference sees even when the last owner is in C++ (a tensor saved by autograd, say).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from crosscurrent.trace.records import Access, MemoryKind, Region
from crosscurrent.trace.sites import Place, Sites

LayoutKey: TypeAlias = tuple[torch.Size, tuple[int, ...], int, torch.dtype]


class Layout(NamedTuple):
    """What a tensor covers of its storage; ``region`` is None when it has no element."""

    region: Region | None
    shape: tuple[int, ...]
    dtype: str


class Deaths:
    """The storages that died and the events that are gone, until somebody asks.

    Both happen at any time, in the middle of our own work too: they are only noted here.
    """

    __slots__ = ("closed", "noted", "sites")

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self.noted: deque[Block | Gone] = deque()
        self.closed = False


class Gone:
    """An event that is gone."""

    __slots__ = ("event",)

    def __init__(self, event: Hashable) -> None:
        self.event = event


class Block:
    """One allocation that is followed, or (``memory`` None) a pageable storage, which is not.

    It is called when its storage dies.
    """

    __slots__ = (
        "cdata",
        "deaths",
        "device",
        "dtype",
        "index",
        "is_covered",
        "memory",
        "nbytes",
        "offset",
        "on_device",
        "place",
        "private",
        "read",
        "ref",
        "shape",
        "strides",
        "uses",
        "write",
    )

    ref: weakref.ref[torch.UntypedStorage] | None
    """Kept, so that the death of the storage is told."""
    place: Place
    """Where it died; unset while it lives."""
    cdata: Any
    """The key of the storage: an ``int``, which is only looked up."""
    index: int
    memory: MemoryKind | None
    on_device: bool
    device: int
    nbytes: int
    private: bool
    """Memory of a graph's own: nothing else is ever served from it."""
    uses: dict[int, int] | None
    """Pinned memory: the last record, by lane, of a copy that the host allocator waits for."""
    shape: torch.Size | None
    """The layout that the last op to touch the block had of it, with the two accesses that it may make. Most
    ops see a block as the op before them did. A shape of None: no op has touched it yet."""
    strides: tuple[int, ...] | None
    """None: it is contiguous."""
    offset: int
    is_covered: bool
    """Whether that layout is all of it."""
    dtype: torch.dtype
    read: Access | None
    """None: it was not read in this layout yet."""
    write: Access | None
    """None: there is no element, and nothing to access."""

    def __init__(self, storage: torch.UntypedStorage, cdata: Any, deaths: Deaths) -> None:
        self.deaths = deaths
        self.cdata = cdata
        self.ref = weakref.ref(storage, self)

    def __call__(self, ref: Any) -> None:
        self.ref = None
        deaths = self.deaths
        if not deaths.closed:
            self.place = deaths.sites.place()
            deaths.noted.append(self)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, while it lives."""
        return None if self.ref is None else self.ref()

    def be(self, index: int, memory: MemoryKind | None, device: int, nbytes: int) -> None:
        """Become the allocation ``index`` of ``nbytes`` bytes."""
        self.index = index
        self.memory = memory
        self.on_device = memory is MemoryKind.DEVICE
        self.device = device
        self.nbytes = nbytes
        self.private = False
        self.uses = None
        self.shape = None


def region_of(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Region | None:
    """The bytes of a strided tensor (strides and offset in elements), exactly; None without elements."""
    loops = [(count, stride * itemsize) for count, stride in zip(shape, strides, strict=True)]
    return region_of_loops(offset * itemsize, loops, itemsize)


def region_of_loops(start: int, loops: Iterable[tuple[int, int]], itemsize: int) -> Region | None:
    """The bytes that nested loops of ``(count, stride in bytes)`` over one item touch.

    Repeated items (stride 0) count once, negative strides are turned round, and loops that overlap or
    follow each other are merged as far as a run of bytes, or one regular progression, can say the same.
    """
    ascending: list[tuple[int, int]] = []
    for count, stride in loops:
        if count == 0:
            return None
        if count > 1 and stride:
            start += min(stride, 0) * (count - 1)
            ascending.append((abs(stride), count))
    run = itemsize
    dims: list[tuple[int, int]] = []
    for stride, count in sorted(ascending):
        if not dims and stride <= run:
            run += (count - 1) * stride
        elif dims and stride % dims[-1][1] == 0 and stride <= dims[-1][0] * dims[-1][1]:
            inner, step = dims[-1]
            dims[-1] = ((count - 1) * (stride // step) + inner, step)
        else:
            dims.append((count, stride))
    span = run + sum((count - 1) * stride for count, stride in dims)
    return Region(start, start + span, run, tuple(reversed(dims)))


class Layouts:
    """Interned layouts. Bounded: programs have few, and a program with many only pays to make them again."""

    LIMIT: ClassVar[int] = 1 << 15

    def __init__(self) -> None:
        self.known: dict[LayoutKey, Layout] = {}

    def learn(self, key: LayoutKey) -> Layout:
        shape, strides, offset, dtype = key
        if len(self.known) >= self.LIMIT:
            self.known.clear()
        region = region_of(offset, shape, strides, dtype.itemsize)
        layout = self.known[key] = Layout(region, tuple(shape), str(dtype).removeprefix("torch."))
        return layout

    def of(self, tensor: Tensor) -> Layout:
        key = (tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        return self.known.get(key) or self.learn(key)


class HostCache:
    """Which pinned allocations the caching host allocator can serve without a fresh ``cudaHostAlloc``.

    It keeps freed blocks by size, rounded up to a power of two, and hands one out again once the copies
    that used it are done. Blocks count as done as far as the host has waited for them in this trace.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[dict[int, int] | None]] = {}
        self._known: dict[int, int] = {}

    def waited(self, lane: int, index: int) -> None:
        """The host knows that all records of ``lane`` up to ``index`` are done."""
        if self._known.get(lane, -1) < index:
            self._known[lane] = index

    def freed(self, nbytes: int, uses: dict[int, int] | None) -> None:
        """A block was freed; ``uses`` is its last record, by lane, of a copy that is waited for."""
        self._free.setdefault(self._size_class(nbytes), []).append(uses)

    def take(self, nbytes: int) -> bool:
        """Take a cached block for ``nbytes``; False when the driver has to be asked for a fresh one."""
        blocks = self._free.get(self._size_class(nbytes), [])
        for position, uses in enumerate(blocks):
            if not uses or all(self._known.get(lane, -1) >= index for lane, index in uses.items()):
                del blocks[position]
                return True
        return False

    @staticmethod
    def _size_class(nbytes: int) -> int:
        return max(nbytes - 1, 0).bit_length()


def is_one_run(a: Tensor, b: Tensor) -> bool:
    """Whether a copy between the two is one run of bytes on both sides, in the same order."""
    if a.dtype != b.dtype or a.numel() != b.numel():
        return False
    if a.numel() == 1:
        return True
    if a.shape != b.shape:
        b = b.expand(a.shape)
    dense = 1
    dims = ((s, n, t) for s, n, t in zip(a.stride(), a.shape, b.stride(), strict=True) if n > 1)
    for stride, count, other in sorted(dims):
        if stride != dense or other != dense:
            return False
        dense *= count
    return True


def expands_contiguous(source: Tensor, shape: torch.Size) -> bool:
    """Whether ``source``, broadcast to ``shape``, is contiguous as it stands."""
    return source.is_contiguous() and source.numel() == shape.numel()
