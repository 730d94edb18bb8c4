"""The order of a trace: which operations must come before which, in every way it could have run.

The nodes are the operations that touch memory (``Op`` records with accesses), numbered in program
order; everything else in a trace only orders them. Lanes are chains, so the whole order is one
vector of counts per node, its clock: how many operations of each lane must have run before it.

    operation on a stream     after the earlier work of its lane, and all that the host did before
    operation of the host     after all earlier acts of the host
    event record and wait     what the lane had been given -> what the waiter is given later
    wait of the host          that work -> the host's later acts, and so all that it issues later

A block that is handed out again adds edges of its own: the allocator holds it back until what it
was told of (``record_stream``, PyTorch's own copies of pinned memory) is done. So the order
depends on the choice of memory, and both are part of a schedule.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence

from crosscurrent.races.clocks import take_in
from crosscurrent.trace.records import (
    HOST,
    Alloc,
    Free,
    HostWait,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    UseStream,
    WaitEvent,
)

Linear = tuple[int, ...]
"""One schedule of a trace: its operations in the order in which they run, as node numbers."""

Clock = tuple[int, ...]
"""How many operations of each lane, by ``PartialOrder.lanes``, come before something."""


class PartialOrder:
    """What must come before what among the operations of a trace. Node numbers are program order."""

    def __init__(self, ops: Sequence[Op], lanes: Sequence[int], clocks: Sequence[Clock]) -> None:
        self.ops = tuple(ops)
        """The operations, by node."""
        self.lanes = tuple(lanes)
        """The lanes that have operations, by their number in the trace."""
        self.clocks = tuple(clocks)
        """By node: how many operations of each of ``lanes`` must run before it."""
        dense = {lane: i for i, lane in enumerate(self.lanes)}
        self.lane = tuple(dense[op.lane] for op in self.ops)
        """By node: its lane, as an index into ``lanes``."""
        chains: list[list[int]] = [[] for _ in self.lanes]
        position = []
        for node, lane in enumerate(self.lane):
            position.append(len(chains[lane]))
            chains[lane].append(node)
        self.chains = tuple(map(tuple, chains))
        """By lane: its nodes, in order."""
        self.position = tuple(position)
        """By node: how many nodes of its lane come before it."""
        self.predecessors = tuple(self._covered(node) for node in range(len(self.ops)))
        """By node: the nodes just below it; all others before it follow."""
        after: list[list[int]] = [[] for _ in self.ops]
        for node, below in enumerate(self.predecessors):
            for other in below:
                after[other].append(node)
        self.successors = tuple(map(tuple, after))
        """By node: the nodes just above it."""

    def __len__(self) -> int:
        return len(self.ops)

    @classmethod
    def of(cls, records: Iterable[Record], reuse: Mapping[int, int] | None = None) -> PartialOrder:
        """The order of a trace; ``reuse`` says which block's memory a block was handed (new: old)."""
        builder = _Builder(reuse or {})
        for record in records:
            builder.feed(record)
        return builder.finish()

    @property
    def program(self) -> Linear:
        """The order in which the program issued the operations. It is always a schedule."""
        return tuple(range(len(self.ops)))

    def before(self, first: int, second: int) -> bool:
        """Whether ``first`` runs before ``second`` in every schedule."""
        return self.clocks[second][self.lane[first]] > self.position[first]

    def ordered(self, one: int, other: int) -> bool:
        """Whether the two run in the same order in every schedule."""
        return self.before(one, other) or self.before(other, one)

    def allows(self, linear: Sequence[int]) -> bool:
        """Whether this is a schedule: every node once, and none before what it must come after."""
        if len(linear) != len(self.ops):
            return False
        done = [0] * len(self.lanes)
        for node in linear:
            if not 0 <= node < len(self.ops) or self.position[node] != done[self.lane[node]]:
                return False
            if any(needed > ran for needed, ran in zip(self.clocks[node], done, strict=True)):
                return False
            done[self.lane[node]] += 1
        return True

    def _covered(self, node: int) -> tuple[int, ...]:
        last = [
            chain[count - 1] for chain, count in zip(self.chains, self.clocks[node], strict=True) if count
        ]
        return tuple(a for a in last if not any(a != b and self.before(a, b) for b in last))


class Frontier:
    """Walks one schedule: what may run next, as operations run one after the other."""

    def __init__(self, order: PartialOrder) -> None:
        self._order = order
        self._missing = [len(below) for below in order.predecessors]
        self.ready = [node for node, missing in enumerate(self._missing) if not missing]
        """The nodes that may run now, in program order; at most one of each lane."""

    def run(self, node: int) -> None:
        """Run a node of ``ready``."""
        ready, missing = self.ready, self._missing
        del ready[bisect_left(ready, node)]
        for above in self._order.successors[node]:
            missing[above] -= 1
            if not missing[above]:
                insort(ready, above)


def bounds(order: PartialOrder) -> tuple[dict[int, Clock], dict[int, Clock]]:
    """By block: what comes before all that is done to it, and up to where each lane does something to it.

    All that is done to one block comes before all that is done to another exactly if the second bound of the
    one is nowhere above the first bound of the other.
    """
    first: dict[int, Clock] = {}
    last: dict[int, list[int]] = {}
    width = len(order.lanes)
    for node, op in enumerate(order.ops):
        clock = order.clocks[node]
        for block in {access.block for access in op.accesses}:
            known = first.get(block)
            first[block] = clock if known is None else tuple(map(min, known, clock))
            last.setdefault(block, [0] * width)[order.lane[node]] = order.position[node] + 1
    return first, {block: tuple(clock) for block, clock in last.items()}


def inverse(linear: Sequence[int]) -> list[int]:
    """By node: when it runs."""
    when = [0] * len(linear)
    for step, node in enumerate(linear):
        when[node] = step
    return when


class _Builder:
    """One pass over the records. A clock is a list of counts by lane, as long as it needs to be."""

    def __init__(self, reuse: Mapping[int, int]) -> None:
        self._reuse = reuse
        self._dense: dict[int, int] = {}
        self._known: dict[int, list[int]] = {}  # by lane of the trace: what its next work comes after
        self._events: dict[int, list[int]] = {}
        self._old = frozenset(reuse.values())
        self._owner: dict[int, int] = {}  # by block that is handed on: the lane of its pool
        self._used: dict[int, set[int]] = {}  # and the other lanes for which the allocator keeps it
        self._held: dict[int, list[int]] = {}  # and what these had been given when it was freed
        self._ops: list[Op] = []
        self._clocks: list[list[int]] = []

    def feed(self, record: Record) -> None:
        match record:
            case Op():
                self._operation(record)
            case RecordEvent():
                self._events[record.event] = list(self._issued(record.lane))
            case WaitEvent():
                _join(self._issued(record.lane), self._events.get(record.event, ()))
            case HostWait():
                host = self._lane(HOST)
                if record.event is not None:
                    _join(host, self._events.get(record.event, ()))
                else:
                    for lane in record.lanes:
                        _join(host, self._lane(lane))
            case UseStream():
                self._keep(record.block, record.lane)
            case Free():
                hold = self._held[record.block] = []
                for lane in self._used.pop(record.block, ()):
                    _join(hold, self._lane(lane))
            case Alloc():
                self._owner[record.block] = record.lane if record.memory is MemoryKind.DEVICE else HOST
                if record.block in self._reuse:
                    _join(self._lane(HOST), self._held[self._reuse[record.block]])

    def finish(self) -> PartialOrder:
        width = len(self._dense)
        clocks = [tuple(clock) + (0,) * (width - len(clock)) for clock in self._clocks]
        return PartialOrder(self._ops, list(self._dense), clocks)

    def _operation(self, op: Op) -> None:
        if not op.accesses:
            return
        known = self._issued(op.lane)
        self._ops.append(op)
        self._clocks.append(list(known))
        lane = self._dense.setdefault(op.lane, len(self._dense))
        _join(known, [0] * (lane + 1))
        known[lane] += 1
        for access in op.accesses:
            if access.kept:
                self._keep(access.block, op.lane)

    def _keep(self, block: int, lane: int) -> None:
        """The allocator waits for ``lane`` before it hands the block on (never for its pool's own lane)."""
        if block in self._old and lane != self._owner.get(block, lane):
            self._used.setdefault(block, set()).add(lane)

    def _issued(self, lane: int) -> list[int]:
        """What work given to a lane now comes after: its earlier work, and the host's acts so far."""
        known = self._lane(lane)
        if lane != HOST:
            _join(known, self._lane(HOST))
        return known

    def _lane(self, lane: int) -> list[int]:
        return self._known.setdefault(lane, [])


def _join(into: list[int], clock: Sequence[int]) -> None:
    into.extend([0] * (len(clock) - len(into)))
    take_in(into, clock)
