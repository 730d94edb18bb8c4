"""Runs layers over scenarios, and keeps apart what held, what failed and what could not be run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch

from crosscurrent.suite.layer import Layer, Outcome, Verdict
from crosscurrent.suite.scenario import Scenario

logger = logging.getLogger(__name__)


class Cuda(Enum):
    """Where layers that need CUDA are run."""

    REAL = "a CUDA device"
    SIMULATED = "simulated CUDA"
    NONE = "neither a CUDA device nor a simulated one"

    @classmethod
    def available(cls, *, may_simulate: bool = True) -> Cuda:
        """The real device if there is one, else the simulation unless it is not wanted."""
        if torch.cuda.is_available():
            return cls.REAL
        return cls.SIMULATED if may_simulate else cls.NONE

    def context(self) -> AbstractContextManager[object]:
        """What makes ``torch.cuda`` work."""
        if self is Cuda.SIMULATED:
            from crosscurrent.trace.simulate import simulate

            return simulate()
        return nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one layer said of one scenario."""

    layer: str
    scenario: Scenario
    outcome: Outcome
    seconds: float


def run(layers: Sequence[Layer], scenarios: Sequence[Scenario], cuda: Cuda) -> Iterator[Result]:
    """Ask every layer of every scenario; a result comes as soon as it is known."""
    for layer in layers:
        for scenario in scenarios:
            start = time.perf_counter()
            outcome = _ask(layer, scenario, cuda)
            yield Result(
                layer=layer.name, scenario=scenario, outcome=outcome, seconds=time.perf_counter() - start
            )


def overall(results: Sequence[Result]) -> Verdict:
    """Held only if there was something to hold, and all of it held."""
    verdicts = {result.outcome.verdict for result in results}
    if Verdict.FAILED in verdicts:
        return Verdict.FAILED
    return Verdict.HELD if verdicts == {Verdict.HELD} else Verdict.NOT_RUN


def _ask(layer: Layer, scenario: Scenario, cuda: Cuda) -> Outcome:
    if layer.needs_cuda and cuda is Cuda.NONE:
        return Outcome(Verdict.NOT_RUN, f"needs CUDA, and there is {cuda.value}")
    try:
        with cuda.context() if layer.needs_cuda else nullcontext():
            return layer.check(scenario)
    except Exception as error:  # whatever a layer runs into, the others are still asked
        logger.debug("%s, %s", layer.name, scenario.name, exc_info=True)
        return Outcome.failed(f"{type(error).__name__}: {error}")
