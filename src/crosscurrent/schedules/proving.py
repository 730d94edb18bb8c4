"""``proving``: watch a piece of a program, keep its values, and show what its races do to them.

All of it, with a name for a value and a file for `crosscurrent replay step.ccp SCHEDULE`:

    with crosscurrent.simulate(), crosscurrent.proving() as proof:
        loss = step()
        proof.name({"loss": loss})
    for finding in proof.findings:
        print(finding.witness, finding.schedule)
    proof.save("step.ccp")
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from crosscurrent.errors import WrongUseError
from crosscurrent.races.findings import Finding
from crosscurrent.races.watch import Watch, watch
from crosscurrent.schedules.arguments import has_real_cuda, quiet
from crosscurrent.schedules.countdown import Progress
from crosscurrent.schedules.errors import NotReplayableError
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.recording import Keeper, keep_values
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.storage import save
from crosscurrent.schedules.witness import Prover, Witness

logger = logging.getLogger(__name__)


class Proving:
    """A watch that keeps the values of the program, too. Made by :func:`proving`, used once."""

    def __init__(self, *, full_stack: bool = False) -> None:
        self.watch: Watch = watch(trace=True, full_stack=full_stack)
        """What was seen, without witnesses."""
        self._contexts = ExitStack()
        self._keeper: Keeper | None = None
        self._program: Program | None = None
        self._witnesses: dict[str, Witness] = {}

    def __enter__(self) -> Proving:
        with ExitStack() as contexts:
            contexts.enter_context(self.watch)
            self._keeper = contexts.enter_context(keep_values(self.watch))
            self._contexts = contexts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.__exit__(kind, error, traceback)

    def name(self, values: Mapping[str, Tensor]) -> None:
        """Say what the final values are called; their content now is what a replay must reproduce.

        Call it last, inside of the context. What has no name is told by the line that allocated it.
        """
        keeper = self._entered()
        if has_real_cuda():
            with quiet(self.watch.tracer):
                torch.cuda.synchronize()  # ours, not the program's: the watch is not to take it for an edge
        keeper.name(values)

    @property
    def program(self) -> Program:
        """What can be run again. The trace ends where the context was left, or here."""
        if self._program is None:
            self._program = self._entered().program()
        return self._program

    def prove(self, *, told: Progress | None = None) -> Iterator[Finding]:
        """The races, each with its ``witness`` (what changed, or why nothing did) and ``schedule``, as
        soon as these are known. Runs the program again some times for each that is new.

        ``told`` is called meanwhile with how many of these runs were made, and with how many there will be
        at most: a number that gets smaller, and never larger.
        """
        findings = self.watch.findings
        prover = Prover(self.program, told=told)
        prover.expect(finding for finding in findings if finding.id not in self._witnesses)
        for finding in findings:
            witness = self._witnesses.get(finding.id)
            if witness is None:
                witness = self._witnesses[finding.id] = _proved(prover, finding)
            yield replace(finding, witness=str(witness), schedule=witness.schedule)

    @property
    def findings(self) -> list[Finding]:
        """The races, each with its ``witness`` and ``schedule``; they are looked for when first asked."""
        return list(self.prove())

    @property
    def witnesses(self) -> Mapping[str, Witness]:
        """What the findings looked at so far led to, by their ids."""
        return self._witnesses

    def unfaithful(self) -> tuple[str, ...]:
        """What a replay in program order does not reproduce bit for bit: witnesses are told against the
        replay, and may then be off from what was really seen. One sentence for each value."""
        try:
            return tuple(
                f"run again in program order, {name} comes out otherwise than it was seen"
                for name in Replayer(self.program).unfaithful()
            )
        except NotReplayableError as error:
            return (f"the program cannot be run again: {error}",)

    def save(self, path: str | Path) -> None:
        """Write the program to a file, for ``crosscurrent replay``.

        Raises ``NotReplayableError`` if a part of it lives in this process only.
        """
        save(self.program, path)

    def _entered(self) -> Keeper:
        if self._keeper is None:
            raise WrongUseError("this was not entered; use it as 'with crosscurrent.proving() as proof:'")
        return self._keeper


def _proved(prover: Prover, finding: Finding) -> Witness:
    try:
        return prover.prove(finding)
    except Exception as error:  # out of memory, say: the finding stays, and the others get their turn
        logger.debug("%s", finding.id, exc_info=True)
        return Witness(None, unproven=f"running it again failed: {type(error).__name__}: {error}")


def proving(*, full_stack: bool = False) -> Proving:
    """Watch what runs inside of ``with proving() as proof:``, and prove each race by a schedule that
    changes a value.

    As ``watch(trace=True)``, and on top a copy of all memory that is older than the watch, and of what the
    host reads; some microseconds for each op. The proofs hold the program's memory twice, all blocks at
    once where they come to less than 256 MiB.
    """
    return Proving(full_stack=full_stack)
