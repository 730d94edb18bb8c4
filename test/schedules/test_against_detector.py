"""The detector and the explorer check each other, on random small programs.

No finding if and only if all schedules give the same values. For that to hold in both directions the values
have to be generic: every write is an update ``x = odd * x + constant`` modulo 2 ** 64 with constants of its
own, no two of which commute; the first access to a new block fills it; and every read leaves a copy behind.

``CROSSCURRENT_PROGRAMS=5000`` draws that many programs in place of 200 (here, and half of it end to end).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosscurrent.races.detector import Detector
from crosscurrent.schedules.explore import memory_choices
from crosscurrent.schedules.program import Program, View
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.strategies import Classes
from crosscurrent.trace.records import HOST, NO_EVENT, Free, HostWait, Record, UseStream, WaitEvent

if TYPE_CHECKING:
    from .conftest import Hand

LANES = (1, 2, 3)
SLOT = 64  # elements of 8 bytes: the granularity of the allocator
MOST_CLASSES = 4000

Command = tuple[int, int, int, int]

PROGRAMS = int(os.environ.get("CROSSCURRENT_PROGRAMS", "200"))


class Writer:
    """Turns numbers into a program. Any numbers make one, so that a failing one shrinks well."""

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self._blocks: list[tuple[View, bool]] = []  # those that live, and whether they are pinned
        self._events: list[int] = [NO_EVENT]
        self._num_reads = 0
        for pinned in (False, True):
            content = torch.arange(2 * SLOT, dtype=torch.int64)
            self._blocks.append((hand.full(1, content, pinned=pinned), pinned))

    def write(self, commands: Sequence[Command]) -> Program:
        for kind, *numbers in commands:
            kinds: list[Callable[[int, int, int], None]] = [
                self._update,
                self._read,
                self._move,
                self._edge,
                self._wait,
                self._record,
                self._synchronize,
                self._allocate,
                self._free,
                self._use,
                # What takes several steps to be right, which chance alone seldom gets right.
                self._hand_over,
                self._hand_over,
                self._hand_on,
                self._hand_on,
            ]
            kinds[kind % len(kinds)](*numbers)
        return self._hand.program()

    def _update(self, lane: int, block: int, part: int) -> None:
        view, pinned = self._part(block, part)
        self._hand.update(self._lane(lane, pinned), view, kept=pinned and part % 2 == 1)

    def _read(self, lane: int, block: int, part: int) -> None:
        view, pinned = self._part(block, part)
        self._num_reads += 1
        name = f"read {self._num_reads}"
        self._hand.read(self._lane(lane, pinned), view, name, kept=pinned and part % 2 == 1)

    def _move(self, lane: int, block: int, part: int) -> None:
        (target, pinned), (source, also) = self._part(block, part), self._part(block + 1, part)
        if target.shape == source.shape and target.block != source.block:
            self._hand.update(self._lane(lane, pinned and also), target, source)

    def _edge(self, source: int, target: int, _: int) -> None:
        self._hand.edge(LANES[source % 3], (HOST, *LANES)[target % 4])

    def _record(self, lane: int, _: int, __: int) -> None:
        self._events.append(self._hand.record(LANES[lane % 3]))

    def _wait(self, lane: int, event: int, _: int) -> None:
        self._hand.wait((HOST, *LANES)[lane % 4], self._events[event % len(self._events)])

    def _synchronize(self, lane: int, which: int, _: int) -> None:
        self._hand.synchronize(*(LANES if which % 3 == 0 else (LANES[lane % 3],)))

    def _allocate(self, owner: int, lane: int, size: int) -> None:
        pinned = size % 4 == 3
        view = self._hand.empty(LANES[owner % 3], SLOT * (1 + size % 2), dtype=torch.int64, pinned=pinned)
        self._blocks.append((view, pinned))
        # One in two is first used by the lane that owns it.
        first = owner if lane % 2 else lane // 2
        self._hand.fill(self._lane(first, pinned), view)

    def _free(self, block: int, _: int, __: int) -> None:
        if self._blocks:
            view, _pinned = self._blocks.pop(block % len(self._blocks))
            self._hand.free(view.block)

    def _use(self, lane: int, block: int, _: int) -> None:
        if self._blocks:
            view, pinned = self._blocks[block % len(self._blocks)]
            if not pinned:
                self._hand.use(view.block, LANES[lane % 3])

    def _hand_over(self, lane: int, block: int, part: int) -> None:
        """One lane updates a block, and another one goes on with it, after a wait or without."""
        other = lane + 1 + part % 2
        self._update(lane, block, 0)
        if part % 6:
            self._hand.edge(LANES[lane % 3], LANES[other % 3])
        self._update(other, block, part // 2 * 2)
        if part % 5:
            self._hand.edge(LANES[other % 3], LANES[lane % 3])

    def _hand_on(self, owner: int, lane: int, how: int) -> None:
        """A block is read on another lane and freed, and its memory may go to the next one."""
        self._allocate(owner, 2 * owner + 1, 0)
        (view, _), mine, other = self._blocks[-1], LANES[owner % 3], LANES[lane % 3]
        if how % 5:
            self._hand.edge(mine, other)
        self._num_reads += 1
        self._hand.read(other, view, f"read {self._num_reads}")
        if how % 3 == 1:
            self._hand.use(view.block, other)
        if how % 3 == 2:
            self._hand.edge(other, mine)
        self._free(len(self._blocks) - 1, 0, 0)
        self._allocate(owner + how // 10, 2 * owner + 1, 0)

    def _lane(self, number: int, pinned: bool) -> int:
        return (HOST, *LANES)[number % 4] if pinned else LANES[number % 3]

    def _part(self, block: int, part: int) -> tuple[View, bool]:
        if not self._blocks:
            self._allocate(block, block, part)
        view, pinned = self._blocks[block % len(self._blocks)]
        (size,) = view.shape
        return [
            (view, pinned),
            (view._replace(shape=(SLOT // 2,)), pinned),
            (view._replace(shape=(SLOT // 2,), offset=size - SLOT // 2), pinned),
            (view._replace(shape=(size // 2,), strides=(2,)), pinned),
            (view._replace(shape=(size // 2,), strides=(2,), offset=1), pinned),
        ][part // 2 % 5]


def races(records: Iterable[Record]) -> bool:
    detector = Detector()
    for record in records:
        detector.feed(record)
    return bool(detector.causes)


def differs(program: Program) -> bool:
    """Whether some schedule, with some choice of memory, gives other values."""
    for reuse in memory_choices(program, every=True):
        replayer = Replayer(program, reuse)
        for number, proposal in enumerate(Classes().proposals(replayer.space)):
            if not replayer.run(proposal.linear).same:
                return True
            assert number < MOST_CLASSES, "too many classes of schedules that all agree"
    return False


@pytest.fixture(scope="module")
def new_program(new_hand: Callable[[], Hand]) -> Callable[[Sequence[Command]], Program]:
    return lambda commands: Writer(new_hand()).write(commands)


commands = st.lists(st.tuples(st.integers(0, 13), *[st.integers(0, 11)] * 3), min_size=1, max_size=12)


@settings(max_examples=PROGRAMS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(commands=commands)
def test_no_finding_if_and_only_if_all_schedules_agree(
    new_program: Callable[[Sequence[Command]], Program], commands: Sequence[Command]
) -> None:
    program = new_program(commands)
    assert races(program.records) == differs(program)


@pytest.fixture(scope="module")
def judged(new_program: Callable[[Sequence[Command]], Program]) -> list[tuple[Program, bool]]:
    """Random programs, and whether some schedule of theirs gives other values."""
    draw = Random(11)
    found = []
    for _ in range(300):
        length = draw.randint(2, 12)
        program = new_program([_command(draw) for _ in range(length)])
        found.append((program, differs(program)))
    return found


def _command(draw: Random) -> Command:
    return draw.randint(0, 13), draw.randint(0, 11), draw.randint(0, 11), draw.randint(0, 11)


def test_both_verdicts_are_frequent(judged: list[tuple[Program, bool]]) -> None:
    different = sum(verdict for _, verdict in judged)
    assert len(judged) / 4 < different < len(judged) * 3 / 4


@pytest.mark.parametrize("blind_to", [WaitEvent, HostWait, UseStream, Free], ids=lambda kind: kind.__name__)
def test_a_detector_that_is_blind_to_something_is_caught(
    judged: list[tuple[Program, bool]], blind_to: type[Record]
) -> None:
    """The test of the test: each kind of record matters to the verdict on some of the programs."""
    assert all(races(program.records) == verdict for program, verdict in judged)
    seen = [[r for r in program.records if not isinstance(r, blind_to)] for program, _ in judged]
    assert any(races(records) != verdict for records, (_, verdict) in zip(seen, judged, strict=True))
