"""``overlap``: run a piece of a program, and know how much of its transfers was hidden.

On a real GPU under ``torch.profiler``; in simulation from the records of the run and a cost model. The
profiler knows Python only as far as functions, and looking at each call would slow the host down more
than all else. So a dispatch mode annotates each op with the line that called it, which costs a few
microseconds an op (most of it for the mode itself), and the calls that synchronize are wrapped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.checks import file_path, flag
from crosscurrent.errors import WrongUseError
from crosscurrent.report import kineto
from crosscurrent.report.costs import Rates
from crosscurrent.report.modelled import PASSES as OF_RECORDS
from crosscurrent.report.modelled import overlap_of_records
from crosscurrent.report.overlap import PASSES as ANALYSIS
from crosscurrent.report.overlap import Overlap, analyse
from crosscurrent.schedules.countdown import Countdown, Progress
from crosscurrent.trace.patches import Patches
from crosscurrent.trace.simulate import active
from crosscurrent.trace.sites import Sites

_STOP, _EXPORT, _READ = 10, 5, 30
"""Passes over a program that it takes about as long as to stop the profiler, to export, and to read that."""

_OF_PROFILE: Final = _STOP + _EXPORT + _READ + ANALYSIS

_SYNC_CALLS: Final[tuple[tuple[Any, str], ...]] = (
    (torch.cuda, "synchronize"),
    (torch.accelerator, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Stream, "wait_event"),
    (torch.cuda.Stream, "wait_stream"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Event, "wait"),
)


class OverlapRun:
    """A run whose overlap is looked at. Made by :func:`overlap`, used once; ``result`` when it is over."""

    def __init__(self, *, rates: Rates | None = None, call_sites: bool = True) -> None:
        if rates is not None and not isinstance(rates, Rates):
            raise TypeError(f"rates must be crosscurrent.report.costs.Rates, got {rates!r}")
        flag("call_sites", call_sites)
        self._rates = rates
        self._call_sites = call_sites
        self._contexts = ExitStack()
        self._finish: Callable[[Countdown], Overlap] | None = None
        self._passes = 0
        self._result: Overlap | None = None

    def __enter__(self) -> OverlapRun:
        if self._finish is not None:
            raise WrongUseError("this overlap was entered before; make a new one with crosscurrent.overlap()")
        if active() is not None:
            self._finish, self._passes = self._simulated(), OF_RECORDS
        elif torch.cuda.is_available():
            self._finish, self._passes = self._profiled(), _OF_PROFILE
        else:
            raise WrongUseError(
                "there is no CUDA device to profile; for a model of one, enter a simulation first: "
                "'with crosscurrent.simulate(), crosscurrent.overlap() as run:'"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.conclude()
        else:
            self._contexts.__exit__(kind, error, traceback)

    def conclude(self, *, told: Progress | None = None) -> None:
        """End the run, and analyse it: what the end of the ``with`` block does, if this was not done before.

        ``told`` is called meanwhile with how far that has come, and with how far it has to come at most: a
        number that gets smaller, and never larger.
        """
        if self._result is not None:  # the profiler gives what it has but once
            return
        countdown = Countdown(told)
        countdown.expect(self._passes)
        self._contexts.close()
        if self._finish is not None:
            self._result = self._finish(countdown)

    @property
    def result(self) -> Overlap:
        """What was found. Raises ``WrongUseError`` before the run is over, or if it failed."""
        if self._result is None:
            raise WrongUseError("the overlap is known when its 'with' block has ended without an error")
        return self._result

    def _simulated(self) -> Callable[[Countdown], Overlap]:
        from crosscurrent.races.watch import watch

        seen = self._contexts.enter_context(watch(trace=True))
        return lambda countdown: overlap_of_records(seen.records, seen.info, self._rates, countdown)

    def _profiled(self) -> Callable[[Countdown], Overlap]:
        torch.cuda.synchronize()  # what was issued before is no part of the run
        settings = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
        profiler = self._contexts.enter_context(
            profile(
                activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
                experimental_config=settings,
            )
        )
        # The device finishes inside of the profile, but outside of the part of it that counts.
        self._contexts.callback(torch.cuda.synchronize)
        self._contexts.enter_context(record_function(kineto.RUN))
        if self._call_sites:
            self._contexts.enter_context(annotated_call_sites())

        def finish(countdown: Countdown) -> Overlap:
            countdown.take(_STOP)
            with tempfile.TemporaryDirectory(prefix="crosscurrent-") as folder:
                exported = Path(folder) / "profile.json"
                profiler.export_chrome_trace(str(exported))
                countdown.take(_EXPORT)
                timeline = kineto.read(exported)
                countdown.take(_READ)
                return analyse(timeline, countdown)

        return finish


def overlap(*, rates: Rates | None = None, call_sites: bool = True) -> OverlapRun:
    """Find out how much of the transfers of ``with overlap() as run:`` was hidden; see ``run.result``.

    Needs a CUDA device, or an entered ``crosscurrent.simulate()``; then the result is a model, of a machine
    with the given rates. Raises ``WrongUseError`` when there is neither.

    Finding out which line made each call slows the host down. Where the host is hardly ahead of the device,
    that makes gaps between kernels, behind which nothing can hide: ``call_sites=False`` leaves it out. A
    simulation knows the call sites in any case.
    """
    return OverlapRun(rates=rates, call_sites=call_sites)


def overlap_of_profile(path: str | Path) -> Overlap:
    """The same from a profile that was exported with ``torch.profiler.profile.export_chrome_trace``.

    Raises ``OSError`` where there is no such file, and ``ValueError`` where it is none of these.
    """
    return analyse(kineto.read(file_path("path", path)))


def annotated_call_sites() -> ExitStack:
    """While entered, profiles say of each op and each synchronizing call which line made it."""
    notes = _Notes()
    patches = Patches()
    patches.enter_context(_SiteMode(notes))
    for owner, name in _SYNC_CALLS:
        patches.replace(owner, name, partial(_annotated, notes))
    return patches


class _Notes:
    """The annotation of each call site, made once."""

    def __init__(self) -> None:
        self._sites = Sites()
        self._texts: list[str] = []

    def here(self) -> Any:
        """A context that annotates what happens in it with the line of the program that is running."""
        number = self._sites.here()
        while number >= len(self._texts):
            self._texts.append(kineto.annotation_of(self._sites.sites[len(self._texts)]))
        # Its plain twin, ``record_function``, takes 15 times as long.
        return torch._C._profiler._RecordFunctionFast(self._texts[number])


def _annotated(notes: _Notes, call: Callable[..., Any]) -> Callable[..., Any]:
    def annotated(*args: Any, **kwargs: Any) -> Any:
        with notes.here():
            return call(*args, **kwargs)

    return annotated


class _SiteMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Annotates every op with its call site."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._notes.here():
            return func(*args, **(kwargs or {}))
