"""``crosscurrent bench``: how fast the long-context gradient is, and whether it is right."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace
from rich.progress import TextColumn
from rich.table import Table

from crosscurrent.cli.arguments import command_parser
from crosscurrent.cli.console import progress, say, show_table
from crosscurrent.cli.exits import ExitCode, WrongUseError, as_wrong_use
from crosscurrent.cli.files import result_file, write_json

if TYPE_CHECKING:
    from crosscurrent.bench.configurations import Configuration
    from crosscurrent.bench.measurements import Result


def parser() -> ArgumentParser:
    """The options of the command."""
    options = command_parser(
        "bench",
        "Measure the long-context gradient in named configurations (h200-a, h200-b, h200-c, cpu-small), with "
        "grad.async_cpu_transfer off and on alternately: times, memory, the share of the roofline of this "
        "machine, the hidden share of the transfers, host waits, and whether off and on give the same bits. "
        "cpu-small runs in simulation, by its model clock; the others need a GPU. Exit code: 0 measured and "
        "equal, 1 a wrong answer, 2 wrong use, 3 a configuration could not be measured.",
        "crosscurrent bench h200-a h200-b --json bench.json",
        usage="[OPTIONS] NAME...",
    )
    options.add_argument("names", metavar="NAME", nargs="*", help="The configurations to measure.")
    options.add_argument(
        "--repeats", type=int, metavar="N", help="Measured steps of each flag; else the configuration says."
    )
    options.add_argument("--json", metavar="FILE", help="Write the results there as JSON.")
    options.add_argument(
        "--results", metavar="FILE", help="Measure nothing; show the results that --json wrote there."
    )
    options.add_argument(
        "--page", metavar="FILE", help="Put the tables into this Markdown page, between its two marks."
    )
    return options


def run(arguments: Namespace) -> int:
    """Measure, or read what was measured, and show it."""
    from crosscurrent.bench.document import Verdict

    page = _page(arguments.page)
    document = _read(arguments) if arguments.results else _measure(arguments)
    _show(document)
    if page is not None:
        from crosscurrent.bench.page import with_tables

        with as_wrong_use():
            page.write_text(with_tables(page.read_text(encoding="utf-8"), document), encoding="utf-8")
    return {
        Verdict.EQUAL: ExitCode.GOOD,
        Verdict.DIFFERENT: ExitCode.BAD,
        Verdict.NO_VERDICT: ExitCode.NO_VERDICT,
    }[Verdict(document["verdict"])]


def _page(name: str | None) -> Path | None:
    """The page to change; refused now, and not after minutes, if it has no marks."""
    if name is None:
        return None
    from crosscurrent.bench.page import require_marks

    page = Path(name)
    with as_wrong_use():
        require_marks(page.read_text(encoding="utf-8"))
    return page


def _read(arguments: Namespace) -> dict[str, Any]:
    from crosscurrent.bench.page import require_document

    if arguments.names or arguments.json or arguments.repeats is not None:
        raise WrongUseError("--results measures nothing: give no names, no --repeats and no --json with it")
    with as_wrong_use():
        text = Path(arguments.results).read_text(encoding="utf-8")
        try:
            document: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise WrongUseError(
                f"{arguments.results} is no JSON ({error}); name what --json wrote"
            ) from error
        require_document(document)
    return document


def _measure(arguments: Namespace) -> dict[str, Any]:
    from crosscurrent.bench.document import as_json
    from crosscurrent.bench.runner import STAGES
    from crosscurrent.bench.runner import run as measure

    chosen = _chosen(arguments)
    file = result_file(arguments.json)
    results: list[Result] = []
    errors: dict[str, str] = {}
    with progress(TextColumn("{task.fields[stage]}")) as bar:
        task = bar.begin("bench", total=STAGES * len(chosen), stage="")
        for number, configuration in enumerate(chosen):
            begun = count(STAGES * number)  # a stage is told when it begins: what came before it is done

            def on_stage(stage: str) -> None:
                bar.update(task, description=configuration.name, stage=stage, completed=next(begun))  # noqa: B023

            try:
                results.append(measure(configuration, on_stage=on_stage))
            except Exception as error:  # whatever one runs into, the others are still measured
                if arguments.traceback:
                    raise
                errors[configuration.name] = f"{type(error).__name__}: {error}"
            bar.update(task, completed=STAGES * (number + 1))
            # It takes minutes: what ends the run early does not take away what is measured.
            left = {each.name: "the run ended before" for each in chosen[number + 1 :]}
            document = as_json(results, errors | left)
            if file is not None:
                write_json(file, document)
    return document


def _chosen(arguments: Namespace) -> list[Configuration]:
    import torch

    from crosscurrent.bench.configurations import CONFIGURATIONS
    from crosscurrent.bench.runner import with_repeats

    known = ", ".join(CONFIGURATIONS)
    if not arguments.names:
        raise WrongUseError(f"name what to measure: {known}")
    for name in arguments.names:
        if name not in CONFIGURATIONS:
            raise WrongUseError(f"there is no configuration {name!r}; there are {known}")
    with as_wrong_use():
        chosen = [
            with_repeats(CONFIGURATIONS[name], arguments.repeats) for name in dict.fromkeys(arguments.names)
        ]
    has_cuda = torch.cuda.is_available()
    for configuration in chosen:
        if configuration.simulated and has_cuda:
            raise WrongUseError(
                f"{configuration.name} is measured in simulation, which this machine with its CUDA device "
                "refuses; hide the device (CUDA_VISIBLE_DEVICES=) or measure another one"
            )
        if not configuration.simulated and not has_cuda:
            raise WrongUseError(
                f"{configuration.name} needs a CUDA device, and this machine has none; cpu-small is "
                "measured in simulation"
            )
    return chosen


def _show(document: dict[str, Any]) -> None:
    from crosscurrent.bench import page

    for columns, rows in (
        (page.TIME_COLUMNS, page.time_rows(document)),
        (page.OVERLAP_COLUMNS, page.overlap_rows(document)),
        (page.ROOFLINE_COLUMNS, page.roofline_rows(document)),
    ):
        if not rows:
            continue
        table = Table(show_edge=False, pad_edge=False)
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number > 1 else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        show_table(table)
    for line in page.rate_lines(document):
        say(line)
    for result in document["results"]:
        say(f"{result['name']}: {result['comparison']['said']}; times by {result['clock']}")
        for flag in ("off", "on"):
            for wait in result[flag]["overlap"]["host_waits_at"]:
                say(
                    f"{result['name']}, {flag}: {wait['times']} host waits, {wait['call']} at {wait['place']}"
                )
    for name, error in document["errors"].items():
        say(f"{name} could not be measured: {error}")
    for note in document["notes"]:
        say(note)
