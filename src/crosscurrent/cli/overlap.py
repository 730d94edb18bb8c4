"""``crosscurrent overlap``: run somebody's program and say how much of its transfers was hidden."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from crosscurrent.cli.arguments import command_of, command_parser
from crosscurrent.cli.console import progress
from crosscurrent.cli.exits import ExitCode
from crosscurrent.cli.files import result_files, write_json
from crosscurrent.cli.program import enter_cuda, program_as_json, show
from crosscurrent.cli.script import INTERRUPT_STATUS, Ending, Script, add_program
from crosscurrent.cli.script import run as run_script

if TYPE_CHECKING:
    from crosscurrent.report.overlap import Overlap


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
    import crosscurrent
    from crosscurrent.report import html
    from crosscurrent.report.watched import report_of_overlap

    script = Script.of(arguments)
    script.require_runnable()
    inputs = () if script.is_module else (script.program,)
    file, page = result_files(arguments.json, arguments.html, inputs=inputs)
    process, command = os.getpid(), command_of(parser(), arguments)
    with ExitStack() as contexts:
        enter_cuda(contexts, arguments, otherwise="to profile; --simulate gives the picture of a cost model")
        measured = contexts.enter_context(crosscurrent.overlap())

        def conclude(ending: Ending) -> int:
            with progress(transient=True) as bar:
                task = bar.begin("overlap", total=None)
                measured.conclude(told=partial(bar.count, task))
            code = _exit_code(ending)
            report = report_of_overlap(
                measured.result,
                title=" ".join([script.program, *script.arguments]),
                command=command,
            )
            if file is not None:
                write_json(file, _as_json(measured.result, arguments, ending, code))
            if page is not None:
                html.write(report, page)
            show(report, ending, ending.remarks, seen="this is the overlap up to there")
            return code

        ending = run_script(script, on_os_exit=conclude)
        if os.getpid() != process:  # a child that the program forked; the report is its parent's
            contexts.pop_all()  # and so is what was entered: the child only ends
            return ending.status
        return conclude(ending)


def _exit_code(ending: Ending) -> ExitCode:
    if ending.status == INTERRUPT_STATUS:
        return ExitCode.INTERRUPTED
    return ExitCode.NO_VERDICT if ending.failed else ExitCode.GOOD


def _as_json(overlap: Overlap, arguments: Namespace, ending: Ending, code: ExitCode) -> dict[str, object]:
    """The document of the overlap, and what was run."""
    return {
        **overlap.to_json(),
        "verdict": "measured" if code is ExitCode.GOOD else "no verdict",
        **program_as_json(arguments, ending),
        "remarks": list(ending.remarks),
    }
