"""For a finding, a schedule that gives another result, and what is wrong in it.

The directed schedule reverses the two accesses of the finding and leaves alone what it can. If no value
changes, schedules that reverse it in other ways are tried, and the other pairs of the finding; if
nothing helps, the finding stays *unproven*, with the reason. It is still a race: it is only that in this
program, with these values, the other order happens to come to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeAlias

import torch

from crosscurrent.races.causes import RaceKind
from crosscurrent.races.findings import Finding, RacingAccess
from crosscurrent.schedules.countdown import Countdown, Progress
from crosscurrent.schedules.errors import NotReplayableError
from crosscurrent.schedules.order import Linear
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.replay import Failure, Outcome, Replayer
from crosscurrent.schedules.reuse import GRANULARITY, Reuse, check, places
from crosscurrent.schedules.schedule import Schedule
from crosscurrent.schedules.strategies import Directed
from crosscurrent.schedules.values import Change

_MORE = 8
"""Random schedules with the pair reversed that are tried after the directed ones."""

_ALIKE = 32
"""Further pairs of the same kind that are tried after that."""

_SHOWN = 6
"""Changed values that are listed; the others are counted."""

_DIRECTED = 2
"""Directed schedules of one pair, at most."""

_BINDING = 2
"""Runs that a replayer makes before its first: of each op as it was recorded, and in a faster way."""

_REASON = 6
"""Runs, none longer than a replay, that it takes to see why two orders came to the same."""

_RUNS = _BINDING + _DIRECTED + _MORE + _ALIKE * _DIRECTED + _REASON
"""Runs that one pair takes with one choice of memory, at most."""

_Pair: TypeAlias = tuple[RaceKind, RacingAccess, RacingAccess]


class Witness(NamedTuple):
    """What a finding leads to."""

    schedule: str | None
    """The schedule that shows it; None if it is unproven."""

    changes: tuple[Change, ...] = ()
    failure: Failure | None = None
    unproven: str = ""
    """Why no schedule shows it."""

    @property
    def proven(self) -> bool:
        """Whether there is a schedule that gives another result."""
        return self.schedule is not None

    def __str__(self) -> str:
        if not self.proven:
            return f"unproven: {self.unproven}"
        if self.failure is not None:
            return str(self.failure)
        lines = [str(change) for change in self.changes[:_SHOWN]]
        if len(self.changes) > _SHOWN:
            lines.append(f"and {len(self.changes) - _SHOWN} more values")
        return "\n".join(lines)


class Prover:
    """Looks for witnesses in one program. Replays with the same choice of memory are shared.

    ``told`` is called after every run of the program, and amid those that a replayer makes before its first,
    if ``expect`` said what is to be proven.
    """

    def __init__(self, program: Program, *, told: Progress | None = None) -> None:
        self._program = program
        self._countdown = Countdown(told)
        self._replayers: dict[tuple[Reuse, ...], Replayer] = {}
        self._settled: dict[int, list[int]] = {}

    def expect(self, findings: Iterable[Finding]) -> None:
        """These are going to be proven: runs of the program are counted against what they take at most."""
        self._countdown.expect(sum(map(_most, findings)))

    def prove(self, finding: Finding) -> Witness:
        """A witness of a finding, or why there is none."""
        reason = ""
        with self._countdown.part(_most(finding)):
            for pair in _pairs(finding):
                try:
                    with self._countdown.part(_most_of(*pair)):
                        witness = self._reverse(*pair)
                except NotReplayableError as error:
                    witness = Witness(None, unproven=f"the program cannot be run again: {error}")
                if witness.proven:
                    return witness
                reason = reason or witness.unproven
        return Witness(None, unproven=reason)

    def prove_all(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings, each with its witness and the schedule that shows it."""
        proven = []
        for finding in findings:
            witness = self.prove(finding)
            proven.append(replace(finding, witness=str(witness), schedule=witness.schedule))
        return proven

    def _reverse(self, kind: RaceKind, first: RacingAccess, second: RacingAccess) -> Witness:
        reason = ""
        choices = list(self._memory(kind, first, second))
        self._countdown.skip(_most_of(kind, first, second) - len(choices) * _RUNS)
        for reuse in choices:
            with self._countdown.part(_RUNS):
                replayer = self._replayer(reuse)
                node = {op.index: node for node, op in enumerate(replayer.order.ops)}
                one, other = node[first.index], node[second.index]
                if replayer.order.ordered(one, other):
                    reason = reason or "with this memory handed on, the allocator itself orders the two"
                    continue
                outcome = self._try(replayer, one, other)
                if not outcome.same:
                    return self._witness(outcome, reuse)
                reason = reason or self._reason(replayer, outcome.linear, one, other)
        return Witness(None, unproven=reason)

    def _try(self, replayer: Replayer, first: int, second: int) -> Outcome:
        """The first outcome that is not that of program order; if there is none, the first of all."""
        attempts = [Directed(first=first, second=second, more=_MORE)]
        attempts += [Directed(first=one, second=other) for one, other in _alike(replayer, first, second)]
        self._countdown.skip(_DIRECTED * (1 + _ALIKE - len(attempts)))
        tried: Outcome | None = None
        for attempt in attempts:
            with self._countdown.part(_DIRECTED + attempt.more):
                for proposal in attempt.proposals(replayer.space):
                    outcome = replayer.run(proposal.linear)
                    self._countdown.take()
                    if not outcome.same:
                        return outcome
                    tried = tried or outcome
        assert tried is not None  # every attempt proposes something
        return tried

    def _witness(self, outcome: Outcome, reuse: tuple[Reuse, ...]) -> Witness:
        schedule = Schedule(program=self._program.fingerprint, linear=outcome.linear, reuse=reuse)
        return Witness(str(schedule), outcome.changes, outcome.failure)

    def _memory(
        self, kind: RaceKind, first: RacingAccess, second: RacingAccess
    ) -> Iterator[tuple[Reuse, ...]]:
        """The choices of memory in which the two accesses can meet."""
        if kind is not RaceKind.REUSE:
            yield ()
            return
        for shift in _shifts(first, second):
            choice = (Reuse(second.block, first.block, shift),)
            try:
                check(self._program.records, choice)
                places(self._program.records, choice)
            except ValueError:
                continue
            yield choice

    def _replayer(self, reuse: tuple[Reuse, ...]) -> Replayer:
        with self._countdown.part(_BINDING):
            if reuse not in self._replayers:
                # One holds all memory of the program; findings come in runs of a kind.
                self._replayers.clear()
                runs = 1 if self._settled else _BINDING  # which way is the faster one is settled but once
                self._replayers[reuse] = Replayer(
                    self._program,
                    reuse,
                    settled=self._settled,
                    told=lambda bound, most: self._countdown.amid(runs * bound / most),
                )
                self._countdown.take(runs)
        return self._replayers[reuse]

    def _reason(self, replayer: Replayer, other: Linear, first: int, second: int) -> str:
        """Why another order of two operations came to the same."""

        def left_by(linear: Linear, node: int, *others: int) -> tuple[torch.Tensor, ...]:
            left = replayer.left_by(linear, node, others)
            self._countdown.take()
            return left

        usual = replayer.order.program
        moments = [
            (left_by(usual, first), left_by(other, first)),
            (left_by(usual, second), left_by(other, second)),
            (left_by(usual, second, first), left_by(other, first, second)),
        ]
        for one, two in moments:
            if len(one) != len(two) or not all(map(torch.equal, one, two)):
                return (
                    "the other order changes what is in memory in between, but that is overwritten, or "
                    "nothing reads it, before the end"
                )
        return "both orders leave the same values in memory, as far as this run's values go"


def _pairs(finding: Finding) -> list[_Pair]:
    """The pairs of a finding that are to be tried.

    Two ops that race for several values are several pairs, and one schedule reverses them all: of pairs with
    the same ops and the same choices of memory the first is enough.
    """
    pairs: dict[tuple[object, ...], _Pair] = {}
    also = [(pair.kind, pair.first, pair.second) for pair in finding.also]
    for kind, first, second in [(finding.kind, finding.first, finding.second), *also]:
        memory = (first.block, second.block, *_shifts(first, second)) if kind is RaceKind.REUSE else ()
        pairs.setdefault((first.index, second.index, memory), (kind, first, second))
    return list(pairs.values())


def _most(finding: Finding) -> int:
    """Runs of the program that a finding takes, at most."""
    return sum(_most_of(*pair) for pair in _pairs(finding))


def _most_of(kind: RaceKind, first: RacingAccess, second: RacingAccess) -> int:
    """The same for one pair of accesses."""
    return _RUNS * (len(_shifts(first, second)) if kind is RaceKind.REUSE else 1)


def _shifts(first: RacingAccess, second: RacingAccess) -> list[int]:
    """Where the memory of one may begin in that of the other, for both to touch the same bytes."""
    return sorted({0, (first.start - second.start) // GRANULARITY * GRANULARITY})


def _alike(replayer: Replayer, first: int, second: int) -> Iterator[tuple[int, int]]:
    """The same race at other times: a finding stands for all pairs of its lanes, ops and call sites."""

    def like(node: int) -> set[int]:
        wanted, ops = replayer.order.ops[node], enumerate(replayer.order.ops)
        return {i for i, op in ops if (op.lane, op.name, op.site) == (wanted.lane, wanted.name, wanted.site)}

    ones, others = like(first), like(second)
    alike = (p for p in replayer.conflicts if p != (first, second) and p[0] in ones and p[1] in others)
    return islice(alike, _ALIKE)


def prove(program: Program, findings: Sequence[Finding]) -> list[Finding]:
    """The findings of a program, each with its witness (or why there is none) and its schedule."""
    return Prover(program).prove_all(findings)
