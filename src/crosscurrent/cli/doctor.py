"""``crosscurrent doctor``: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from crosscurrent.cli.arguments import command_parser
from crosscurrent.cli.console import output, progress, say
from crosscurrent.cli.exits import ExitCode
from crosscurrent.cli.files import result_file, write_json

if TYPE_CHECKING:
    from crosscurrent.cli.checkup import Finding, State

JSON_FORMAT = "crosscurrent doctor"
JSON_VERSION = 1


def parser() -> ArgumentParser:
    """The options of the command."""
    from crosscurrent.cli.checkup import EXAMINATIONS

    options = command_parser(
        "doctor",
        f"Try what crosscurrent builds on, and say what works here: {', '.join(EXAMINATIONS)}. Exit code: "
        "0 nothing is broken (parts that are not installed are not broken), 1 something that is there does "
        "not work, 2 wrong use.",
        "crosscurrent doctor --json doctor.json",
    )
    options.add_argument("--json", metavar="FILE", help="Write what was found there as JSON.")
    return options


def run(arguments: Namespace) -> int:
    """Try everything, and show it."""
    from crosscurrent.cli.checkup import EXAMINATIONS, State, examine

    report = result_file(arguments.json)
    found = []
    with progress(transient=True) as bar:
        task = bar.begin("doctor", total=len(EXAMINATIONS))
        for name, examination in EXAMINATIONS.items():
            bar.update(task, description=name)
            found.append(examine(name, examination))
            bar.advance(task)
    broken = [each.name for each in found if each.state is State.BROKEN]
    if report is not None:
        write_json(report, _as_json(found, broken))
    _show(found)
    say(f"broken: {', '.join(broken)}" if broken else "nothing is broken")
    return ExitCode.BAD if broken else ExitCode.GOOD


def _show(found: list[Finding]) -> None:
    console = output()
    styles = _styles()
    width = max(len(each.name) for each in found)
    for each in found:
        mark = f"[{styles[each.state]}]{each.state.value:8}[/]"
        console.print(f"{mark} {each.name:{width}}  ", end="")
        console.print(each.seen, markup=False, soft_wrap=True)
        if each.advice:
            console.print(f"{'':{width + 11}}{each.advice}", markup=False, soft_wrap=True)


def _styles() -> dict[State, str]:
    from crosscurrent.cli.checkup import State

    return {State.WORKS: "green", State.MISSING: "yellow", State.BROKEN: "bold red"}


def _as_json(found: list[Finding], broken: list[str]) -> dict[str, object]:
    from crosscurrent import __version__

    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "crosscurrent": __version__,
        "python": sys.version.split()[0],
        "broken": broken,
        "results": [
            {"name": each.name, "state": each.state.value, "seen": each.seen, "advice": each.advice or None}
            for each in found
        ],
    }
