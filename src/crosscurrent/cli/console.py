"""Where the commands write: results to the output, progress and complaints to the error output."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

WIDTH = 110
"""The least width of a table where there is no terminal with an edge: nothing may be cut off."""


def output() -> Console:
    """The console for results."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def show_table(table: Table) -> None:
    """A table of results, and an empty line."""
    from crosscurrent.report.text import is_plain

    console = output()
    # Lines are for terminals: elsewhere somebody may cut columns out.
    if is_plain(console):
        table.box = None
    console.print(table)
    console.print()


def say(line: str) -> None:
    """One line of results, never broken: something may be reading it."""
    output().print(line, soft_wrap=True, markup=False)


def error_output() -> Console:
    """The console for progress and remarks."""
    return Console(stderr=True, highlight=False)


def say_above(bar: Progress, line: str) -> None:
    """The same while a progress bar is shown: above the bar, where both are on one terminal."""
    if bar.disable or not sys.stdout.isatty():
        say(line)
    else:
        bar.console.print(line, soft_wrap=True, markup=False)


def progress(*columns: ProgressColumn) -> Progress:
    """A progress bar with the time left; silent where there is no terminal, or with ``NO_COLOR``."""
    console = error_output()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        # What goes to the output is for whoever reads it there; see ``say_above``.
        redirect_stdout=False,
        disable=not console.is_terminal or bool(os.environ.get("NO_COLOR")),
    )
