"""The gradient under stress: two batches with the flag on must come out as with the flag off, bit for bit.

On a real GPU every seed is a run with other delays. On simulated CUDA the run with the flag on is recorded
once, and every seed is other schedules of that trace: the one that the same delays would lead to, and one of
the explorer's own of the same kind. Between the batches the host waits for nothing, as in training: what only
shows in the second batch would be hidden by a wait.

With CUDA graphs, delays on a GPU reach what is issued outside of graphs: the transfers, and what `main` does
between launches. A recorded trace has every op that a launch runs, and other schedules move each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from crosscurrent.bits import deterministic
from crosscurrent.errors import WrongUseError
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.kvcache.replay_log import ReplayLog
from crosscurrent.races.findings import Finding
from crosscurrent.races.watch import Watch, watch
from crosscurrent.schedules import Prover, keep_values, save
from crosscurrent.stress import DelayConfig, Delays, How, SeededReplays, delays
from crosscurrent.stress.campaign import Failure, Trial
from crosscurrent.stress.lanes import OTHER
from crosscurrent.stress.plans import plan_of
from crosscurrent.suite.experiment import differences, make_batches, make_model
from crosscurrent.suite.recorded import on_host, steps
from crosscurrent.suite.scenario import CHECKPOINTS, Scenario
from crosscurrent.suite.verification import Cuda

_SHOWN = 4
"""Values listed for one failure; the others are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StressOptions:
    """How to stress."""

    lanes: tuple[str, ...] = DelayConfig().lanes
    delay_us: float = DelayConfig().delay_us
    how: How | None = None
    """None: the seeds take turns."""
    save_to: Path | None = None
    """A folder for the programs of what failed on simulated CUDA."""

    def __post_init__(self) -> None:
        if OTHER in self.lanes:
            raise ValueError(
                f"the gradient has no lane {OTHER!r}; its lanes are {', '.join(DelayConfig().lanes)}"
            )

    def plan(self, seed: int) -> DelayConfig:
        """The delays of one seed. Raises ``ValueError`` for options that cannot be."""
        return plan_of(seed, lanes=self.lanes, delay_us=self.delay_us, how=self.how)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCase:
    """The gradient of one scenario; its quantizer stores one of the two kinds of checkpoints."""

    scenario: Scenario
    checkpoints: str
    options: StressOptions
    cuda: Cuda

    @property
    def name(self) -> str:
        """What people read in a table."""
        stored = "" if self.scenario.quantizer == "default" else f" {self.checkpoints}"
        return f"{self.scenario.name}{stored}"

    def prepare(self) -> Trial:
        """Run it with the flag off and on."""
        if self.cuda is Cuda.NONE:
            raise WrongUseError(f"the gradient's lanes need CUDA, and there is {self.cuda.value}")
        return _Replayed(self) if self.cuda is Cuda.SIMULATED else _Delayed(self)

    def model(self, *, flag: bool) -> LongContextGradientModel:
        """A new model; always the same parameters."""
        return make_model(self.scenario, flag=flag, stored=[self.checkpoints])


def cases(
    scenarios: Sequence[Scenario],
    options: StressOptions,
    cuda: Cuda,
    checkpoints: Sequence[str] = CHECKPOINTS,
) -> list[GradientCase]:
    """The cases of some scenarios. Without a quantizer both kinds of checkpoints are stored alike."""
    return [
        GradientCase(scenario=scenario, checkpoints=what, options=options, cuda=cuda)
        for scenario in scenarios
        for what in (checkpoints[:1] if scenario.quantizer == "default" else checkpoints)
    ]


@dataclass(frozen=True, slots=True)
class Values:
    """What two batches came to, in CPU memory."""

    named: dict[str, Tensor]
    log: ReplayLog | None = None

    @classmethod
    def of(cls, model: LongContextGradientModel, named: dict[str, Tensor]) -> Values:
        """Those of the model's last steps. The host waits."""
        return cls(on_host(named), model.replay_log())

    def differences(self, on: Values) -> list[str]:
        """What differs with the flag on, in words; [] if nothing does and all is finite."""
        said = differences(self.named, on.named)
        if self.log is not None and on.log is not None and not self.log.same_as(on.log):
            said.append("the replay logs differ")
        return said


def _words(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _SHOWN} more values"] if len(lines) > _SHOWN else []
    return "\n".join([*lines[:_SHOWN], *more])


def _not_understood(seen: Watch) -> list[str]:
    return [f"{what.op} was not understood: {what.reason}" for what in dict.fromkeys(seen.unknown)]


class _Delayed:
    """A case on a real GPU: each seed is a run of its own, with delays."""

    def __init__(self, case: GradientCase) -> None:
        self._case = case
        with deterministic():
            self._off = self._run(flag=False)
            # There is no such lane: this counts ops, over which plans spread what they do.
            counted = delays(DelayConfig(how=How.EVERYWHERE, lanes=(OTHER,)))
            self.problems = self._failures(self._run(flag=True, delayed=counted), None)
            self._length = counted.num_ops
            self.problems += self._races()

    def run(self, seed: int) -> list[Failure]:
        """Run with the flag on and the delays of one seed."""
        plan = self._case.options.plan(seed)
        # By chance a plan delays nothing, and tries nothing then. Each of the lanes has ops to delay.
        for each in (plan, replace(plan, how=How.EVERYWHERE)):
            delayed = delays(each, length=self._length)
            with deterministic():
                failures = self._failures(self._run(flag=True, delayed=delayed), seed)
            if failures or delayed.num_delayed:
                return failures
        nothing = "nothing was delayed, so that nothing was tried"
        return [Failure(case=self._case.name, seed=seed, what=nothing)]

    def close(self) -> None:
        """The next case starts with empty memory."""
        with suppress(RuntimeError):  # after a failed assertion on the device nothing works any more
            torch.cuda.empty_cache()

    def _run(self, *, flag: bool, delayed: Delays | None = None) -> Values:
        model = self._case.model(flag=flag)
        torch.cuda.synchronize()  # whatever ran before is over, so that a run depends on its plan alone
        with delayed or nullcontext():
            named = steps(model, make_batches())
        return Values.of(model, named)

    def _races(self) -> list[Failure]:
        """What the detector says of a run with the flag on."""
        model = self._case.model(flag=True)
        with watch() as seen:
            steps(model, make_batches())
        said = [*map(str, seen.findings), *_not_understood(seen)]
        return [Failure(case=self._case.name, seed=None, what=what) for what in said]

    def _failures(self, on: Values, seed: int | None) -> list[Failure]:
        said = self._off.differences(on)
        return [Failure(case=self._case.name, seed=seed, what=_words(said))] if said else []


class _Replayed:
    """A case on simulated CUDA: each seed is a few schedules of the recorded trace."""

    def __init__(self, case: GradientCase) -> None:
        self._case = case
        self._saved: Path | None = None
        with case.cuda.context(), deterministic():
            off_model = case.model(flag=False)
            off = Values.of(off_model, steps(off_model, make_batches()))
            model = case.model(flag=True)
            with watch(trace=True) as seen, keep_values(seen) as keeper:
                named = steps(model, make_batches())
                keeper.name(named)
            said = off.differences(Values.of(model, named))
            self.program = keeper.program()
            findings = seen.findings
            said += _not_understood(seen)
            del named, model, off_model
        self._replays = SeededReplays(self.program, case.options.plan)
        said += [f"program order gives another value of {name}" for name in self._replays.unfaithful]
        self.problems = [self._failure(None, _words(said))] if said else []
        self.problems += [self._raced(finding) for finding in findings]

    def run(self, seed: int) -> list[Failure]:
        """Run the schedules of one seed."""
        found = self._replays.run(seed)
        if found is None:
            return []
        changes = [str(found.failure)] if found.failure is not None else list(map(str, found.changes))
        return [self._failure(seed, _words(changes), found.schedule)]

    def close(self) -> None:
        """Replays hold all memory of the program."""
        self._replays.close()

    def _raced(self, finding: Finding) -> Failure:
        witness = Prover(self.program).prove(finding)
        shown = str(witness).replace("\n", "\n           ")
        return self._failure(None, f"{finding}\n  witness: {shown}", witness.schedule)

    def _failure(self, seed: int | None, what: str, schedule: str | None = None) -> Failure:
        trace = None if self._case.options.save_to is None else str(self._save(self._case.options.save_to))
        return Failure(case=self._case.name, seed=seed, what=what, schedule=schedule, trace=trace)

    def _save(self, folder: Path) -> Path:
        if self._saved is None:
            name = self._case.name.replace(",", "").replace(" ", "-")
            self._saved = folder / f"{name}.ccp"
            save(self.program, self._saved)
        return self._saved
