"""``crosscurrent check``: run somebody's program and report its races."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from crosscurrent.cli.arguments import command_parser
from crosscurrent.cli.exits import ExitCode, WrongUseError
from crosscurrent.cli.files import json_file, write_json
from crosscurrent.cli.script import INTERRUPT_STATUS, Ending, Script
from crosscurrent.cli.script import run as run_script

if TYPE_CHECKING:
    from crosscurrent.races.watch import Watch


def parser() -> ArgumentParser:
    """The options of the command."""
    options = command_parser(
        "check",
        "Run a script, or with -m a module, and report its races and every call that made the host wait. "
        "Its own output passes through; the report goes to the error output. What comes after the program's "
        "name is the program's. Exit code: 0 no race, 1 races, 2 wrong use, 3 the program itself failed.",
        "crosscurrent check --simulate script.py --steps 3",
        usage="[OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS]",
    )
    options.add_argument("--simulate", action="store_true", help="Simulate CUDA on this machine's CPU.")
    options.add_argument(
        "--devices", type=int, default=1, metavar="N", help="How many simulated CUDA devices."
    )
    options.add_argument("--full_stack", "--full-stack", action="store_true", help="Keep whole call stacks.")
    options.add_argument("--json", metavar="FILE", help="Write the verdict and the findings there as JSON.")
    options.add_argument("-m", "--module", action="store_true", help="The program is the name of a module.")
    options.add_argument("program", metavar="PROGRAM", help="The script to run.")
    options.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="The program's arguments."
    )
    return options


def run(arguments: Namespace) -> int:
    """Run the program under watch, report, and give the exit code."""
    script = Script(
        program=arguments.program, arguments=tuple(arguments.arguments), is_module=arguments.module
    )
    script.require_runnable()
    report = json_file(arguments.json)
    process = os.getpid()

    with ExitStack() as contexts:
        watch = _enter(contexts, arguments)

        def conclude(ending: Ending) -> int:
            return _conclude(watch, script, ending, report, simulated=arguments.simulate)

        ending = run_script(script, on_os_exit=conclude)
    if os.getpid() != process:  # a child that the program forked; the verdict is its parent's
        return ending.status
    return conclude(ending)


def _enter(contexts: ExitStack, arguments: Namespace) -> Watch:
    import torch

    import crosscurrent

    if not arguments.simulate and not torch.cuda.is_available():
        raise WrongUseError(
            "this machine has no CUDA device to watch; --simulate runs the program on simulated CUDA"
        )
    if arguments.simulate:
        try:
            contexts.enter_context(crosscurrent.simulate(devices=arguments.devices))
        except (ValueError, RuntimeError) as error:
            raise WrongUseError(f"{error}") from error
    return contexts.enter_context(crosscurrent.watch(full_stack=arguments.full_stack))


def _conclude(watch: Watch, script: Script, ending: Ending, report: Path | None, *, simulated: bool) -> int:
    """Write the report, and give the exit code."""
    sys.stdout.flush()
    code = _exit_code(watch, ending)
    if report is not None:
        write_json(report, _as_json(watch, script, ending, code, simulated=simulated))
    sys.stderr.write(f"{watch.report()}\n")
    if ending.failed:
        what = ending.error or f"exit status {ending.status}"
        sys.stderr.write(f"\nthe program itself failed ({what}): what it did not reach was not looked at\n")
    sys.stderr.flush()
    return code


def _exit_code(watch: Watch, ending: Ending) -> int:
    if ending.status == INTERRUPT_STATUS:
        return ExitCode.INTERRUPTED
    if ending.failed:
        return ExitCode.NO_VERDICT
    return ExitCode.BAD if watch.findings else ExitCode.GOOD


def _as_json(
    watch: Watch, script: Script, ending: Ending, code: int, *, simulated: bool
) -> dict[str, object]:
    """The document of the watch, and what was run."""
    import torch

    from crosscurrent import __version__

    verdicts = {ExitCode.GOOD: "no race", ExitCode.BAD: "races"}
    return {
        "format": "crosscurrent check",
        "verdict": verdicts.get(ExitCode(code), "no verdict"),
        "crosscurrent": __version__,
        "torch": torch.__version__,
        "simulated": simulated,
        "program": {
            "name": script.program,
            "module": script.is_module,
            "arguments": list(script.arguments),
            "exit_status": ending.status,
            "error": ending.error,
        },
        **watch.to_json(),
    }
