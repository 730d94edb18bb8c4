"""For a finding, a schedule that gives another result, and what is wrong in it.

The directed schedule reverses the two accesses of the finding and leaves alone what it can. If no value
changes, schedules that reverse it in other ways are tried, and the other pairs of the finding; if
nothing helps, the finding stays *unproven*, with the reason. It is still a race: it is only that in this
program, with these values, the other order happens to come to the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

import torch

from crosscurrent.races.causes import RaceKind
from crosscurrent.races.findings import Finding, RacingAccess
from crosscurrent.schedules.errors import NotReplayableError
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
    """Looks for witnesses in one program. Replays with the same choice of memory are shared."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._replayers: dict[tuple[Reuse, ...], Replayer] = {}
        self._settled: dict[int, list[int]] = {}

    def prove(self, finding: Finding) -> Witness:
        """A witness of a finding, or why there is none."""
        pairs = [(finding.kind, finding.first, finding.second)]
        pairs += [(pair.kind, pair.first, pair.second) for pair in finding.also]
        reason = ""
        for kind, first, second in pairs:
            try:
                witness = self._reverse(kind, first, second)
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
        for reuse in self._memory(kind, first, second):
            replayer = self._replayer(reuse)
            node = {op.index: node for node, op in enumerate(replayer.order.ops)}
            one, other = node[first.index], node[second.index]
            if replayer.order.ordered(one, other):
                reason = reason or "with this memory handed on, the allocator itself orders the two"
                continue
            outcomes = list(self._outcomes(replayer, one, other, _MORE))
            for outcome in chain(outcomes, self._alike(replayer, one, other)):
                if not outcome.same:
                    return self._witness(outcome, reuse)
            reason = reason or self._reason(replayer, outcomes[0], one, other)
        return Witness(None, unproven=reason)

    def _outcomes(self, replayer: Replayer, first: int, second: int, more: int) -> Iterator[Outcome]:
        for proposal in Directed(first=first, second=second, more=more).proposals(replayer.space):
            outcome = replayer.run(proposal.linear)
            yield outcome
            if not outcome.same:
                return

    def _alike(self, replayer: Replayer, first: int, second: int) -> Iterator[Outcome]:
        """The same race at other times: a finding stands for all pairs of its lanes, ops and call sites."""

        def key(node: int) -> tuple[int, str, int]:
            op = replayer.order.ops[node]
            return op.lane, op.name, op.site

        wanted = key(first), key(second)
        alike = (p for p in replayer.conflicts if p != (first, second) and (key(p[0]), key(p[1])) == wanted)
        for one, other in islice(alike, _ALIKE):
            yield from self._outcomes(replayer, one, other, 0)

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
        for shift in sorted({0, (first.start - second.start) // GRANULARITY * GRANULARITY}):
            choice = (Reuse(second.block, first.block, shift),)
            try:
                check(self._program.records, choice)
                places(self._program.records, choice)
            except ValueError:
                continue
            yield choice

    def _replayer(self, reuse: tuple[Reuse, ...]) -> Replayer:
        if reuse not in self._replayers:
            self._replayers.clear()  # one holds all memory of the program; findings come in runs of a kind
            self._replayers[reuse] = Replayer(self._program, reuse, settled=self._settled)
        return self._replayers[reuse]

    def _reason(self, replayer: Replayer, outcome: Outcome, first: int, second: int) -> str:
        """Why the other order of two operations came to the same."""
        usual, other = replayer.order.program, outcome.linear
        moments = [
            (replayer.left_by(usual, first), replayer.left_by(other, first)),
            (replayer.left_by(usual, second), replayer.left_by(other, second)),
            (replayer.left_by(usual, second, [first]), replayer.left_by(other, first, [second])),
        ]
        for one, two in moments:
            if len(one) != len(two) or not all(map(torch.equal, one, two)):
                return (
                    "the other order changes what is in memory in between, but that is overwritten, or "
                    "nothing reads it, before the end"
                )
        return "both orders leave the same values in memory, as far as this run's values go"


def prove(program: Program, findings: Sequence[Finding]) -> list[Finding]:
    """The findings of a program, each with its witness (or why there is none) and its schedule."""
    return Prover(program).prove_all(findings)
