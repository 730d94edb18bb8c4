"""The schedules layer: the gradient's work in other orders, with other memory, comes out to the same bits."""

from __future__ import annotations

from dataclasses import dataclass

from crosscurrent.schedules import PCT, LatestAndEarliest, Program, RandomWalk, Replayer, explore
from crosscurrent.suite.experiment import make_batches, make_model
from crosscurrent.suite.layer import Outcome
from crosscurrent.suite.recorded import on_gpu, record
from crosscurrent.suite.scenario import Scenario

RANDOM = 6
"""Random schedules, and as many of PCT, for each choice of memory. ``crosscurrent stress`` tries more."""


@dataclass(frozen=True)
class Schedules:
    """Two batches with the flag on, recorded with their values: each lane as late and as early as it can be,
    some schedules at random, and some of PCT, without and with the reuse of freed memory."""

    name: str = "schedules"
    claim: str = (
        "run again in program order the recorded bits come back, and so they do in every other schedule tried"
    )
    needs_cuda: bool = True

    needs_quiet: bool = False

    def takes(self, scenario: Scenario) -> bool:
        """Graphs on simulated CUDA only. On a GPU no values can be kept while one is captured: they are not
        there."""
        return not (scenario.graphs and on_gpu())

    def check(self, scenario: Scenario) -> Outcome:
        """Record, then run again."""
        recording = record(make_model(scenario), make_batches(), keep=True)
        assert recording.program is not None
        return judge(recording.program)


def judge(program: Program) -> Outcome:
    """Held if program order gives the recorded values, and every schedule the same."""
    if wrong := Replayer(program).unfaithful():
        return Outcome.failed(f"run again in program order, {', '.join(wrong[:3])} came out otherwise")
    found = explore(program, [LatestAndEarliest(), RandomWalk(count=RANDOM), PCT(count=RANDOM)])
    if not found.same:
        first = found.differences[0]
        said = str(first.failure) if first.failure is not None else "; ".join(map(str, first.changes[:3]))
        return Outcome.failed(
            f"{found.different} of {found.tried} schedules differ, first {first.schedule}: {said}"
        )
    values = len(program.names) + len(program.host_reads)
    return Outcome.held(
        f"{found.tried} schedules (bounded: there are more), {values} values, all bits the same"
    )
