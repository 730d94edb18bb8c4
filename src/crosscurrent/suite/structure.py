"""Mutants of the gradient's buffers: one slot in place of several, and CPU bytes used again too early.

And what notices them: the detector, the values of a run with the flag off, and whether double buffers flip.
With one slot a transfer that leaves may be right and still cost what it is there to gain: the work that fills
the slot has to wait for the transfer just before. So flipping is something to look at by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from crosscurrent.bits import deterministic
from crosscurrent.gradient import transfer
from crosscurrent.gradient.checkpoints import CellKey
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.gradient.store import CheckpointStore
from crosscurrent.gradient.transfer import HostBuffer, Incoming, Outgoing
from crosscurrent.races.watch import watch
from crosscurrent.stress.mutations import Mutant
from crosscurrent.suite.experiment import differences, make_batches, make_model
from crosscurrent.suite.recorded import on_host, racy, replaced, steps
from crosscurrent.suite.scenario import Scenario

DOUBLE_BUFFERS = (
    "records out",
    "records in, for replays",
    "records in",
    "head gradients in",
    "KV checkpoints in",
    "head gradients out",
    "KV checkpoints out",
)
"""All double buffers of a step, in the order in which it makes them."""

ONE_SLOT = "double buffer of one slot"
REUSED_EARLY = "pinned buffer reused early"
BUFFERS = "buffers"
"""Where these mutations are: in no part of a step."""


def structural_mutants(scenario: Scenario) -> Iterator[Mutant]:
    """Every mutant, judged. Raises AssertionError if the code as it is does not pass the same judges."""
    scenario = racy(scenario)
    batches = make_batches()[1:]
    with deterministic():
        expected = on_host(steps(make_model(scenario, flag=False), batches))
    said = _judged(make_model(scenario), expected)
    assert not said, f"the code as it is: {said}"
    for number, name in enumerate(DOUBLE_BUFFERS):
        model = make_model(scenario)
        yield _mutant(ONE_SLOT, name, _judged(model, expected, one_slot(number)))
    for victim, other in _pairs(make_model(scenario)._make_format(*batches[0][0].shape).sizes()):
        name = f"{_name(victim)} shares its bytes with {_name(other)}"
        said = _judged(make_model(scenario), expected, shared_bytes(victim, other))
        yield _mutant(REUSED_EARLY, name, said)


def one_slot(number: int) -> AbstractContextManager[None]:
    """The double buffer of this number (in ``DOUBLE_BUFFERS``) has one slot."""
    made = itertools.count()

    def make(allocate: Any) -> Any:
        def call(*args: Any) -> list[Tensor]:
            slots: list[Tensor] = allocate(*args)
            return slots[:1] if next(made) % len(DOUBLE_BUFFERS) == number else slots

        return call

    return replaced((transfer, "_allocate", make))


def shared_bytes(victim: CellKey, other: CellKey) -> AbstractContextManager[None]:
    """Two checkpoints are kept in the same CPU bytes, those of the larger one."""

    def make(_: Any) -> Any:
        def getitem(store: CheckpointStore, key: CellKey) -> HostBuffer:
            if key in (victim, other):
                pair = store._buffers[victim], store._buffers[other]
                return max(pair, key=lambda buffer: buffer.bytes.numel())
            return store._buffers[key]

        return getitem

    return replaced((CheckpointStore, "__getitem__", make))


@contextmanager
def unflipped() -> Iterator[list[str]]:
    """Collects the transfers that use the slot which their double buffer used last."""
    found: list[str] = []
    # By buffer: itself, its last slot, whether that is done with.
    used: dict[int, tuple[object, int, bool]] = {}

    def note(buffer: Any, slot: Tensor) -> Tensor:
        _, last, done = used.get(id(buffer), (None, 0, False))
        if done and last == slot.data_ptr():
            found.append(f"a slot of {slot.numel()} bytes is used twice in a row ({type(buffer).__name__})")
        used[id(buffer)] = buffer, slot.data_ptr(), False
        return slot

    def hands_out(before: Any) -> Any:
        return lambda buffer: note(buffer, before(buffer))

    def done(before: Any) -> Any:
        def call(buffer: Any, *args: Any) -> None:
            before(buffer, *args)
            _, last, _ = used[id(buffer)]
            used[id(buffer)] = buffer, last, True

        return call

    with replaced(
        (Outgoing, "acquire", hands_out),
        (Outgoing, "send", done),
        (Incoming, "receive", hands_out),
        (Incoming, "release", done),
    ):
        yield found


def _judged(
    model: LongContextGradientModel,
    expected: Mapping[str, Tensor],
    mutation: AbstractContextManager[None] | None = None,
) -> str:
    """What notices that a step is not as it should be, in words; empty if nothing does."""
    batches = make_batches()[1:]
    with deterministic(), mutation or replaced(), unflipped() as twice, watch() as seen:
        try:
            values = steps(model, batches)
        except (RuntimeError, IndexError) as error:
            return f"an error: {error}"
    found = on_host(values)
    if seen.findings:
        return f"the detector: {seen.findings[0].id}"
    if said := differences(expected, found):
        return f"the values: {said[0]}"
    return f"its buffers: {twice[0]}" if twice else ""


def _pairs(sizes: Mapping[CellKey, int]) -> list[tuple[CellKey, CellKey]]:
    """Each checkpoint with one of its own kind, of a neighbouring column if there is one."""
    pairs = []
    for key in sizes:
        alike = [other for other in sizes if other.kind is key.kind and other != key] or [
            other for other in sizes if other != key
        ]
        pairs.append((key, min(alike, key=lambda other: _distance(key, other))))
    return list({frozenset(pair): pair for pair in pairs}.values())


def _distance(key: CellKey, other: CellKey) -> tuple[int, int, int]:
    return abs(key.row - other.row), abs(key.column - other.column), other.column


def _name(key: CellKey) -> str:
    return f"{key.kind.value} {key.row}/{key.column}"


def _mutant(kind: str, what: str, killed_by: str) -> Mutant:
    reason = "" if killed_by else "no race, the same bits, and its slots take turns"
    return Mutant(kind=kind, place=BUFFERS, what=what, killed_by=killed_by, reason=reason)
