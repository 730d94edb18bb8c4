"""Runs somebody's script or module inside this process, as ``python`` would have run it.

However the script ends, somebody has to learn about it: by running to its end, ``sys.exit``, an
exception, ``os._exit`` (from any thread) or an interrupt. A child that it forked is not ours: it ends
as it would have ended, and says nothing.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from jsonargparse import ArgumentParser
from jsonargparse import Namespace as Arguments

from crosscurrent.cli import at_exit
from crosscurrent.cli.at_exit import AtExit, below, flush_output
from crosscurrent.cli.exits import WrongUseError
from crosscurrent.cli.processes import Processes

INTERRUPT_STATUS = 130
"""The status of a process that SIGINT ended, as shells count."""


def add_program(options: ArgumentParser) -> None:
    """The program to run, last on the command line: what comes after its name is its own."""
    options.add_argument("-m", "--module", action="store_true", help="The program is the name of a module.")
    options.add_argument("program", metavar="PROGRAM", help="The script to run.")
    options.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="The program's arguments."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What to run, and with which arguments."""

    program: str
    """The path of a script, or, with ``is_module``, the name of a module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @staticmethod
    def of(arguments: Arguments) -> Script:
        """What the options of ``add_program`` name."""
        return Script(
            program=arguments.program, arguments=tuple(arguments.arguments), is_module=arguments.module
        )

    def require_runnable(self) -> None:
        """Find the program without running it.

        Raises:
            WrongUseError: there is no such script or module.
        """
        if not self.is_module:
            self._require_script(Path(self.program))
            return
        try:
            with _import_path(""):
                spec = importlib.util.find_spec(self.program)
                if spec is not None and spec.submodule_search_locations is not None:
                    spec = importlib.util.find_spec(f"{self.program}.__main__")
        except (ImportError, ValueError) as error:
            raise WrongUseError(f"there is no module {self.program} ({error})") from error
        if spec is None:
            raise WrongUseError(f"there is no module {self.program} that python -m could run")

    def _require_script(self, path: Path) -> None:
        if not self.program:
            raise WrongUseError("the name of the script is empty; name a script")
        try:
            if path.is_dir():
                if not (path / "__main__.py").is_file():
                    raise WrongUseError(f"{path} is a folder without a __main__.py; name a script in it")
            elif not path.exists():
                raise WrongUseError(f"there is no script {path}; for a module, put -m before its name")
            elif not os.access(path, os.R_OK):
                raise WrongUseError(f"the script {path} cannot be read; look at its permissions")
        except (OSError, ValueError) as error:  # a name that no file can have
            raise WrongUseError(f"there is no script {self.program!r}: no file can have that name") from error


Namespace = Mapping[str, object]
"""The variables of the script's module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a script ended."""

    status: int
    """The exit status that its process would have had."""
    error: str | None = None
    """The exception that ended it and its message, if one did; or what it gave ``sys.exit`` to say."""

    remarks: tuple[str, ...] = ()
    """What a person has to know about the processes that it started, one paragraph each."""

    @property
    def failed(self) -> bool:
        """Whether the script says that it did not succeed."""
        return self.status != 0

    @property
    def why(self) -> str:
        """Why it failed, in one line."""
        lines = [line for line in (self.error or "").splitlines() if line.strip()]
        if not lines:
            return f"exit status {self.status}"
        return lines[0] + (" ..." if len(lines) > 1 else "")


def run(
    script: Script,
    *,
    on_os_exit: Callable[[Ending], int],
    on_end: Callable[[Namespace], None] = lambda _: None,
) -> Ending:
    """Run the script to its end, its threads and exit functions included. Its output goes where it sends it.

    ``on_end`` is called then, while the script's variables are still there. ``on_os_exit`` is called when
    the script calls ``os._exit``; what it returns becomes the status of the process, which then ends at once.
    """
    import_path = "" if script.is_module else str(Path(script.program).resolve().parent)
    process, processes, left = os.getpid(), Processes(), AtExit()

    def exit_with_remarks(ending: Ending) -> int:
        return on_os_exit(replace(ending, remarks=processes.remarks))

    with (
        _import_path(import_path),
        _arguments(script),
        _endings_seen(exit_with_remarks),
        processes.counted(),
        left.noted(),
    ):
        ending, namespace = _run(script)
        if os.getpid() != process:  # a child that it forked: Python does the rest when that ends
            return ending
        with _main_module(namespace):
            ending = _finish(left, ending)
        if os.getpid() != process:  # or one that an exit function forked
            return ending
        on_end(namespace)
        if ending.failed:
            processes.end_left()
        return replace(ending, remarks=processes.remarks)


def _finish(left: AtExit, ending: Ending) -> Ending:
    """Do what Python does after the last line, and give how the script ended then."""
    try:
        left.wait_for_threads()
    except KeyboardInterrupt as error:
        _print_traceback(error)
        ending = Ending(status=INTERRUPT_STATUS, error="KeyboardInterrupt")
    left.run_functions()
    return ending


def _run(script: Script) -> tuple[Ending, Namespace]:
    """How it ended, and its variables, which as in Python outlive its threads."""
    try:
        if script.is_module:
            namespace = runpy.run_module(script.program, run_name="__main__", alter_sys=True)
        else:
            namespace = runpy.run_path(script.program, run_name="__main__")
    except SystemExit as end:
        return _ending_of(end), _namespace_of(end)
    except KeyboardInterrupt as error:
        _print_traceback(error)
        return Ending(status=INTERRUPT_STATUS, error="KeyboardInterrupt"), _namespace_of(error)
    except BaseException as error:
        _print_traceback(error)
        ending = Ending(status=1, error=_said(error))
        return ending, _namespace_of(error)
    return Ending(status=0), namespace


def _said(error: BaseException) -> str:
    """The exception and its message, without the lines of source that Python shows of a syntax error."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if not isinstance(error, SyntaxError):
        return text
    where = f" ({error.filename}, line {error.lineno})" if error.filename and error.lineno else ""
    return text.splitlines()[-1] + where


def _namespace_of(error: BaseException) -> Namespace:
    """The variables of the script that was left by this; none if it did not get as far as to have any."""
    frames = _without_runner(error.__traceback__)
    if frames is not None and frames.tb_frame.f_globals.get("__name__") == "__main__":
        return frames.tb_frame.f_globals
    return {}


def _ending_of(end: SystemExit) -> Ending:
    """What Python makes of the argument of ``sys.exit``."""
    if end.code is None:
        return Ending(status=0)
    if isinstance(end.code, int):
        return Ending(status=end.code)
    sys.stderr.write(f"{end.code}\n")
    return Ending(status=1, error=str(end.code))


def _print_traceback(error: BaseException) -> None:
    """Print what Python would have printed: the script's own frames only."""
    flush_output()
    traceback.print_exception(type(error), error, _without_runner(error.__traceback__))


def _without_runner(frames: TracebackType | None) -> TracebackType | None:
    return below(frames, __name__, at_exit.__name__, "runpy")


@contextmanager
def _import_path(first: str) -> Iterator[None]:
    saved = list(sys.path)
    sys.path.insert(0, first)
    try:
        yield
    finally:
        sys.path[:] = saved


@contextmanager
def _main_module(namespace: Namespace) -> Iterator[None]:
    """The script stays the main module after its last line: what is pickled by then is looked up there."""
    saved = sys.modules["__main__"]
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(namespace)
    try:
        yield
    finally:
        sys.modules["__main__"] = saved


@contextmanager
def _arguments(script: Script) -> Iterator[None]:
    saved = sys.argv
    sys.argv = [script.program, *script.arguments]  # run_module puts the module's path in place of its name
    try:
        yield
    finally:
        sys.argv = saved


@contextmanager
def _endings_seen(on_os_exit: Callable[[Ending], int]) -> Iterator[None]:
    """Call back before ``os._exit`` ends the process, and refuse to let another program take its place,
    whose exit status would pass for a verdict. In a forked child all of them are what they were."""
    really_exit, execv, execve = os._exit, os.execv, os.execve
    process = os.getpid()

    def exit_after_callback(status: int) -> NoReturn:
        if os.getpid() == process:
            status = on_os_exit(Ending(status=status))
        really_exit(status)

    def refusing(execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def execute_in_child(path: str, *rest: object) -> NoReturn:
            if os.getpid() == process:
                raise OSError(
                    errno.ENOTSUP,
                    "os.exec would replace the checked program; check the new one instead",
                    path,
                )
            execute(path, *rest)

        return execute_in_child

    os._exit = exit_after_callback
    os.execv, os.execve = refusing(execv), refusing(execve)
    try:
        yield
    finally:
        os._exit, os.execv, os.execve = really_exit, execv, execve
