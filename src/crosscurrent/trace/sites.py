"""Where user code made a call: the innermost frame outside of torch and of this package's verifier.

Frames are walked for every op, so each code object is judged once ("internal" or not), and each
instruction of user code is turned into a ``Site`` once. The gradient, the models and the cache of this
package count as user code: the verifier looks at them from outside.
"""

from __future__ import annotations

import concurrent.futures.thread
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

import torch

from crosscurrent.trace.frames import innermost
from crosscurrent.trace.records import Site

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STARTERS = (threading.__file__, concurrent.futures.thread.__file__)
"""What starts a thread, or gives it work, is no place in it."""
_INTERNAL = (
    _TORCH,
    *_STARTERS,
    os.path.join(_PACKAGE, "__init__.py"),
    *(
        os.path.join(_PACKAGE, part) + os.sep
        for part in ("trace", "races", "schedules", "stress", "report", "cli")
    ),
)

_frame: Final = sys._getframe
COMPILED: Final = not __file__.endswith(".py")
"""Whether what a watch does for each op is compiled. Compiled functions have no frames, so that the innermost
one is already the caller's."""

NO_FRAME: Final = "<no Python frame>"

Place: TypeAlias = int | tuple[CodeType, dict[int, int], int] | None
"""A site, or a frame outside of torch, held without interning: its code, the sites known in it, its last
instruction. None: there is no such frame."""


def _is_internal(code: CodeType) -> bool:
    return os.path.abspath(code.co_filename).startswith(_INTERNAL)


def _first(depth: int) -> Any:
    """The frame at ``depth``, seen from the caller; None in a thread of C++ code: all are the watch's.

    Where this is compiled ``depth`` means nothing: the frames that it leaves out do not exist.
    """
    if COMPILED:
        return innermost()
    try:
        return _frame(depth + 1)
    except ValueError:
        return None


def _thread_of_torch() -> FrameType | None:
    """The outermost frame of PyTorch's in a thread of Python's that runs nothing else."""
    frame: FrameType | None = innermost()
    outermost = None
    while frame is not None:
        if frame.f_code.co_filename == threading.__file__:
            return outermost
        if frame.f_code.co_filename.startswith(_TORCH):
            outermost = frame
        frame = frame.f_back
    return None


def _started() -> str:
    """What a thread of Python's runs that has no frame of its own, such as a tensor's method; else ""."""
    frame: FrameType | None = innermost()
    while frame is not None:
        if frame.f_code.co_filename in _STARTERS:
            # Each Python keeps it elsewhere.
            starter = frame.f_locals.get("self")
            for name in ("fn", "task", "_target"):
                given = getattr(starter, name, None)
                called = given[0] if isinstance(given, tuple) and given else given
                if callable(called):
                    return str(getattr(called, "__name__", type(called).__name__))
        frame = frame.f_back
    return ""


def _line(code: CodeType, lasti: int) -> int:
    for start, stop, line in code.co_lines():
        if start <= lasti < stop and line is not None:
            return line
    return code.co_firstlineno


def _entry(code: CodeType, lasti: int) -> tuple[str, int, str]:
    return code.co_filename, _line(code, lasti), code.co_qualname


def _waiting(frame: FrameType | None) -> tuple[str, int, str] | None:
    """Where the thread of a frame waits for ``backward``, if it does."""
    in_backward = False
    while frame is not None:
        if not _is_internal(frame.f_code):
            return _entry(frame.f_code, frame.f_lasti) if in_backward else None
        in_backward = in_backward or frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return None


class _Code:
    """What is known of a code object."""

    __slots__ = ("code", "lines")

    def __init__(self, code: CodeType | None, lines: dict[int, int] | None) -> None:
        self.code = code
        """Kept, so that its id is its own."""
        self.lines = lines
        """The sites known in it, by instruction; None for code that is not the user's."""


class Sites:
    """The call sites of one trace. ``here()`` is the hot path; ``sites`` is shared with ``TraceInfo``."""

    def __init__(self, *, full_stack: bool = False) -> None:
        self.sites: list[Site] = []
        self._full_stack = full_stack
        self.waiting: list[int] = []
        """Call sites that wait for ``backward`` right now; whoever taps that keeps the list."""
        self._by_site: dict[Site, int] = {}
        # By id: hashing a code object hashes all of its constants.
        self._codes: dict[int, _Code] = {}
        self._last = _Code(None, None)

    def here(self, depth: int = 2) -> int:
        """The site of the call that is being made. The caller, which has a caller, is not looked at.

        ``depth`` is that of the first frame which is looked at: 2, or more for frames known to be internal.
        """
        frame = _first(depth)
        known = self._last
        while frame is not None:
            code = frame.f_code
            if known.code is not code:
                known = self._codes.get(id(code)) or self._learn(code)
            lines = known.lines
            if lines is not None:
                self._last = known
                if self._full_stack:
                    return self._with_stack(frame)
                lasti = frame.f_lasti
                site = lines.get(lasti)
                if site is None:
                    site = lines[lasti] = self._intern(Site(*_entry(code, lasti)))
                return site
            frame = frame.f_back
        return self._elsewhere()

    def place(self) -> Place:
        """Where the calling thread is, for later: this may be called while anything else is half done.

        The caller is not looked at.
        """
        frame = _first(2)
        known = self._last
        while frame is not None:
            code = frame.f_code
            if known.code is not code:
                known = self._codes.get(id(code)) or self._learn(code)
            lines = known.lines
            if lines is not None:
                self._last = known
                lasti = frame.f_lasti
                site = None if self._full_stack else lines.get(lasti)
                return (code, lines, lasti) if site is None else site
            frame = frame.f_back
        return None

    def at(self, place: Place) -> int:
        """The site of a place that was noted earlier."""
        if isinstance(place, int):
            return place
        if place is None:
            return self._elsewhere()
        code, lines, lasti = place
        site = lines.get(lasti)
        if site is None:
            site = lines[lasti] = self._intern(Site(*_entry(code, lasti)))
        return site

    def _learn(self, code: CodeType) -> _Code:
        known = self._codes[id(code)] = _Code(code, None if _is_internal(code) else {})
        return known

    def _intern(self, site: Site) -> int:
        index = self._by_site.get(site)
        if index is None:
            index = self._by_site[site] = len(self.sites)
            self.sites.append(site)
        return index

    def _with_stack(self, first: FrameType) -> int:
        stack: list[tuple[str, int, str]] = []
        frame: FrameType | None = first
        while frame is not None:
            if not _is_internal(frame.f_code):
                stack.append(_entry(frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return self._intern(Site(*stack[0], tuple(reversed(stack))))

    def _elsewhere(self) -> int:
        """Autograd's own threads have no user frame: take that of a thread that waits for ``backward``.

        A thread that PyTorch started in Python (the loader's, which pins memory) is told by its function, and
        one that runs a function of C++, which has no frame, by the name of that.
        """
        loop = _thread_of_torch()
        if loop is not None:
            return self._intern(Site(*_entry(loop.f_code, loop.f_lasti)))
        if started := _started():
            return self._intern(Site(NO_FRAME, 0, started))
        if self.waiting:
            return self.waiting[-1]
        # Kept in no variable: this frame is among them, and a frame that holds itself would keep all that is
        # in the frames below it (the tensors of the op that is made a record) until garbage is collected.
        entry = next(filter(None, map(_waiting, sys._current_frames().values())), None)
        return self._intern(Site(*(entry or (NO_FRAME, 0, ""))))
