"""Runs layers over scenarios, and keeps apart what held, what failed and what could not be run."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
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


def questions(layers: Sequence[Layer], scenarios: Sequence[Scenario]) -> list[tuple[Layer, Scenario]]:
    """Every layer with every scenario in which it is to be asked."""
    return [(layer, scenario) for layer in layers for scenario in scenarios if layer.takes(scenario)]


def run(layers: Sequence[Layer], scenarios: Sequence[Scenario], cuda: Cuda) -> Iterator[Result]:
    """Ask every layer of every scenario; a result comes as soon as it is known."""
    for layer, scenario in questions(layers, scenarios):
        yield _result(layer, scenario, cuda)


def run_spread(
    layers: Sequence[Layer], scenarios: Sequence[Scenario], cuda: Cuda, *, workers: int
) -> Iterator[Result]:
    """The same, by several processes at once: results come in the order in which they are known.

    Each asks whole questions, from the last layers on, which take longest. On a real device those that need
    it quiet are asked at the end, one after the other.
    """
    quiet = [layer for layer in layers if layer.needs_quiet and cuda is Cuda.REAL]
    shared = [layer for layer in layers if layer not in quiet]
    executor = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_become_worker
    )
    waiting: dict[Future[Result], tuple[Layer, Scenario]] = {}
    try:
        for layer, scenario in questions(shared[::-1], scenarios):
            waiting[executor.submit(_result, layer, scenario, cuda)] = layer, scenario
        for done in as_completed(waiting):
            yield _result_of(done, *waiting.pop(done))
        executor.shutdown()
    finally:
        if waiting:  # interrupted, or nobody wants the rest
            executor.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
    yield from run(quiet, scenarios, cuda)


def _become_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us is told, and ends us
    torch.set_num_threads(1)  # there is a process for each core


def _result_of(done: Future[Result], layer: Layer, scenario: Scenario) -> Result:
    """What became of a question, even if the process that was asked is gone."""
    try:
        return done.result()
    except BrokenProcessPool:
        gone = "the process that was asked ended, as when memory runs out; ask fewer at once (--workers 1)"
        return Result(
            layer=layer.name, scenario=scenario, outcome=Outcome(Verdict.NOT_RUN, gone), seconds=0.0
        )


def overall(results: Sequence[Result]) -> Verdict:
    """Held only if there was something to hold, and all of it held."""
    verdicts = {result.outcome.verdict for result in results}
    if Verdict.FAILED in verdicts:
        return Verdict.FAILED
    return Verdict.HELD if verdicts == {Verdict.HELD} else Verdict.NOT_RUN


def _result(layer: Layer, scenario: Scenario, cuda: Cuda) -> Result:
    start = time.perf_counter()
    outcome = _ask(layer, scenario, cuda)
    return Result(layer=layer.name, scenario=scenario, outcome=outcome, seconds=time.perf_counter() - start)


def _ask(layer: Layer, scenario: Scenario, cuda: Cuda) -> Outcome:
    if layer.needs_cuda and cuda is Cuda.NONE:
        return Outcome(Verdict.NOT_RUN, f"needs CUDA, and there is {cuda.value}")
    try:
        with cuda.context() if layer.needs_cuda else nullcontext():
            return layer.check(scenario)
    except Exception as error:  # whatever a layer runs into, the others are still asked
        logger.debug("%s, %s", layer.name, scenario.name, exc_info=True)
        return Outcome.failed(f"{type(error).__name__}: {error}")
