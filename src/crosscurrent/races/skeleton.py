"""A trace reduced to its sync edges and to what depends on them, to ask "what if" quickly.

Dropping an edge from a trace changes the clocks, and nothing else: which accesses conflict does not
depend on it. So one pass over the trace collects, beside the edges,

- *needs*: a conflict of an access on one lane with the last such access of another lane, which
  wants that lane's epoch to be known. A need that an earlier one of the same two lanes implies is left
  out, for clocks only grow. (An access that a write ordered after it replaced needs no mention: if the
  need of that write and the needs that come of it are met, so are its own.)
- *reuses*: accesses to memory that may have been another lane's, against what the pool had been given
  back. What ``record_stream`` covers depends on the clocks, so frees are part of the skeleton, too.
  What the pool's own lane left in blocks without it is never covered, and makes plain needs.

What was a race already in the recorded trace is left out. The skeleton is then run again with some
edges masked. Such a run starts at the first masked edge, from the clocks that the recorded run had
there, and ends when its clocks agree with the recorded ones for good.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from crosscurrent.races.causes import Cause, Context, Freed, RaceKind
from crosscurrent.races.clocks import Clock, take_in
from crosscurrent.trace.records import HOST, Access, HostWait, MemoryKind, Op, WaitEvent

Residue = dict[tuple[int, bool], int]
"""The last epochs of each lane's reads and of its writes that may still run on freed memory."""


class Conflict(NamedTuple):
    """Two accesses that must not trade places."""

    kind: RaceKind
    first_lane: int
    first: Op
    first_access: Access
    second: Op
    second_access: Access
    memory: MemoryKind
    freed: Freed | None = None

    def cause(self) -> Cause:
        """The race that it would be."""
        return Cause(
            **self._asdict(),
            second_lane=self.second.lane,
            certain=True,
            context=Context(None, None, None, None),
        )


@dataclass(slots=True, eq=False)
class Pool:
    """Freed blocks that later allocations may be served from."""

    memory: MemoryKind
    owner: int
    num_given_back: int = 0
    own: dict[bool, tuple[int, Op, Access, Freed]] = field(default_factory=dict)
    """The last read and the last write that the pool's own lane made of memory given back."""

    told: dict[tuple[int, bool], int] = field(default_factory=dict)
    """Up to which number a lane's reads, or writes, of reused memory are in the skeleton."""

    uses: dict[tuple[int, bool, int], tuple[Op, Access, Freed]] = field(default_factory=dict)
    """The accesses that residue stands for, by lane, whether they wrote, and epoch."""


@dataclass(slots=True)
class Mark:
    """An event is recorded on ``lane``, which has reached ``epoch``."""

    lane: int
    epoch: int
    event: int


@dataclass(slots=True)
class Edge:
    """A lane waits for a recording, or (the host) for the work of some lanes up to their epochs."""

    lane: int
    event: int | None
    work: tuple[tuple[int, int], ...]
    record: WaitEvent | HostWait
    number: int
    """Which edge of the trace it is."""


@dataclass(slots=True)
class Need:
    """Work of ``lane`` must come after ``epoch`` of another lane."""

    lane: int
    other: int
    epoch: int
    conflict: Conflict


@dataclass(slots=True)
class GivenBack:
    """A block that not only its pool's own lane used goes back, the pool's ``number``-th such."""

    pool: Pool
    number: int
    left: tuple[tuple[int, bool, int], ...]
    """What was done to it: (lane, whether it wrote, last epoch)."""

    held: tuple[tuple[int, int], ...]
    """The lanes for which the allocator holds it back, and what they had reached."""


@dataclass(slots=True)
class Reuse:
    """Work of ``lane`` may touch what the pool was given back, up to its ``number``-th block."""

    lane: int
    pool: Pool
    number: int
    op: Op
    access: Access
    excepted: frozenset[tuple[int, bool, int]] = frozenset()
    """Residue that it races with in the recorded trace already."""


Item = Mark | Edge | Need | GivenBack | Reuse


class Run:
    """The clocks of one run through the skeleton."""

    def __init__(self, clocks: Sequence[Clock], recorded: Run | None = None) -> None:
        self.clocks = [list(clock) for clock in clocks]
        self.marks: dict[int, Clock] = {}
        self.residue: dict[tuple[Pool, int], Residue] = {}
        self._recorded = recorded

    def known(self, lane: int, other: int) -> int:
        """The epoch of ``other`` that work issued on ``lane`` now comes after."""
        return max(self.clocks[lane][other], self.clocks[HOST][other])

    def mark(self, mark: Mark) -> bool:
        """Record an event; whether that marks just what it marked in the recorded run."""
        clock = self.marks[mark.event] = self._work(mark.lane, mark.epoch)
        return self._recorded is None or clock == self._recorded.marks.get(mark.event)

    def wait(self, edge: Edge) -> None:
        """Let an edge take effect."""
        if edge.event is None:
            for lane, epoch in edge.work:
                take_in(self.clocks[edge.lane], self._work(lane, epoch))
        else:
            clock = self.marks.get(edge.event)
            if clock is None and self._recorded is not None:
                clock = self._recorded.marks.get(edge.event)
            if clock is not None:
                take_in(self.clocks[edge.lane], clock)

    def give_back(self, item: GivenBack) -> bool:
        """Add what a block's users left to its pool; whether that is what it was in the recorded run."""
        done = list(self.clocks[HOST])
        for lane, epoch in item.held:
            done = list(map(max, done, self._work(lane, epoch)))
        residue = dict(self._residue_of(item.pool, item.number - 1))
        for lane, write, epoch in item.left:
            if epoch > done[lane] and epoch > residue.get((lane, write), 0):
                residue[lane, write] = epoch
        self.residue[item.pool, item.number] = residue
        return self._recorded is None or residue == self._recorded.residue[item.pool, item.number]

    def unmet(self, item: Need | Reuse) -> list[tuple[int, bool, int]]:
        """What an access races with now: lane, whether it wrote, epoch."""
        if isinstance(item, Need):
            if self.known(item.lane, item.other) >= item.epoch:
                return []
            return [(item.other, item.conflict.first_access.write, item.epoch)]
        return [
            (lane, write, epoch)
            for (lane, write), epoch in self._residue_of(item.pool, item.number).items()
            if lane != item.lane
            and (write or item.access.write)
            and self.known(item.lane, lane) < epoch
            and (lane, write, epoch) not in item.excepted
        ]

    def _residue_of(self, pool: Pool, number: int) -> Residue:
        residue = self.residue.get((pool, number))
        if residue is None and self._recorded is not None:
            residue = self._recorded.residue.get((pool, number))
        return residue or {}

    def _work(self, lane: int, epoch: int) -> Clock:
        """What a lane has been given: its clock, with what the host knows, and its own epoch."""
        host = self.clocks[HOST]
        clock = list(map(max, self.clocks[lane], host))
        clock[lane] = max(clock[lane], epoch)
        return clock


class Skeleton:
    """The sync edges of a trace and what needs them; ``races.needs.skeleton_of`` builds it."""

    def __init__(self, num_lanes: int) -> None:
        self.edges: list[Edge] = []
        self.recorded = Run([[0] * num_lanes for _ in range(num_lanes)])
        self._items: list[Item] = []
        self._starts: list[tuple[int, list[Clock]]] = []
        self._last_use: dict[int, int] = {}

    def add(self, item: Item) -> None:
        """Append an item and let it take effect in the recorded run."""
        run = self.recorded
        if isinstance(item, Edge):
            self._starts.append((len(self._items), [list(clock) for clock in run.clocks]))
            self.edges.append(item)
            if item.event is not None:
                self._last_use[item.event] = len(self._items)
            run.wait(item)
        elif isinstance(item, Mark):
            run.mark(item)
        elif isinstance(item, GivenBack):
            run.give_back(item)
        self._items.append(item)

    def broken(self, masked: Collection[int], *, first_only: bool = False) -> list[Cause]:
        """The races that appear when the edges of these numbers are dropped."""
        if not masked:
            return []
        start, clocks = self._starts[min(masked)]
        last_masked = max(masked)
        run = Run(clocks, self.recorded)
        causes: list[Cause] = []
        # Up to where something may be used that differs from the recorded run.
        differs_until = start
        for position in range(start, len(self._items)):
            item = self._items[position]
            if isinstance(item, (Need, Reuse)):
                for unmet in run.unmet(item):
                    causes.append(_conflict(item, unmet).cause())
                    if first_only:
                        return causes
            elif isinstance(item, Edge):
                if item.number in masked:
                    continue
                if (
                    item.number > last_masked
                    and position > differs_until
                    and run.clocks == self._starts[item.number][1]
                ):
                    break
                run.wait(item)
            elif isinstance(item, Mark):
                if not run.mark(item):
                    differs_until = max(differs_until, self._last_use.get(item.event, 0))
            elif not run.give_back(item):
                differs_until = len(self._items)
        return causes


def _conflict(item: Need | Reuse, unmet: tuple[int, bool, int]) -> Conflict:
    if isinstance(item, Need):
        return item.conflict
    op, access, freed = item.pool.uses[unmet]
    return Conflict(RaceKind.REUSE, unmet[0], op, access, item.op, item.access, item.pool.memory, freed)
