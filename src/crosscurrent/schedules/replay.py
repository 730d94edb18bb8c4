"""Runs a program again, in any order that its edges allow, on memory that starts as poison.

One ``Replayer`` has decided who is handed whose memory; everything is bound once, and a run is one copy of
the initial memory, one call for each operation, and one comparison of all memory with that of
program order. Runs that share a prefix with the run before start from a copy of the memory at that
point, where the memory is small enough for that to pay.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from crosscurrent.schedules import arguments
from crosscurrent.schedules.arena import Arena
from crosscurrent.schedules.bound import Bound, Step, bind, same_values, settle
from crosscurrent.schedules.conflicts import Conflicts, conflicts
from crosscurrent.schedules.countdown import Countdown, Progress
from crosscurrent.schedules.errors import NotReplayableError
from crosscurrent.schedules.order import Linear
from crosscurrent.schedules.packing import pack
from crosscurrent.schedules.program import Program, View
from crosscurrent.schedules.reuse import Reuse, places
from crosscurrent.schedules.strategies import Space
from crosscurrent.schedules.values import Change, Values
from crosscurrent.trace.records import Op

_SMALL = 1 << 18
"""Bytes of memory up to which runs keep copies of it for the next run: a copy takes as long as a few ops."""

_ROOMY = 1 << 28
"""Bytes up to which every block has memory of its own; what lay in freed blocks can be compared then."""

_REMEMBERED = 1 << 14
"""Ends of runs whose differences are remembered."""

_COPIES = 8
"""Copies kept of one run, evenly spread."""


_RECORD, _OP, _FILLED = 1 << 10, 1 << 14, 4
"""Bytes that ops which are bound go through in the time that it takes to look at a record, and to bind an op
that goes through none; and how many are filled for each of them. They are gone through several times, to see
how the op is best run."""

_TELLINGS = 1000
"""How often is told how far ops are bound, at most: that takes time, too."""


class Failure(NamedTuple):
    """An operation that could not run: garbage as an index, say. On a GPU this is an assertion."""

    node: int
    op: str
    message: str

    def __str__(self) -> str:
        return f"{self.op} failed: {self.message}"


class Outcome(NamedTuple):
    """What a schedule came to, against program order."""

    linear: Linear
    changes: tuple[Change, ...] = ()
    failure: Failure | None = None

    @property
    def same(self) -> bool:
        """Whether every value came out as in program order."""
        return not self.changes and self.failure is None


class Replayer:
    """Runs schedules of one program. Raises ``NotReplayableError`` if program order itself cannot be run."""

    def __init__(
        self,
        program: Program,
        reuse: Sequence[Reuse] = (),
        *,
        settled: dict[int, list[int]] | None = None,
        told: Progress | None = None,
    ) -> None:
        """``settled`` remembers how ops are best run, for further replayers of the same program. ``told`` is
        called meanwhile with how much is bound, and with how much that will be, in units of no meaning."""
        if program.device == "cuda" and not arguments.has_real_cuda():
            raise NotReplayableError(
                "the program was recorded on a GPU, and this machine has none: replay it on one, or record "
                "it under crosscurrent.simulate()"
            )
        self.program = program
        self._settled = {} if settled is None else settled
        self.reuse = tuple(reuse)
        countdown = Countdown(told)
        memory = sum(buffer.nbytes for buffer in program.buffers.values())
        around = _OP + _RECORD * len(program.records) + memory // _FILLED  # before all ops, and after them
        countdown.expect(2 * around + sum(_work(op) for op in program.records if isinstance(op, Op)))
        self.order = program.order(reuse)
        with _quiet():
            self._arena = Arena(program, [*reuse, *self._packing()])
            self._takers = self._taken_over_by()
            countdown.take(around)
            self._steps = self._choose_steps(countdown)
            self._values = Values(program, self._arena)
            self._reference = self._arena.bytes.clone()
            self._reference_words = self._reference.view(torch.int64)
            countdown.take(around)
        self._known: dict[bytes, tuple[Change, ...]] = {}
        self._copies: list[tuple[int, Tensor]] = []
        self._last: Linear = ()
        stride = -(-len(self.order) // _COPIES)
        self._stride = stride if self._arena.bytes.nbytes <= _SMALL and stride > 2 else 0

    @cached_property
    def conflicts(self) -> Conflicts:
        """The pairs of operations whose order can matter."""
        where = places(self.program.records, self.reuse)
        return conflicts(self.order, {block: root for block, (root, _) in where.items()})

    @property
    def space(self) -> Space:
        """What strategies choose from."""
        return Space(self.order, self.conflicts)

    def run(self, linear: Linear) -> Outcome:
        """Run one schedule. It must be one: ``order.allows`` it, as everything that a strategy proposes."""
        with _quiet():
            failure = self._play(linear)
            if failure is not None:
                return Outcome(linear, (), failure)
            if torch.equal(self._arena.words, self._reference_words):
                return Outcome(linear)
            return Outcome(linear, self._changes())

    def final(self, view: View) -> Tensor:
        """A value as the last run left it."""
        return self._arena.view(view).clone()

    def left_by(self, linear: Linear, node: int, others: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """What the blocks that ``node`` and ``others`` write hold right after ``node`` ran in a schedule."""
        written = sorted({a.block for n in (node, *others) for a in self.order.ops[n].accesses if a.write})
        with _quiet():
            if self._play(linear[: linear.index(node) + 1]) is not None:
                return ()
            return tuple(self._arena.span(block).clone() for block in written)

    def unfaithful(self) -> tuple[str, ...]:
        """The names of the recorded values that program order does not reproduce bit for bit."""
        with _quiet():
            self._play(self.order.program)
            wrong = []
            for name, view in self._values.named():
                recorded = self.program.recorded.get(name)
                if recorded is not None and not same_values(
                    self._arena.view(view).to(recorded.device), recorded
                ):
                    wrong.append(name)
            return tuple(wrong)

    def _changes(self) -> tuple[Change, ...]:
        """What changed. Many schedules end alike, so the answers for small memories are remembered."""
        if self._arena.bytes.nbytes > _SMALL or self._arena.bytes.is_cuda:
            return self._values.changes(self._reference)
        key = hashlib.blake2b(self._arena.bytes.numpy().data, digest_size=16).digest()
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = self._values.changes(self._reference)
        return known

    def _play(self, linear: Linear) -> Failure | None:
        start = self._resume(linear)
        self._last = linear  # from here on, the copies are of this run
        steps = self._steps
        stops = {} if not self._takers else self._first_uses(linear)
        node = -1
        try:
            if not stops and not self._stride:
                for node in linear:
                    steps[node]()
            else:
                for at in range(start, len(linear)):
                    if self._stride and at and at % self._stride == 0 and at > start:
                        # Before anything of this step: another run may go on otherwise from here.
                        self._copies.append((at, self._arena.bytes.clone()))
                    if at in stops:
                        self._take_over(stops[at])
                    node = linear[at]
                    steps[node]()
        except Exception as error:  # whatever an op has to say against garbage
            return Failure(node, self.order.ops[node].name, str(error).strip().partition("\n")[0])
        return None

    def _resume(self, linear: Linear) -> int:
        """Restore the memory as it is after as much of the schedule as possible; returns how much."""
        shared = 0
        if self._copies:
            for mine, other in zip(linear, self._last, strict=False):
                if mine != other:
                    break
                shared += 1
            while self._copies and self._copies[-1][0] > shared:
                self._copies.pop()
        if not self._copies:
            self._arena.bytes.copy_(self._arena.image)
            return 0
        at, memory = self._copies[-1]
        self._arena.bytes.copy_(memory)
        return at

    def _packing(self) -> tuple[Reuse, ...]:
        if sum(buffer.nbytes for buffer in self.program.buffers.values()) <= _ROOMY:
            return ()
        chosen = {block for choice in self.reuse for block in choice[:2]}
        return pack(self.program.records, self.order, chosen)

    def _taken_over_by(self) -> dict[int, tuple[int, ...]]:
        """By node: the blocks that it may be the first to use, of those that take over memory."""
        if not self._arena.taken:
            return {}
        return {
            node: blocks
            for node, op in enumerate(self.order.ops)
            if (blocks := tuple({a.block for a in op.accesses if a.block in self._arena.taken}))
        }

    def _first_uses(self, linear: Linear) -> dict[int, list[int]]:
        seen: set[int] = set()
        first: dict[int, list[int]] = {}
        for at, node in enumerate(linear):
            for block in self._takers.get(node, ()):
                if block not in seen:
                    seen.add(block)
                    first.setdefault(at, []).append(block)
        return first

    def _take_over(self, blocks: Sequence[int]) -> None:
        """The block's first use takes the memory over: until it writes there is nothing of its own in it."""
        for block in blocks:
            self._arena.span(block).fill_(self.program.buffers[block].fill)

    def _choose_steps(self, countdown: Countdown) -> list[Step]:
        """Bind every action, and settle how to run it by running program order once."""
        arena = self._arena
        arena.bytes.copy_(arena.image)
        first = self._first_uses(self.order.program)
        chosen: list[Step] = []
        work = sum(map(_work, self.order.ops))
        untold = 0
        for node, op in enumerate(self.order.ops):
            self._take_over(first.get(node, ()))
            actions = self.program.actions.get(op.index)
            if actions is None:
                raise NotReplayableError(f"the values of {op.name} (record {op.index}) were not kept")
            try:
                chosen.append(_one_step(self._settle(op.index, [bind(action, arena) for action in actions])))
            except NotReplayableError:
                raise
            except Exception as error:
                raise NotReplayableError(
                    f"{op.name} (record {op.index}) does not run again: {error}"
                ) from error
            untold += _work(op)
            if untold * _TELLINGS >= work:
                countdown.take(untold)
                untold = 0
        countdown.take(untold)
        return chosen

    def _settle(self, index: int, bounds: Sequence[Bound]) -> list[Step]:
        """Run the actions of an operation, and choose how they will be run."""
        known = self._settled.get(index)
        if known is None:
            known = self._settled[index] = list(map(settle, bounds))
        else:
            for bound, option in zip(bounds, known, strict=True):
                bound.options[option]()
        return [bound.options[option] for bound, option in zip(bounds, known, strict=True)]


def _work(op: Op) -> int:
    """How much it takes to bind an op: the bytes that it goes through, and more."""
    return _OP + sum(access.region.stop - access.region.start for access in op.accesses)


def _one_step(steps: Sequence[Step]) -> Step:
    if len(steps) == 1:
        return steps[0]

    def run() -> None:
        for step in steps:
            step()

    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Out of reach of autograd and of whoever watches or simulates around us."""
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode())
        # Nothing is recorded for autograd all the same, but some ops keep what a backward needs only then.
        stack.enter_context(torch.enable_grad())
        yield
