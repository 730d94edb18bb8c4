"""Watches the body of a test. Imported for the first test that is watched, not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

import torch

import crosscurrent
from crosscurrent.races.findings import Finding
from crosscurrent.schedules import (
    PCT,
    LatestAndEarliest,
    NotReplayableError,
    Program,
    RandomWalk,
    Strategy,
    explore,
    keep_values,
    prove,
)
from crosscurrent.schedules.explore import Difference
from crosscurrent.stress import DelayConfig, SeededReplays, delays
from crosscurrent.stress.lanes import ROLES
from crosscurrent.stress.plans import plan_of
from crosscurrent.trace.simulate import Simulation, active
from crosscurrent_pytest.failures import Judgement, say
from crosscurrent_pytest.wishes import Wishes

if TYPE_CHECKING:
    from crosscurrent.races.watch import Watch
    from crosscurrent.schedules import Keeper


class Place:
    """Where watched tests run: on the GPU, or on simulated CUDA."""

    def __init__(self) -> None:
        self._simulation: Simulation | None = None

    @property
    def simulated(self) -> bool:
        """Whether there is no GPU."""
        return active() is not None

    def enter(self) -> None:
        """Make CUDA work, if it does not yet."""
        if self._simulation is None and not torch.cuda.is_available():
            simulation = crosscurrent.simulate()
            simulation.__enter__()
            self._simulation = simulation

    def leave(self) -> None:
        """Put everything back."""
        simulation, self._simulation = self._simulation, None
        if simulation is not None:
            simulation.__exit__(None, None, None)


class Body:
    """A context manager around the body of one test."""

    def __init__(self, wishes: Wishes, place: Place, name: str) -> None:
        self._wishes = wishes
        self._name = name
        self._simulated = place.simulated
        self._replays = wishes.schedules > 0 or (wishes.seed is not None and self._simulated)
        self.watch: Watch = crosscurrent.watch(trace=self._replays)
        self._keeper: Keeper | None = None
        self._contexts = ExitStack()

    def __enter__(self) -> Body:
        with ExitStack() as contexts:
            if self._wishes.seed is not None and not self._simulated:
                # First, since it measures the clock: the host's wait for that is not the test's.
                contexts.enter_context(delays(self._plan(self._wishes.seed)))
            contexts.enter_context(self.watch)
            if self._replays:
                self._keeper = contexts.enter_context(keep_values(self.watch))
            self._contexts = contexts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.__exit__(kind, error, traceback)

    def seen(self) -> str:
        """What to say of a body that failed by itself: its races, and how to repeat it, if it is stressed."""
        judgement = self._judgement(self.watch.findings)
        if judgement.findings:
            return say(judgement).plain
        return f"repeat: {judgement.repeat}" if judgement.repeat else ""

    def properties(self) -> list[tuple[str, object]]:
        """What goes into the JUnit XML beside the text of a failure."""
        ids = " ".join(finding.id for finding in self.watch.findings)
        return [("crosscurrent.findings", ids)] if ids else []

    def judge(self) -> None:
        """Fail the test, with everything that is wrong with it."""
        judgement = self._judgement(self.watch.findings)
        if self._keeper is not None:
            judgement = self._replayed(judgement, self._keeper.program())
        if judgement.is_bad:
            judgement.fail()

    def _judgement(self, findings: list[Finding]) -> Judgement:
        waits = self.watch.host_waits
        allowed = self._wishes.host_waits
        return Judgement(
            findings=tuple(findings),
            waits=() if allowed is None or len(waits) <= allowed else tuple(waits),
            waits_allowed=allowed or 0,
            unknown=tuple(dict.fromkeys(self.watch.unknown)),
            strict=self._wishes.strict,
            simulated=self._simulated,
            repeat=self._repeat(),
        )

    def _replayed(self, judgement: Judgement, program: Program) -> Judgement:
        """Other schedules: to prove the races, or else to look for what the detector does not see."""
        if judgement.findings:
            return replace(judgement, findings=tuple(prove(program, judgement.findings)))
        try:
            return replace(judgement, differences=tuple(self._differences(program)))
        except NotReplayableError as error:
            return replace(judgement, not_replayable=str(error))

    def _differences(self, program: Program) -> Iterator[Difference]:
        if count := self._wishes.schedules:
            strategies: list[Strategy] = [
                LatestAndEarliest(),
                RandomWalk(count=-(-count // 2)),
                PCT(count=count // 2),
            ]
            yield from explore(program, strategies).differences
        if self._wishes.seed is not None and self._simulated:
            replays = SeededReplays(program, self._plan)
            if (difference := replays.run(self._wishes.seed)) is not None:
                yield difference

    def _plan(self, seed: int) -> DelayConfig:
        return plan_of(seed, lanes=ROLES, delay_us=self._wishes.delay_us)

    def _repeat(self) -> str:
        """The options that run this seed again."""
        if self._wishes.seed is None:
            return ""
        options = f"--stress-seed {self._wishes.seed} --delay-us {self._wishes.delay_us:g}"
        return f"pytest '{self._name}' {options}"
