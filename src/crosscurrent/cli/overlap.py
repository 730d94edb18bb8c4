"""``crosscurrent overlap``: run somebody's program and say how much of its transfers was hidden."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from crosscurrent.cli.arguments import command_of, command_parser
from crosscurrent.cli.console import error_output, progress
from crosscurrent.cli.exits import ExitCode, WrongUseError
from crosscurrent.cli.files import result_files, write_json
from crosscurrent.cli.script import INTERRUPT_STATUS, Ending, Script, add_program, flush_output
from crosscurrent.cli.script import run as run_script

if TYPE_CHECKING:
    from crosscurrent.report.overlap import Overlap
    from crosscurrent.report.profile import OverlapRun


def parser() -> ArgumentParser:
    """The options of the command."""
    options = command_parser(
        "overlap",
        "Run a script, or with -m a module, and report how much of its transfers ran behind kernels, what "
        "made the host wait, and which makespan its sync edges would allow: under torch.profiler on a GPU; "
        "with --simulate by a cost model, marked as one. Its own output passes through; the report goes to "
        "the error output. What comes after the program's name is the program's. Exit code: 0 measured, 2 "
        "wrong use, 3 the program itself failed.",
        "crosscurrent overlap --simulate script.py --steps 3",
        usage="[OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS]",
    )
    options.add_argument(
        "--simulate", action="store_true", help="Simulate CUDA on this machine's CPU; times are a model's."
    )
    options.add_argument(
        "--devices", type=int, default=1, metavar="N", help="How many simulated CUDA devices."
    )
    options.add_argument("--json", metavar="FILE", help="Write the analysis there as JSON.")
    options.add_argument("--html", metavar="FILE", help="Write the report there as one page.")
    add_program(options)
    return options


def run(arguments: Namespace) -> int:
    """Run the program, report its overlap, and give the exit code."""
    script = Script.of(arguments)
    script.require_runnable()
    inputs = () if script.is_module else (script.program,)
    report, page = result_files(arguments.json, arguments.html, inputs=inputs)
    files = _Files(json=report, html=page)
    process = os.getpid()
    with ExitStack() as contexts:
        measured = _enter(contexts, arguments)

        def conclude(ending: Ending) -> int:
            with progress(transient=True) as bar:
                task = bar.begin("overlap", total=None)
                measured.conclude(told=partial(bar.count, task))
            code = _exit_code(ending)
            _show(measured.result, arguments, ending, files, code)
            return code

        ending = run_script(script, on_os_exit=conclude)
        if os.getpid() != process:  # a child that the program forked; the report is its parent's
            contexts.pop_all()  # and so is what was entered: the child only ends
            return ending.status
        return conclude(ending)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """Where to write what was found."""

    json: Path | None
    html: Path | None


def _enter(contexts: ExitStack, arguments: Namespace) -> OverlapRun:
    import torch

    import crosscurrent

    if not arguments.simulate and not torch.cuda.is_available():
        raise WrongUseError(
            "this machine has no CUDA device to profile; --simulate gives the picture of a cost model"
        )
    if arguments.simulate:
        try:
            contexts.enter_context(crosscurrent.simulate(devices=arguments.devices))
        except (ValueError, RuntimeError) as error:
            raise WrongUseError(f"{error}") from error
    return crosscurrent.overlap().__enter__()


def _exit_code(ending: Ending) -> ExitCode:
    if ending.status == INTERRUPT_STATUS:
        return ExitCode.INTERRUPTED
    return ExitCode.NO_VERDICT if ending.failed else ExitCode.GOOD


def _show(overlap: Overlap, arguments: Namespace, ending: Ending, files: _Files, code: ExitCode) -> None:
    """Write the report everywhere it is wanted."""
    from crosscurrent.report import html, text
    from crosscurrent.report.watched import report_of_overlap

    title = " ".join([arguments.program, *arguments.arguments])
    report = report_of_overlap(overlap, title=title, command=command_of(parser(), arguments))
    if files.json is not None:
        write_json(files.json, _as_json(overlap, arguments, ending, code))
    if files.html is not None:
        html.write(report, files.html)
    flush_output()
    text.show(report, error_output())
    for remark in ending.remarks:
        sys.stderr.write(f"\n{remark}\n")
    if ending.failed:
        sys.stderr.write(f"\nthe program itself failed ({ending.why}): this is the overlap up to there\n")
    sys.stderr.flush()


def _as_json(overlap: Overlap, arguments: Namespace, ending: Ending, code: ExitCode) -> dict[str, object]:
    """The document of the overlap, and what was run."""
    import torch

    from crosscurrent import __version__

    return {
        **overlap.to_json(),
        "verdict": "measured" if code is ExitCode.GOOD else "no verdict",
        "crosscurrent": __version__,
        "torch": torch.__version__,
        "simulated": arguments.simulate,
        "program": {
            "name": arguments.program,
            "module": arguments.module,
            "arguments": list(arguments.arguments),
            "exit_status": ending.status,
            "error": ending.error,
        },
        "remarks": list(ending.remarks),
    }
