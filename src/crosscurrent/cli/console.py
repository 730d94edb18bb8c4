"""Where the commands write: results to the output, progress and complaints to the error output."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

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


class _Description(ProgressColumn):
    """What is being done: the one text that is cut where the terminal is narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class Bar(Progress):
    """A progress bar that knows how much time is left from its first step on, however long steps take."""

    def begin(self, description: str, *, total: float | None, completed: int = 0, **fields: Any) -> TaskID:
        """Start to count. A ``total`` of None is not known yet; ``count`` tells it."""
        task = self.add_task(description, total=total, completed=completed, **fields)
        self.advance(task, 0)  # rich measures from one step to the next: now there is one to measure from
        return task

    def count(self, task: TaskID, completed: float, total: float) -> None:
        """So much is done of what is now known to be all."""
        # ``update`` would forget how long steps took if it were given a new total.
        next(each for each in self.tasks if each.id == task).total = total
        self.update(task, completed=completed)


def progress(*columns: ProgressColumn, transient: bool = False, share: bool = False) -> Bar:
    """A progress bar with the time left; silent where there is no terminal, or with ``NO_COLOR``.

    A ``transient`` one is gone when it is done. With ``share`` it shows how much of all is done in percent:
    the steps are too small to mean something.
    """
    console = error_output()
    whole = Column(no_wrap=True)
    return Bar(
        _Description(),
        BarColumn(bar_width=max(8, min(40, console.width - 100))),
        (TaskProgressColumn if share else MofNCompleteColumn)(table_column=whole),
        *columns,
        TimeElapsedColumn(table_column=whole),
        TextColumn("gone,"),
        TimeRemainingColumn(table_column=whole),
        TextColumn("left"),
        console=console,
        transient=transient,
        # Else rich forgets steps of half a minute, and how much time is left with them.
        speed_estimate_period=math.inf,
        # What goes to the output is for whoever reads it there; see ``say_above``.
        redirect_stdout=False,
        disable=not console.is_terminal or bool(os.environ.get("NO_COLOR")),
    )
