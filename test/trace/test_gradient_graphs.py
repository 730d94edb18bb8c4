"""The gradient with CUDA graphs, as the taps on a real GPU see it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import crosscurrent
from crosscurrent.suite.experiment import make_batches, make_model
from crosscurrent.suite.scenario import WITH_GRAPHS

Run = Callable[..., crosscurrent.Watch]

pytestmark = pytest.mark.simulation


class Steps:
    """Steps of one model, which is made when it is first needed."""

    def __call__(self) -> None:
        if not hasattr(self, "model"):
            self.model = make_model(WITH_GRAPHS[0])
        for ids, targets in make_batches():
            self.model(ids, targets).backward()


def test_steps_that_capture_and_launch_are_understood(run_by_callbacks: Run) -> None:
    seen = run_by_callbacks(Steps())
    assert not seen.findings
    assert not seen.unknown


def test_graphs_captured_before_the_watch_are_reported(run_by_callbacks: Run) -> None:
    """What they touch is nowhere to be had, so that nothing could be said of races with them."""
    steps = Steps()
    seen = run_by_callbacks(steps, before=steps)
    assert {(what.op, what.reason) for what in seen.unknown} == {
        ("CUDAGraph.replay", "a graph captured before the watch: what it touches is not known")
    }
