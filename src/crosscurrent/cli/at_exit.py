"""What Python does between a script's last line and the end of the process, done in one that goes on.

However the script ended, and in this order:

1. Idle workers of thread and process pools that were left open are told to end, and are waited for.
2. The main thread counts as ended: whoever waits for that goes on.
3. Threads that are no daemons are waited for, those that they start meanwhile, too.
4. The functions that were given to ``atexit.register`` run, the last one first. What one raises, even
   ``SystemExit``, is printed and changes nothing. Functions that are registered by then do not run.

What was there before the script is not its own: it stays, for the end of the process (but pools, all of which
end). So do functions of ``weakref.finalize``, which share one exit function. A forked child does all this by
itself when it ends: every function is also registered with Python until it ran here.
"""

from __future__ import annotations

import atexit
import concurrent.futures.process
import concurrent.futures.thread
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

# Imported before any script, so that what they do at exit is not taken to be a script's.
_POOLS = (
    (concurrent.futures.process, "_global_shutdown"),
    (concurrent.futures.thread, "_shutdown"),
)
"""Kinds of pools, and what says that no more work is taken. Python has no public name for either step."""


class AtExit:
    """What a script leaves for the end of its process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._threads_before = set(threading.enumerate())
        self._num_thread_functions_before = len(_thread_functions())
        self._functions: list[_Function] = []
        self._main_ended = threading.Event()
        self._unregister = atexit.unregister

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note from here on what the script leaves."""
        weakref.finalize(self, bool).detach()  # registers what runs all of them, if nobody has yet
        real = {name: vars(atexit)[name] for name in ("register", "unregister")}

        def register(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not callable(function):
                real["register"](function)  # raises
            noted = _Function(function, args, kwargs)
            self._functions.append(noted)
            real["register"](noted)
            return function

        def unregister(function: Callable[..., object], /) -> None:
            for noted in self._functions:
                if noted.function == function:
                    noted.due = False
                    real["unregister"](noted)
            real["unregister"](function)

        vars(atexit).update(register=register, unregister=unregister)
        try:
            with self._end_of_main_told():
                yield
        finally:
            vars(atexit).update(real)
            for module, refuses in _POOLS:
                if hasattr(module, refuses):
                    setattr(module, refuses, False)

    @contextmanager
    def _end_of_main_told(self) -> Iterator[None]:
        """Let the main thread seem to end with the script."""
        main = threading.main_thread()
        real_join, really_alive = main.join, main.is_alive

        def join(timeout: float | None = None) -> None:
            if os.getpid() != self._process or threading.current_thread() is main:
                real_join(timeout)
            else:
                self._main_ended.wait(timeout)

        def is_alive() -> bool:
            return really_alive() if os.getpid() != self._process else not self._main_ended.is_set()

        vars(main).update(join=join, is_alive=is_alive)
        try:
            yield
        finally:
            del vars(main)["join"], vars(main)["is_alive"]
            self._main_ended.set()

    def wait_for_threads(self) -> None:
        """The first three steps."""
        try:
            self._end_pools()
        finally:  # whoever is interrupted here will wait for threads at the end of the process
            self._main_ended.set()
        while left := self._threads_left():
            for thread in left:
                thread.join()

    def _end_pools(self) -> None:
        functions = _thread_functions()
        own = functions[self._num_thread_functions_before :]
        del functions[self._num_thread_functions_before :]
        for function in reversed(own):
            _call(function, "threading atexit callback")
        for module, _ in _POOLS:
            end_workers = getattr(module, "_python_exit", None)
            if end_workers is not None:
                end_workers()  # and once more at the end of the process, for pools that are opened by then

    def _threads_left(self) -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if not thread.daemon and thread not in self._threads_before
        ]

    def run_functions(self) -> None:
        """The last step."""
        for function in reversed(tuple(self._functions)):
            _call(function, "atexit callback")
        for function in self._functions:  # and those that were registered meanwhile
            self._unregister(function)


class _Function:
    """An exit function, and what it is called with: once, by whoever comes first."""

    def __init__(
        self, function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.function = function
        self.due = True
        self._args = args
        self._kwargs = kwargs

    def __call__(self) -> None:
        if self.due:
            self.due = False
            self.function(*self._args, **self._kwargs)

    def __repr__(self) -> str:
        return repr(self.function)  # which Python prints if it fails


def _thread_functions() -> list[Callable[[], object]]:
    """What Python calls before it waits for threads. Nothing public tells of it; a Python may have none."""
    functions: list[Callable[[], object]] = getattr(threading, "_threading_atexits", [])
    return functions


def _call(function: Callable[[], object], kind: str) -> None:
    """Call it as Python does, which prints whatever it raises."""
    try:
        function()
    except BaseException as error:
        flush_output()
        sys.stderr.write(f"Exception ignored in {kind} {function!r}:\n")
        traceback.print_exception(type(error), error, below(error.__traceback__, __name__))


def flush_output() -> None:
    """Write out what the script printed, before anything else is said; it may have no output any more."""
    if not getattr(sys.stdout, "closed", True):
        sys.stdout.flush()


def below(frames: TracebackType | None, *modules: str) -> TracebackType | None:
    """The frames below those of the modules that run the script: the script's own."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in modules:
        frames = frames.tb_next
    return frames
