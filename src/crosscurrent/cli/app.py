"""Finds the command, runs it, and turns whatever happens into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from crosscurrent.cli.exits import CommandError, ExitCode, WrongUseError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

COMMANDS: Final[dict[str, str]] = {
    "verify": "prove the long-context gradient: contracts, exactness, races",
    "check": "run a script or a module and report its races",
    "replay": "run a recorded program again, in other orders",
    "stress": "delay the lanes of the gradient, before a stream change is merged",
    "train": "train a long-context transformer on text",
    "bench": "measure the gradient: times, memory, overlap, roofline, bits",
    "overlap": "run a script and say how much of its transfers was hidden",
    "doctor": "say what works on this machine, and what to do about the rest",
}
"""Every command: the name of its module in this package, and what it does."""

HELP: Final = """\
usage: crosscurrent COMMAND [OPTIONS]

Finds, proves and prevents ordering bugs between CUDA streams, pinned memory
and the host, in PyTorch code.

commands:
{commands}

  -h, --help  show this help; after a command, that command's
  --version   show the version

exit codes:
  0 good; 1 something failed, or there is a race; 2 wrong use: nothing was run;
  3 no verdict: not everything could be run, or the script failed itself;
  130, 143 interrupted; 141 nobody read the output
example: crosscurrent check --simulate script.py
"""


class Command(Protocol):
    """What a command's module offers."""

    @staticmethod
    def parser() -> ArgumentParser:
        """The command's options."""

    @staticmethod
    def run(arguments: Namespace) -> int:
        """Do it, and give the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    try:
        code = _main(argv)
        if not getattr(sys.stdout, "closed", True):  # which a script that was checked may have done
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Else Python would try to write the rest once more when it ends, and complain.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.UNREAD
    except KeyboardInterrupt:
        return _complain("crosscurrent", "interrupted", ExitCode.INTERRUPTED)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        sys.stderr.write(_help())
        return ExitCode.WRONG_USE
    name, rest = arguments[0], arguments[1:]
    if name in ("-h", "--help"):
        sys.stdout.write(_help())
        return ExitCode.GOOD
    if name == "--version":
        from crosscurrent import __version__

        sys.stdout.write(f"crosscurrent {__version__}\n")
        return ExitCode.GOOD
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}"
        return _complain("crosscurrent", f"there is no command {name!r}; {advice}", ExitCode.WRONG_USE)
    return _run(name, rest)


def _run(name: str, argv: list[str]) -> int:
    program = f"crosscurrent {name}"
    with_traceback = "--traceback" in argv
    try:
        command: Command = importlib.import_module(f"crosscurrent.cli.{name}")  # type: ignore[assignment]
        arguments = _parse(command.parser(), argv)
        with_traceback = arguments.traceback
        _set_up_logging(verbose=arguments.verbose)
        return command.run(arguments)
    except SystemExit as end:  # --help and --print_config leave this way
        return end.code if isinstance(end.code, int) else ExitCode.GOOD
    except KeyboardInterrupt:
        return _complain(program, "interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        raise
    except Exception as error:
        if with_traceback:
            traceback.print_exc()
        return _complain(program, *_explain(program, error))


def _parse(parser: ArgumentParser, argv: list[str]) -> Namespace:
    """The arguments. Whatever reading them runs into (a file that is no text, say) is wrong use."""
    try:
        return parser.parse_args(argv)
    except argparse.ArgumentError:
        raise
    except Exception as error:
        raise WrongUseError(f"the options cannot be read: {error}") from error


def _explain(program: str, error: Exception) -> tuple[str, ExitCode]:
    """One line that says what went wrong and what to do, and the exit code for it."""
    if isinstance(error, argparse.ArgumentError):
        return f"{_plain(str(error))} (`{program} --help` lists the options)", ExitCode.WRONG_USE
    if isinstance(error, WrongUseError):
        return str(error), ExitCode.WRONG_USE
    if isinstance(error, CommandError):
        return str(error), ExitCode.BAD
    if isinstance(error, OSError):
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return f"{what} (--traceback shows where)", ExitCode.NO_VERDICT
    return f"{type(error).__name__}: {error} (--traceback shows where)", ExitCode.NO_VERDICT


_KINDS = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "a text"}


def _plain(message: str) -> str:
    """The parser's complaints in the words of somebody who types options."""
    words = " ".join(message.split())
    found = re.fullmatch(r"Parser key \"([\w.]+)\": Expected a <class '(\w+)'>\. Got value: ?(.*)", words)
    if found is not None and found[2] in _KINDS:
        return f"--{found[1]} must be {_KINDS[found[2]]}, got {found[3]!r}"
    # What comes after the program's name may well be nothing. Not every argparse names that, too.
    return re.sub(r"are required: program(, arguments)?$", "are required: the program to run", words)


def _complain(program: str, message: str, code: ExitCode) -> ExitCode:
    sys.stderr.write(f"{program}: {' '.join(message.split())}\n")
    return code


def _set_up_logging(*, verbose: bool) -> None:
    logger = logging.getLogger("crosscurrent")
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    if verbose and not any(isinstance(handler, logging.StreamHandler) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)


def _help() -> str:
    width = max(map(len, COMMANDS))
    return HELP.format(commands="\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()))
