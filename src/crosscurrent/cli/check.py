"""``crosscurrent check``: run somebody's program and report its races."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from crosscurrent.cli.arguments import command_of, command_parser
from crosscurrent.cli.console import progress
from crosscurrent.cli.exits import ExitCode
from crosscurrent.cli.files import result_files, write_json
from crosscurrent.cli.program import enter_cuda, program_as_json, show
from crosscurrent.cli.proof import Proof, proof_as_json
from crosscurrent.cli.script import INTERRUPT_STATUS, Ending, Script, add_program
from crosscurrent.cli.script import run as run_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from crosscurrent.races.watch import Watch
    from crosscurrent.report.document import Report, Verdict
    from crosscurrent.schedules.proving import Proving


def parser() -> ArgumentParser:
    """The options of the command."""
    options = command_parser(
        "check",
        "Run a script, or with -m a module, and report its races and every call that made the host wait. "
        "Its own output passes through; the report goes to the error output. What comes after the program's "
        "name is the program's. Exit code: 0 no race, 1 races, 2 wrong use, 3 no verdict: the program itself "
        "failed, or something in it could not be understood.",
        "crosscurrent check --simulate script.py --steps 3",
        usage="[OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS]",
    )
    options.add_argument("--simulate", action="store_true", help="Simulate CUDA on this machine's CPU.")
    options.add_argument(
        "--devices", type=int, default=1, metavar="N", help="How many simulated CUDA devices."
    )
    options.add_argument("--full_stack", "--full-stack", action="store_true", help="Keep whole call stacks.")
    options.add_argument("--json", metavar="FILE", help="Write the verdict and the findings there as JSON.")
    options.add_argument(
        "--html", metavar="FILE", help="Write the report there as one page, with a timeline."
    )
    options.add_argument("--perfetto", metavar="FILE", help="Write a trace there that ui.perfetto.dev opens.")
    options.add_argument(
        "--advice", action="store_true", help="Say of each sync call whether it is needed, and for what."
    )
    options.add_argument(
        "--prove",
        action="store_true",
        help="For each race, run the program again in an order that shows it, and say which values change. "
        "Keeps values while the program runs: a copy of the memory it starts from, about twice the time of "
        "small ops; then some replays for each race, which take twice the program's memory.",
    )
    options.add_argument(
        "--save",
        metavar="FILE",
        help="Save the program with its values there, for `crosscurrent replay FILE SCHEDULE`.",
    )
    add_program(options)
    return options


def run(arguments: Namespace) -> int:
    """Run the program under watch, report, and give the exit code."""
    from crosscurrent.report.watched import report_of

    script = Script.of(arguments)
    script.require_runnable()
    files = _Files.of(arguments, script)
    process, command = os.getpid(), command_of(parser(), arguments)

    with ExitStack() as contexts:
        enter_cuda(contexts, arguments, otherwise="to watch; --simulate runs the program on simulated CUDA")
        watch, proving = _watch(contexts, arguments)
        proof = Proof(proving, saves_to=arguments.save, path=files.program, shows=arguments.prove)

        def conclude(ending: Ending) -> int:
            proof.save()
            proof.remarks += ending.remarks
            code = _exit_code(watch, ending, proof)
            findings = proof.findings(watch)
            bar = progress()
            # The report in the terminal alone is there at once.
            bar.disable |= not (files.num_written or arguments.advice)
            with bar:
                task = bar.begin("report", total=files.num_written + 1)
                if files.json is not None:
                    document = _as_json(watch, ending, code, arguments)
                    write_json(files.json, document | proof_as_json(document, findings, proof))
                    bar.advance(task)
                report = report_of(
                    watch,
                    title=" ".join([script.program, *script.arguments]),
                    simulated=arguments.simulate,
                    command=command,
                    advise=arguments.advice,
                )
                bar.advance(task)
                report = replace(
                    report, verdict=_verdict(code), findings=tuple(findings), replay=proof.replay_command
                )
                _write(report, files, partial(bar.advance, task))
            if files.perfetto is not None and not report.records:
                proof.remarks.append(
                    f"nothing was written to {files.perfetto}: the program did nothing to be seen"
                )
            show(report, ending, proof.remarks, seen="what it did not reach was not looked at")
            return code

        def conclude_now(ending: Ending) -> int:
            proof.name(vars(sys.modules["__main__"]))
            return conclude(ending)

        ending = run_script(script, on_os_exit=conclude_now, on_end=proof.name)
    if os.getpid() != process:  # a child that the program forked; the verdict is its parent's
        return ending.status
    return conclude(ending)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """Where to write what was found."""

    json: Path | None
    html: Path | None
    perfetto: Path | None
    program: Path | None

    @property
    def num_written(self) -> int:
        """Reports that are written to files."""
        return sum(path is not None for path in (self.json, self.html, self.perfetto))

    @classmethod
    def of(cls, arguments: Namespace, script: Script) -> _Files:
        inputs = () if script.is_module else (script.program,)
        json, html, perfetto, program = result_files(
            arguments.json, arguments.html, arguments.perfetto, arguments.save, inputs=inputs
        )
        return cls(json=json, html=html, perfetto=perfetto, program=program)


def _watch(contexts: ExitStack, arguments: Namespace) -> tuple[Watch, Proving | None]:
    """A watch that keeps what is asked for: values, the trace, or findings alone."""
    import crosscurrent

    if arguments.prove or arguments.save is not None:
        proving = contexts.enter_context(crosscurrent.proving(full_stack=arguments.full_stack))
        return proving.watch, proving
    traced = arguments.advice or arguments.html is not None or arguments.perfetto is not None
    return contexts.enter_context(crosscurrent.watch(trace=traced, full_stack=arguments.full_stack)), None


def _write(report: Report, files: _Files, advance: Callable[[], None]) -> None:
    """Write the report to the files where it is wanted."""
    from crosscurrent.report import html, perfetto

    if files.html is not None:
        html.write(report, files.html)
        advance()
    if files.perfetto is not None and report.records:
        perfetto.write(report, files.perfetto)
        advance()


def _verdict(code: int) -> Verdict:
    from crosscurrent.report.document import Verdict

    return {ExitCode.GOOD: Verdict.RACE_FREE, ExitCode.BAD: Verdict.RACES}.get(
        ExitCode(code), Verdict.NO_VERDICT
    )


def _exit_code(watch: Watch, ending: Ending, proof: Proof) -> int:
    if ending.status == INTERRUPT_STATUS:
        return ExitCode.INTERRUPTED
    if ending.failed:
        return ExitCode.NO_VERDICT
    if watch.findings:
        return ExitCode.BAD
    # A race may hide in what was not understood: that is no pass.
    return ExitCode.NO_VERDICT if watch.unknown or proof.not_saved else ExitCode.GOOD


def _as_json(watch: Watch, ending: Ending, code: int, arguments: Namespace) -> dict[str, object]:
    """The document of the watch, and what was run."""
    verdicts = {ExitCode.GOOD: "no race", ExitCode.BAD: "races"}
    return {
        "format": "crosscurrent check",
        "verdict": verdicts.get(ExitCode(code), "no verdict"),
        **program_as_json(arguments, ending),
        **watch.to_json(advice=arguments.advice),
    }
