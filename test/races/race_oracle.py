"""Every race of a trace, slowly and obviously.

Each record is an act of the host, and a node; each op, recording and wait is a node on its lane as
well. Order is reachability among all of them. Regions are sets of bytes. Reuse is taken by its
definition: any block that the pool had been given back before an allocation may be what it hands out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from crosscurrent.trace.records import (
    HOST,
    Access,
    Alloc,
    Free,
    HostWait,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    Region,
    UseStream,
    WaitEvent,
)


class Pair(NamedTuple):
    """A race: its kind, and the indices of its two ops."""

    kind: str
    first: int
    second: int


class _Use(NamedTuple):
    op: Op
    node: int
    access: Access


class Oracle:
    """The graph of a trace."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._before: list[int] = []  # for each node, the set of nodes that come before it, as bits
        self._tails: dict[int, int] = {}
        self._host = self._node()
        self.nodes: dict[int, int] = {}
        marks: dict[int, int] = {}
        uses: dict[int, list[_Use]] = {}
        allocs: dict[int, Alloc] = {}
        frees: dict[int, tuple[int, int]] = {}
        held: dict[int, set[int]] = {}
        for record in records:
            after = [self._host]
            if isinstance(record, HostWait):
                if record.event is not None:
                    after.append(marks[record.event])
                after += [self._tails[lane] for lane in record.lanes if lane in self._tails]
            self._host = self._node(*after)
            if isinstance(record, Op):
                node = self._host if record.lane == HOST else self._on(record.lane)
                self.nodes[record.index] = node
                for access in record.accesses:
                    uses.setdefault(access.block, []).append(_Use(record, node, access))
                    if access.kept:
                        held.setdefault(access.block, set()).add(record.lane)
            elif isinstance(record, RecordEvent):
                marks[record.event] = self._on(record.lane)
            elif isinstance(record, WaitEvent):
                self._on(record.lane, *([marks[record.event]] if record.event in marks else []))
            elif isinstance(record, Alloc):
                allocs[record.block] = record
            elif isinstance(record, UseStream):
                held.setdefault(record.block, set()).add(record.lane)
            elif isinstance(record, Free):
                lanes = held.get(record.block, set()) - {_pool(allocs[record.block])[1]}
                node = self._node(*(self._tails[lane] for lane in lanes if lane in self._tails))
                frees[record.block] = (record.index, node)
        self.pairs = self._conflicts(uses) | self._reuses(uses, allocs, frees)

    def ordered(self, first: int, second: int) -> bool:
        """Whether node ``first`` comes before node ``second``."""
        return first == second or bool(self._before[second] >> first & 1)

    def _node(self, *after: int) -> int:
        self._before.append(0)
        node = len(self._before) - 1
        for other in after:
            self._before[node] |= self._before[other] | 1 << other
        return node

    def _on(self, lane: int, *after: int) -> int:
        tail = [self._tails[lane]] if lane in self._tails else []
        self._tails[lane] = self._node(self._host, *tail, *after)
        return self._tails[lane]

    def _conflicts(self, uses: dict[int, list[_Use]]) -> set[Pair]:
        return {
            Pair(_kind(one.access, two.access), one.op.index, two.op.index)
            for block in uses.values()
            for one, two in itertools.combinations(block, 2)
            if one.op is not two.op
            and (one.access.write or two.access.write)
            and not self.ordered(one.node, two.node)
            and bytes_of(one.access.region) & bytes_of(two.access.region)
        }

    def _reuses(
        self, uses: dict[int, list[_Use]], allocs: dict[int, Alloc], frees: dict[int, tuple[int, int]]
    ) -> set[Pair]:
        pairs = set()
        for new, old in itertools.product(allocs.values(), frees):
            given_back, held_until = frees[old]
            if not new.fresh or given_back > new.index or _pool(allocs[old]) != _pool(new):
                continue
            for one, two in itertools.product(uses.get(old, []), uses.get(new.block, [])):
                if (
                    (one.access.write or two.access.write)
                    and not self.ordered(one.node, two.node)
                    and not self.ordered(one.node, held_until)
                ):
                    pairs.add(Pair("reuse", one.op.index, two.op.index))
        return pairs


def _pool(alloc: Alloc) -> tuple[MemoryKind, int, bool]:
    if alloc.memory is MemoryKind.PINNED:
        return alloc.memory, HOST, False
    return alloc.memory, alloc.lane, alloc.nbytes <= 1 << 20


def _kind(first: Access, second: Access) -> str:
    if not second.write:
        return "read-after-write"
    return "write-after-write" if first.write else "write-after-read"


def bytes_of(region: Region) -> set[int]:
    starts = {region.start}
    for count, stride in region.dims:
        starts = {start + i * stride for start in starts for i in range(count)}
    return {start + i for start in starts for i in range(region.run)}
