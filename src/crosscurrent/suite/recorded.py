"""The gradient under the recorder: its trace, what part of a step each record is from, and its values.

Between the batches the host waits for nothing, as in training: a wait would hide what only shows then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from crosscurrent.bits import deterministic
from crosscurrent.gradient.accumulator import GradientAccumulator
from crosscurrent.gradient.backward_pass import BackwardPass
from crosscurrent.gradient.forward_pass import ForwardPass
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.gradient.traffic import Traffic
from crosscurrent.gradient.transfer import Lanes
from crosscurrent.races.watch import Watch, watch
from crosscurrent.schedules import Program, keep_values
from crosscurrent.suite.scenario import Scenario
from crosscurrent.trace.patches import Patches
from crosscurrent.trace.simulate import active

Batches = Sequence[tuple[Tensor, Tensor]]


class Part(Enum):
    """The parts of a step."""

    UPLOAD = "upload"
    FORWARD = "forward"
    BACKWARD_START = "backward start"
    ROW_START = "row start"
    LOOP = "in the loop"
    END_OF_ROW = "end of row"
    END_OF_PASS = "end of pass"


@dataclass(slots=True)
class Parts:
    """Which records are from which part."""

    starts: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def begin(self, record: int, part: Part) -> None:
        """From this record on it is ``part``."""
        self.starts.append(record)
        self.parts.append(part)

    def of(self, record: int) -> Part:
        """The part that a record is from."""
        at = bisect_right(self.starts, record)
        return self.parts[at - 1] if at else Part.UPLOAD


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Some steps, watched."""

    seen: Watch
    parts: Parts
    values: dict[str, Tensor]
    """Losses and gradients by batch, in CPU memory."""
    program: Program | None
    """What can be run again, if values were kept."""


def racy(scenario: Scenario) -> Scenario:
    """The scenario in which code that was made racy runs: its own, with two exceptions.

    The transfers are the same with every policy, but a dense cache has one column, in which most of what can
    go wrong has no place. And h2o's decisions are indices on the device: on a real GPU one that is read too
    early is an assertion, after which the process can use the GPU no more.
    """
    unfit = scenario.policy == "dense" or (scenario.policy == "h2o" and on_gpu())
    return replace(scenario, policy="lastrec") if unfit else scenario


def on_gpu() -> bool:
    """Whether CUDA is there, and not simulated."""
    return torch.cuda.is_available() and active() is None


def steps(model: LongContextGradientModel, batches: Batches) -> dict[str, Tensor]:
    """Losses and gradients of one batch after the other, on the device. The host waits for nothing."""
    named: dict[str, Tensor] = {}
    for number, (ids, targets) in enumerate(batches, start=1):
        model.zero_grad(set_to_none=True)
        loss = model(ids, targets)
        loss.backward()
        named[f"batch {number} loss"] = loss.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                named[f"batch {number} {name}.grad"] = parameter.grad.detach()
    return named


def on_host(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in CPU memory. The host waits."""
    return {name: value.cpu() for name, value in values.items()}


def record(model: LongContextGradientModel, batches: Batches, *, keep: bool = False) -> Recording:
    """Watch some steps; ``keep`` what it takes to run them again, too."""
    parts = Parts()
    torch.cuda.synchronize()
    with deterministic(), watch(trace=True) as seen:
        keeper = keep_values(seen) if keep else None
        with keeper or nullcontext(), _told(parts, seen):
            values = steps(model, batches)
            if keeper is not None:
                keeper.name(values)
    return Recording(
        seen=seen,
        parts=parts,
        values=on_host(values),
        program=None if keeper is None else keeper.program(),
    )


@contextmanager
def replaced(*changes: tuple[Any, str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace attributes (owner, name, what to make of what is there), from outside, for a while."""
    patches = Patches()
    try:
        for owner, name, make in changes:
            patches.replace(owner, name, make)
        yield
    finally:
        patches.close()


def _told(parts: Parts, seen: Watch) -> Any:
    """Note where the parts of the gradient begin."""

    def begins(part: Part) -> Callable[[Any], Any]:
        def make(before: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                parts.begin(len(seen.records), part)
                return before(*args, **kwargs)

            return call

        return make

    def cells(before: Any) -> Any:
        def receive_cell(traffic: Any, caches: Any, row: Any, column: Any, scratch: Any) -> Any:
            # A row ends with its leftmost cell.
            parts.begin(len(seen.records), Part.LOOP if column.index else Part.END_OF_ROW)
            return before(traffic, caches, row, column, scratch)

        return receive_cell

    return replaced(
        (LongContextGradientModel, "_make_call", begins(Part.UPLOAD)),
        (ForwardPass, "__init__", begins(Part.FORWARD)),
        (BackwardPass, "__init__", begins(Part.BACKWARD_START)),
        (GradientAccumulator, "run", begins(Part.ROW_START)),
        (Traffic, "receive_cell", cells),
        (Lanes, "close", begins(Part.END_OF_PASS)),
    )
