"""Drop or weaken a sync edge of a program, from outside, to see whether anything notices.

    with drop_edge("loader.py:84"):                       # every wait or record that is made there
        step()
    with weaken_edge("Prefetcher.fill", call="wait_event", occurrence=3, stream=other):
        step()

An edge is named by the call that makes it: ``file:line``, ``file:function``, ``file:Class.method``,
``Class.method`` or a function alone; see ``names``. The calls of ``torch.cuda.Stream`` and
``torch.cuda.Event`` are wrapped while a context is entered, so this works for any program, on simulated CUDA
and on a real GPU. (The generic ``torch.Stream`` and ``torch.Event`` are C++ classes in builds with CUDA,
which cannot be wrapped.)

What a weakened edge does:

- ``stream=``: an event is recorded on that stream in place of its own; a wait is made by that stream in place
  of the one that should. A function that gives the stream does, too: it is called when the time has come.
- ``earlier=n``: an event is recorded too early: who waits for it waits for the n-th recording before it on
  the same stream, or for nothing if there is none.
"""

from __future__ import annotations

import difflib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from crosscurrent.checks import whole_number
from crosscurrent.errors import WrongUseError
from crosscurrent.trace.patches import Patches
from crosscurrent.trace.records import Site
from crosscurrent.trace.sites import Sites

CALLS = ("record", "record_event", "wait", "wait_event", "wait_stream", "synchronize")
"""The calls that make an edge, by the name of the method."""

_MOST_CANDIDATES = 5
"""Calls listed where none was where it should have been."""

StreamOrMaker: TypeAlias = torch.cuda.Stream | Callable[[], torch.cuda.Stream]


@dataclass(slots=True, eq=False)
class ChangedEdge:
    """An edge that is dropped or weakened, and how often that happened."""

    where: str
    call: str | None = None
    occurrence: int | None = None
    """Only the call of this number, from 0, of those that ``where`` and ``call`` name."""

    when: Callable[[], bool] | None = None
    """Only while this says so."""

    stream: StreamOrMaker | None = None
    earlier: int | None = None
    calls: int = 0
    """Calls that were named by ``where`` and ``call``."""

    changed: int = 0
    """Of these, the ones that were dropped or weakened."""

    matched: Counter[str] = field(default_factory=Counter)
    """Where these were, as ``file:line (function)``, and how many."""

    functions: set[str] = field(default_factory=set)
    """The functions in which these were, as ``file:function``."""

    seen: Counter[tuple[str, Site]] = field(default_factory=Counter)
    """All sync calls that were made meanwhile, and where: what could have been named."""

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if not isinstance(self.where, str) or not self.where.rpartition(":")[2].strip():
            kind = ValueError if isinstance(self.where, str) else TypeError
            raise kind(
                "where must name a call site, such as 'loader.py:84', 'loader.py:Loader.fill' or "
                f"'Loader.fill', got {self.where!r}"
            )
        for name in ("occurrence", "earlier"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        if self.call is not None and self.call not in CALLS:
            raise ValueError(f"call must be one of {', '.join(CALLS)}, got {self.call!r}")
        if self.occurrence is not None and self.occurrence < 0:
            raise ValueError(f"occurrences are numbered from 0, got {self.occurrence}")
        if self.earlier is not None and self.earlier < 1:
            raise ValueError(f"earlier counts recordings and must be at least 1, got {self.earlier}")

    def wrong_stream(self) -> torch.cuda.Stream | None:
        """The stream to use in place of the right one."""
        if self.stream is None or isinstance(self.stream, torch.cuda.Stream):
            return self.stream
        return self.stream()

    def takes(self, call: str, site: Site) -> bool:
        """Whether a call is to be changed; counts it."""
        with self._lock:
            self.seen[call, site] += 1
            if self.call not in (None, call) or not names(self.where, site):
                return False
            number = self.calls
            self.calls += 1
            if self.occurrence not in (None, number) or not (self.when is None or self.when()):
                return False
            self.changed += 1
            self.matched[_told(site)] += 1
            self.functions.add(f"{os.path.basename(site.file)}:{_plain(site.function)}")
            return True


def names(where: str, site: Site) -> bool:
    """Whether ``file:line``, ``file:function`` or ``function`` names a call site.

    Of a file, the end is enough: ``loader.py`` names ``/home/me/loader.py``, and so does ``me/loader.py``. So
    it is for a function: ``fill`` and ``Loader.fill`` name the method ``Loader.fill``, also where the class
    is defined in a function.
    """
    file, colon, inner = where.rpartition(":")
    if colon and site.file != file and not site.file.endswith("/" + file):
        return False
    return str(site.line) == inner or f".{_plain(site.function)}".endswith(f".{_plain(inner)}")


def _plain(function: str) -> str:
    """A function without the marks of what it is defined in: ``main.<locals>.fill`` is ``main.fill``."""
    return function.replace(".<locals>", "")


def _told(site: Site) -> str:
    """A call site as ``where`` could name it, and more."""
    return f"{os.path.basename(site.file)}:{site.line} ({_plain(site.function)})"


@contextmanager
def drop_edge(
    where: str,
    *,
    call: str | None = None,
    occurrence: int | None = None,
    when: Callable[[], bool] | None = None,
) -> Iterator[ChangedEdge]:
    """Leave out the sync calls that are made at ``where``: all, or one ``occurrence`` (numbered from 0).

    ``call`` tells calls in one place apart: ``record``, ``wait_event``, ``wait_stream``, ``synchronize``, ...
    With ``when``, a call stays as it is unless that says True at the time.
    Raises ``WrongUseError`` at the end if no such call was made, since then nothing was tried.
    """
    with _changing(ChangedEdge(where, call=call, occurrence=occurrence, when=when)) as edge:
        yield edge


@contextmanager
def weaken_edge(
    where: str,
    *,
    call: str | None = None,
    occurrence: int | None = None,
    stream: StreamOrMaker | None = None,
    earlier: int | None = None,
) -> Iterator[ChangedEdge]:
    """Make a sync call on the wrong ``stream``, or (for a recording) as if it came some recordings earlier.

    As ``drop_edge`` otherwise.
    """
    if (stream is None) == (earlier is None):
        raise WrongUseError(
            "weaken_edge takes either stream= or earlier=; to leave the edge out use drop_edge"
        )
    with _changing(
        ChangedEdge(where, call=call, occurrence=occurrence, stream=stream, earlier=earlier)
    ) as edge:
        yield edge


@contextmanager
def _changing(edge: ChangedEdge) -> Iterator[ChangedEdge]:
    with Patches() as patches:
        _Wrapped(edge).install(patches)
        yield edge
    if not edge.changed:
        raise WrongUseError(_nothing(edge))
    if len(edge.functions) > 1:
        functions = " and ".join(sorted(edge.functions))
        raise WrongUseError(
            f"{edge.where!r} names calls in {len(edge.functions)} functions, {functions}; "
            "name one of them, or a line"
        )


def _nothing(edge: ChangedEdge) -> str:
    """Why nothing was changed, and what could have been."""
    what = f"call of {edge.call}" if edge.call else "sync call"
    if edge.calls and edge.occurrence is not None:
        times = "once" if edge.calls == 1 else f"{edge.calls} times"
        return (
            f"nothing was changed: there was a {what} at {edge.where!r} {times}, and number "
            f"{edge.occurrence} (from 0) was wanted"
        )
    if edge.calls:
        return f"nothing was changed: there was a {what} at {edge.where!r}, but when= never said True"
    if not edge.seen:
        return (
            f"nothing was changed: no sync call was made at all, at {edge.where!r} or elsewhere; run the "
            "program inside of the context"
        )
    made = [f"{call} at {_told(site)}" for call, site in _nearest(edge)]
    more = len(edge.seen) - len(made)
    return (
        f"nothing was changed: no {what} was made at {edge.where!r}. These were made"
        f"{f', and {more} others' if more else ''}:\n" + "\n".join(f"  {line}" for line in made)
    )


def _nearest(edge: ChangedEdge) -> list[tuple[str, Site]]:
    """The calls that were made which are most like the one that was named, the likest first."""

    def unlikeness(seen: tuple[str, Site]) -> float:
        call, site = seen
        function = _plain(site.function)
        file = os.path.basename(site.file)
        spellings = function, function.rpartition(".")[2], f"{file}:{function}", f"{file}:{site.line}"
        like = max(difflib.SequenceMatcher(None, edge.where, each).ratio() for each in spellings)
        return -like - (edge.call == call)

    return sorted(edge.seen, key=unlikeness)[:_MOST_CANDIDATES]


class _Wrapped:
    """The wrapped calls, for one changed edge. They nest: each wraps what it found."""

    def __init__(self, edge: ChangedEdge) -> None:
        self._edge = edge
        self._sites = Sites()
        self._inner = threading.local()  # a call that another one makes is part of that one
        # With `earlier` only. By stream: a private event for each recording, since a user's may move on.
        self._past: dict[tuple[int, int], list[torch.cuda.Event]] = {}
        # By identity of an event (which is kept alive beside it): what stands for its last recording.
        self._stand_ins: dict[int, tuple[Any, torch.cuda.Event | None]] = {}

    def install(self, patches: Patches) -> None:
        """Wrap the classes, and ``torch.cuda.synchronize``."""
        for name in ("record", "wait", "synchronize"):
            handler = getattr(self, f"_event_{name}")
            patches.replace(torch.cuda.Event, name, functools.partial(self._wrapped, name, handler))
        for name in ("record_event", "wait_event", "wait_stream", "synchronize"):
            handler = getattr(self, f"_stream_{name}")
            patches.replace(torch.cuda.Stream, name, functools.partial(self._wrapped, name, handler))
        wrapped = functools.partial(self._wrapped, "synchronize", self._device_synchronize)
        patches.replace(torch.cuda, "synchronize", wrapped)

    def _wrapped(self, name: str, handler: Callable[..., Any], before: Callable[..., Any]) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inner, "busy", False):
                return before(*args, **kwargs)
            self._inner.busy = True
            try:
                site = self._sites.sites[self._sites.at(self._sites.place())]
                taken = self._edge.takes(name, site)
                return handler(before, taken, *args, **kwargs)
            finally:
                self._inner.busy = False

        return wrapper

    # -- what each call does; `call` is the call as it was, `taken` whether this one is to be changed ------

    def _event_record(self, call: Any, taken: bool, event: Any, stream: Any = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        self._record(call, taken, event, stream)

    def _stream_record_event(self, call: Any, taken: bool, stream: Any, event: Any = None) -> Any:
        event = torch.cuda.Event() if event is None else event  # type: ignore[no-untyped-call, unused-ignore]
        self._record(lambda event, stream: call(stream, event), taken, event, stream)
        return event

    def _record(self, call: Any, taken: bool, event: Any, stream: Any) -> None:
        wrong = self._edge.wrong_stream() if taken else None
        if wrong is not None:
            call(event, wrong)
        elif not taken or self._edge.earlier is not None:
            call(event, stream)
        if self._edge.earlier is None:
            return
        past = self._past.setdefault((stream.device_index, stream.stream_id), [])
        self._stand_ins.pop(id(event), None)
        if taken:
            back = self._edge.earlier
            self._stand_ins[id(event)] = event, past[-back] if back <= len(past) else None
        moment = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        call(moment, stream)
        past.append(moment)

    def _event_wait(self, call: Any, taken: bool, event: Any, stream: Any = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        self._wait(call, taken, event, stream)

    def _stream_wait_event(self, call: Any, taken: bool, stream: Any, event: Any) -> None:
        self._wait(lambda event, stream: call(stream, event), taken, event, stream)

    def _wait(self, call: Any, taken: bool, event: Any, stream: Any) -> None:
        _, event = self._stand_ins.get(id(event), (None, event))
        chosen = self._edge.wrong_stream() if taken else stream
        if event is not None and chosen is not None:
            call(event, chosen)

    def _stream_wait_stream(self, call: Any, taken: bool, stream: Any, other: Any) -> None:
        chosen = self._edge.wrong_stream() if taken else stream
        if chosen is not None:
            call(chosen, other)

    def _event_synchronize(self, call: Any, taken: bool, event: Any) -> None:
        _, event = self._stand_ins.get(id(event), (None, event))
        if event is not None and not taken:
            call(event)

    def _stream_synchronize(self, call: Any, taken: bool, stream: Any) -> None:
        chosen = self._edge.wrong_stream() if taken else stream
        if chosen is not None:
            call(chosen)

    def _device_synchronize(self, call: Any, taken: bool, device: Any = None) -> None:
        if not taken:
            call(device)
