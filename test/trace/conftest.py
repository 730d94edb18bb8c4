"""Fixtures of the trace tests: programs run on the simulation, or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import crosscurrent
from crosscurrent.trace.records import Op, Record


def _machine(devices: int) -> AbstractContextManager[Any]:
    return nullcontext() if torch.cuda.is_available() else crosscurrent.simulate(devices=devices)


@pytest.fixture
def run() -> Callable[..., crosscurrent.Watch]:
    """Run a program under ``watch(trace=True)``; gives the watch."""

    def run(program: Callable[..., Any], *args: Any, devices: int = 1, **options: Any) -> crosscurrent.Watch:
        with _machine(devices), crosscurrent.watch(trace=True, **options) as watch:
            program(*args)
        return watch

    return run


@pytest.fixture
def machine() -> Callable[[int], AbstractContextManager[Any]]:
    """A context in which ``torch.cuda`` works."""
    return lambda devices=1: _machine(devices)


@pytest.fixture
def ops() -> Callable[[crosscurrent.Watch], list[tuple[str, str, str]]]:
    """What a watch's ops did: ``(op, lane, "r" or "w" for each access)``."""

    def ops(watch: crosscurrent.Watch) -> list[tuple[str, str, str]]:
        def line(op: Op) -> tuple[str, str, str]:
            uses = "".join("w" if access.write else "r" for access in op.accesses)
            return op.name.split(".")[1], watch.lanes[op.lane].name, uses

        return [line(record) for record in watch.records if isinstance(record, Op)]

    return ops


@pytest.fixture
def kinds() -> Callable[[list[Record]], list[str]]:
    """The names of the kinds of records."""
    return lambda records: [type(record).__name__ for record in records]
