"""The parity layer: moving checkpoints asynchronously changes no bit of any result."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from crosscurrent.bits import deterministic
from crosscurrent.suite.experiment import Measurement, differences, make_batches, make_model, measure
from crosscurrent.suite.layer import Outcome
from crosscurrent.suite.scenario import CHECKPOINTS, Scenario
from crosscurrent.trace.simulate import active


@dataclass(frozen=True)
class Parity:
    """Two batches with the flag off and on; the scenario's quantizer first stores KV checkpoints, then
    layer inputs. A scenario with graphs has them with the flag on only, and each batch twice, since work is
    captured when it comes again."""

    name: str = "parity"
    claim: str = "with async_cpu_transfer off and on, losses, gradients and replay logs are the same bits"
    needs_cuda: bool = True
    needs_quiet: bool = False

    def takes(self, scenario: Scenario) -> bool:
        """All of them."""
        return True

    def check(self, scenario: Scenario) -> Outcome:
        """Compare to the bit."""
        compared = 0
        for dtype, what in itertools.product(_dtypes(), CHECKPOINTS):
            off, on = (_measure(scenario, dtype, what, flag=flag) for flag in (False, True))
            if difference := first_difference(off, on):
                return Outcome.failed(f"{dtype}, {scenario.quantizer} {what}: {difference}")
            compared += sum(len(measurement.gradients) for measurement in on)
        return Outcome.held(f"{compared} gradients, all bits the same")


def _dtypes() -> tuple[torch.dtype, ...]:
    """Half precision has kernels of its own, but on real devices only."""
    return (torch.float32,) if active() is not None else (torch.float32, torch.bfloat16)


def _measure(scenario: Scenario, dtype: torch.dtype, what: str, *, flag: bool) -> list[Measurement]:
    with deterministic():
        batches = make_batches() * (2 if scenario.graphs else 1)
        return measure(make_model(scenario, flag=flag, stored=[what], dtype=dtype), batches)


def first_difference(off: list[Measurement], on: list[Measurement]) -> str | None:
    """What differs first, or is not a number; None if nothing is."""
    for index, (one, other) in enumerate(zip(off, on, strict=True)):
        if said := differences(one.values, other.values):
            return f"batch {index}: {said[0]}"
        if not one.replay_log.same_as(other.replay_log):
            return f"batch {index}: the replay logs differ"
    return None
