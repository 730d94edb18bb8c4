"""``watch``: look at a piece of a program while it runs, and know its races.

A watch is a context manager. While it is entered, everything that the program does is turned into records
(``crosscurrent.trace``), which a detector takes in as they come; only with ``trace=True`` are they kept,
which advice, schedules and timelines need.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from crosscurrent.checks import flag
from crosscurrent.errors import RaceError, WrongUseError
from crosscurrent.races.detector import Detector
from crosscurrent.races.findings import Finding
from crosscurrent.races.summary import as_json, as_text
from crosscurrent.trace.records import Lane, Record, Sink, Site, TraceInfo
from crosscurrent.trace.simulate import active
from crosscurrent.trace.tracer import Tracer

if TYPE_CHECKING:
    from crosscurrent.races.advice import Advice

__all__ = ["HostWaitCall", "NotUnderstood", "Watch", "access", "watch"]


class HostWaitCall(NamedTuple):
    """A call that made the host wait."""

    kind: str
    """``synchronize``, ``event``, ``item``, ``blocking copy``, ``pageable copy``, ``strided copy``,
    ``allocation`` (of pinned memory) or ``data-dependent shape``."""

    op: str
    """The op in which it happened; empty for a call that does nothing but wait."""

    site: Site
    streams: tuple[str, ...]
    """What was waited for; empty where the host was held up without ordering anything."""


class NotUnderstood(NamedTuple):
    """Something that the watch saw and could not understand: what it did to memory is not known."""

    op: str
    site: Site
    reason: str


class _Source(Protocol):
    """Where the records come from: the simulation, or the taps on a real GPU."""

    def attach(self, tracer: Tracer, /) -> None: ...

    def detach(self, tracer: Tracer, /) -> None: ...


_entered: list[Watch] = []
"""The watches of this process that are entered now, outermost first."""


def _after_fork() -> None:
    """A child process is not watched: its parent's watch goes on in the parent."""
    while _entered:
        _entered.pop().abandon()


os.register_at_fork(after_in_child=_after_fork)


class Watch:
    """What was seen while it was entered. Made by :func:`watch`, used once."""

    def __init__(self, *, trace: bool = False, full_stack: bool = False) -> None:
        self._keeps_trace = flag("trace", trace)
        self._full_stack = flag("full_stack", full_stack)
        self._detector = Detector()
        self._records: list[Record] = []
        self._tracer: Tracer | None = None
        self._source: _Source | None = None
        self._thread = 0
        self._is_abandoned = False
        self._findings: list[Finding] | None = None
        self._advice: list[Advice] | None = None

    # -- the context -------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if self._tracer is not None:
            raise WrongUseError("this watch was entered before; make a new one with crosscurrent.watch()")
        source, environment = _source()
        sinks: list[Sink | Callable[[Record], None]] = [self._detector]
        if self._keeps_trace:
            sinks.append(self._records.append)
        tracer = Tracer(environment, sinks, full_stack=self._full_stack)
        source.attach(tracer)
        self._tracer, self._source, self._thread = tracer, source, threading.get_ident()
        _entered.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tracer, source = self._tracer, self._source
        if self._is_abandoned:
            return
        if tracer is None:
            raise WrongUseError("this watch was left without having been entered")
        if source is None:
            raise WrongUseError("this watch was left twice")
        if threading.get_ident() != self._thread:
            raise WrongUseError(
                "this watch was left in another thread than it was entered in; use one thread"
            )
        if [other for other in _entered if other._thread == self._thread][-1] is not self:
            raise WrongUseError("watches were left in the wrong order; leave the one entered last first")
        _entered.remove(self)
        self._source = None
        try:
            source.detach(tracer)
        finally:
            tracer.close()

    def abandon(self) -> None:
        """See nothing any more, and undo nothing: for the child of a fork."""
        self._is_abandoned = True
        if self._source is not None and self._tracer is not None:
            self._source.detach(self._tracer)

    @property
    def tracer(self) -> Tracer:
        """The tracer of this watch, for those who look at calls themselves (schedules)."""
        if self._tracer is None:
            raise WrongUseError(
                "this watch has not been entered; use it as 'with crosscurrent.watch() as watch:'"
            )
        return self._tracer

    # -- what was seen -------------------------------------------------------------------------------

    @property
    def findings(self) -> list[Finding]:
        """The races, in a stable order with stable ids. Empty means: none in any schedule of this trace."""
        if self._findings is not None:
            return list(self._findings)
        findings = self._detector.findings(self.info)
        if self._source is None:
            self._findings = findings
        return list(findings)

    @property
    def host_waits(self) -> list[HostWaitCall]:
        """Every call that made the host wait, in order, once for each time."""
        info = self.info
        made = {
            wait: HostWaitCall(wait.kind, wait.op, info.sites[wait.site], self._names(wait.lanes))
            for wait in set(self.tracer.host_waits)
        }
        return [made[wait] for wait in self.tracer.host_waits]

    @property
    def idle_waits(self) -> Counter[HostWaitCall]:
        """How many of the host waits came when the device had nothing left to do, and so held up nothing.

        An allocation of pinned memory before a loop, say.
        """
        sites = self.info.sites
        idle: Counter[HostWaitCall] = Counter()
        for wait, lanes, _, times in self._detector.host_waits:
            if times and wait.kind != "query":
                idle[HostWaitCall(wait.kind, wait.op, sites[wait.site], self._names(lanes))] += times
        return idle

    @property
    def unknown(self) -> list[NotUnderstood]:
        """What could not be understood, in order, once for each time."""
        sites = self.info.sites
        return [NotUnderstood(op, sites[site], reason) for op, site, reason in self.tracer.not_understood]

    @property
    def info(self) -> TraceInfo:
        """The lanes and call sites that the records refer to."""
        return self.tracer.info

    @property
    def lanes(self) -> list[Lane]:
        """The host, and each stream that was used."""
        return list(self.info.lanes)

    @property
    def records(self) -> list[Record]:
        """The trace itself; kept only by ``watch(trace=True)``."""
        if not self._keeps_trace:
            raise WrongUseError("the trace was not kept; use crosscurrent.watch(trace=True)")
        return self._records

    @property
    def keeps_trace(self) -> bool:
        """Whether the trace is kept, and with it what ``advice`` needs."""
        return self._keeps_trace

    @property
    def advice(self) -> list[Advice]:
        """For each wait, whether it is needed and what it protects; of a watch with ``trace=True``."""
        if self._advice is not None:
            return list(self._advice)
        from crosscurrent.races.advice import advise

        advice = advise(self.records, self.info)
        if self._source is None:
            self._advice = advice
        return list(advice)

    def raise_for_races(self) -> None:
        """Raise ``RaceError``, which shows all findings, if there is one."""
        if self.findings:
            raise RaceError(self.findings)

    def report(self) -> str:
        """All of it as plain text."""
        return as_text(self)

    def to_json(self, *, advice: bool | None = None) -> dict[str, Any]:
        """All of it as plain lists, dictionaries, strings and numbers; see ``summary.as_json``.

        ``advice`` says whether the advice is a part of it, which takes time; if not given, it is where the
        trace was kept.
        """
        return as_json(self, advice=self._keeps_trace if advice is None else advice)

    def _names(self, lanes: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self.info.lanes[lane].name for lane in lanes)


def watch(*, trace: bool = False, full_stack: bool = False) -> Watch:
    """Watch what runs inside of ``with watch() as seen:`` for races between streams, host and memory.

    Needs a CUDA device, or an entered ``crosscurrent.simulate()``. ``trace=True`` keeps the whole trace
    (memory grows with the program), for ``advice``, schedules and timelines. ``full_stack=True`` keeps
    whole call stacks, which costs time. Raises ``WrongUseError`` when there is nothing to watch.
    """
    return Watch(trace=trace, full_stack=full_stack)


def access(*, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
    """Tell the entered watches what an invisible piece of code (a Triton or C++ kernel, say) touches.

    Call it where the kernel is launched: device tensors count as touched by the current stream of their
    device, pinned ones too if a device tensor is among the arguments, else by the host. Without a watch
    it does nothing, so that it can stay in the code.
    """
    if _entered:
        read, written = _tensors("reads", reads), _tensors("writes", writes)
        for entered in _entered:
            entered.tracer.declared(read, written)


def _tensors(name: str, values: Iterable[Tensor] | Tensor) -> tuple[Tensor, ...]:
    """The tensors that were declared; of one alone, not its rows."""
    listed = (values,) if isinstance(values, Tensor) or not isinstance(values, Iterable) else tuple(values)
    for value in listed:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be tensors, as in {name}=[a, b], got {value!r} ({type(value).__name__})"
            )
    return listed


def _source() -> tuple[_Source, Any]:
    simulation = active()
    if simulation is not None:
        return simulation, simulation.environment
    if torch.cuda.is_available():
        from crosscurrent.trace.cuda import CudaSource

        source = CudaSource()
        return source, source.environment
    raise WrongUseError(
        "there is no CUDA device to watch; enter crosscurrent.simulate() first: "
        "'with crosscurrent.simulate(), crosscurrent.watch() as watch:'"
    )
