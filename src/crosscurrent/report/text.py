"""A report on a terminal: the findings with their source lines, then tables.

With colors and boxes where they are wanted; plain text, nothing cut and nothing wrapped, where the output
is no terminal or ``NO_COLOR`` is set.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from crosscurrent.races.advice import Advice
from crosscurrent.races.advice import Verdict as Need
from crosscurrent.races.findings import Finding, RacingAccess
from crosscurrent.report.document import Report, Verdict
from crosscurrent.report.overlap import Overlap
from crosscurrent.report.source import excerpt, place_of, shape_of, short_op
from crosscurrent.report.wording import (
    capital,
    readable,
    reasons,
    set_up_note,
    title,
    wait_kind,
    wait_notes,
    waits_for,
    who_waits,
)
from crosscurrent.trace.records import Site

MOST_PAIRS = 5
"""Further pairs listed for one finding; the page lists more."""


INDENT = 11
_SENTENCES = frozenset({"missing", "fix", "note", "also"})
"""What is filled like prose. Witness values and schedules stay as they are."""


def show(report: Report, console: Console) -> None:
    """Print everything that the report says, the verdict last: it is what stays on the screen."""
    plain = is_plain(console)
    for number, finding in enumerate(report.findings, start=1):
        width = None if plain else console.width
        text = finding_text(
            finding, number=number, total=len(report.findings), width=width, replay=report.replay
        )
        _print(console, text, plain=plain)
        _print(console, Text(), plain=plain)
    for section in report.sections:
        _table(console, section.title, section.columns, section.rows, good=section.good)
        if section.text:
            _print(console, Text(section.text), plain=plain)
    _table(
        console,
        "The host waited",
        ("call", "waits for", "times", "where"),
        [
            (wait_kind(wait), waits_for(wait), f"{wait.times:,}", _place(wait.site))
            for wait in report.blocking
        ],
        notes=wait_notes(report.blocking),
    )
    if report.set_up:
        _print(console, Text(set_up_note(report.set_up) + "\n"), plain=plain)
    if report.advice:
        _advice(report, console)
    _table(
        console,
        "Not understood: the verdict does not cover these",
        ("call", "why", "times", "where"),
        [(what.op, what.reason, f"{what.times:,}", _place(what.site)) for what in report.unknown],
    )
    if report.overlap is not None:
        show_overlap(report.overlap, console)
    _print(console, _verdict(report), plain=plain)


def show_overlap(overlap: Overlap, console: Console) -> None:
    """Print the analysis of overlap alone."""
    plain = is_plain(console)
    for heading, columns, rows in overlap.tables():
        _table(console, heading, columns, rows, right=range(1, len(columns)))
    for sentence in overlap.sentences:
        _print(console, Text(f"- {sentence.replace('`', '')}"), plain=plain)


def is_plain(console: Console) -> bool:
    """Whether the output is no terminal, or colors are not wanted."""
    return not console.is_terminal or bool(os.environ.get("NO_COLOR"))


def finding_text(
    finding: Finding, *, number: int = 1, total: int = 1, width: int | None = None, replay: str = ""
) -> Text:
    """One finding, with the source of both call sites; its sentences fill lines of ``width``, if given.

    ``replay`` is the command that runs its schedule, but for the schedule.
    """
    text = Text()
    count = "" if total == 1 else f"{number} of {total}: "
    text.append(f"race {count}{title(finding)}", "bold red")
    times = "" if finding.count == 1 else f", {finding.count:,} racing pairs"
    text.append(f"\n  {finding.kind.value} on {finding.memory.value} memory{times}  [{finding.id}]\n", "dim")
    if not finding.certain:
        text.append("  uncertain: whether the two regions overlap could not be decided\n", "yellow")
    _side(text, "first", finding.first)
    _side(text, "second", finding.second)
    if finding.freed_at is not None:
        text.append("\n  freed    ", "bold")
        text.append(f"{_place(finding.freed_at)}\n")
        if finding.freed_at not in (finding.first.site, finding.second.site):
            _source(text, finding.freed_at)
    text.append("\n")
    for label, words in _explained(finding, replay):
        _line(text, label, words, width)
    text.rstrip()
    return text


def _explained(finding: Finding, replay: str) -> Iterator[tuple[str, str]]:
    yield "missing", readable(finding.missing)
    yield "fix", readable(finding.fix)
    for note in finding.notes:
        yield "note", readable(note)
    for pair in finding.also[:MOST_PAIRS]:
        times = "" if pair.count == 1 else f" ({pair.count:,} times)"
        yield "also", readable(f"{pair.kind.value}: {pair.first}; {pair.second}{times}")
    if len(finding.also) > MOST_PAIRS:
        yield "also", f"{len(finding.also) - MOST_PAIRS:,} more pairs that the same edge would order"
    if finding.witness is not None:
        yield "witness", readable(finding.witness)
    if finding.schedule is not None:
        yield ("replay", f"{replay} {finding.schedule}") if replay else ("schedule", finding.schedule)


def _side(text: Text, label: str, side: RacingAccess) -> None:
    does = "writes" if side.write else "reads"
    text.append(f"\n  {label:<9}", "bold")
    text.append(short_op(side.op), "cyan")
    text.append(" on ")
    text.append(side.lane, "bold")
    text.append(f" {does} {shape_of(side.shape, side.dtype) or 'memory'} at {_place(side.site)}\n")
    _source(text, side.site)


def _source(text: Text, site: Site) -> None:
    for line in excerpt(site):
        mark = ">" if line.called else " "
        row = f"  {mark} {line.number:>5} | {line.text}".rstrip()
        text.append(f"{row}\n", "bold red" if line.called else "dim")


def _line(text: Text, label: str, words: str, width: int | None) -> None:
    lines = words.splitlines() or [""]
    if width is not None and label in _SENTENCES:
        room = max(20, width - INDENT)
        lines = textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False)
    text.append(f"  {label:<{INDENT - 2}}", "bold")
    text.append(f"\n{' ' * INDENT}".join(lines) + "\n", "green" if label == "fix" else "")


def _advice(report: Report, console: Console) -> None:
    rows = [
        (
            item.verdict.value,
            item.kind,
            who_waits(item),
            f"{item.count:,}",
            _place(item.site),
            _why(item),
        )
        for item in sorted(report.advice or (), key=lambda item: item.verdict is Need.NECESSARY)
    ]
    columns = ("verdict", "call", "who waits", "times", "where", "why")
    _table(console, "Sync calls", columns, rows, right=(3,))


def _why(item: Advice) -> str:
    instead = [f"Instead: {readable(item.replacement)}"] if item.replacement else []
    return "; ".join([*reasons(item, most=1), *instead])


def _verdict(report: Report) -> Text:
    bad = bool(report.findings) or report.verdict in (Verdict.RACES, Verdict.FAILED)
    styles = {Verdict.RACE_FREE: "bold green", Verdict.HELD: "bold green", Verdict.MEASURED: "bold"}
    style = "bold red" if bad else styles.get(report.verdict, "bold yellow")
    text = Text(report.headline.lower(), style)
    text.append(f" in {report.title}" + (" (simulated CUDA)" if report.simulated else ""), "default")
    if report.sentence:
        text.append(f"\n{capital(report.sentence)}", "default")
    return text


def _table(
    console: Console,
    heading: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[int] = (),
    good: Sequence[bool | None] = (),
    notes: Sequence[str] = (),
) -> None:
    """A table on a terminal; elsewhere columns of plain text, as wide as they have to be; then notes."""
    rows = [tuple(row) for row in rows]
    if not rows:
        return
    if is_plain(console):
        _print(console, Text(f"{heading}:"), plain=True)
        widths = [max(map(len, column)) for column in zip(*rows, columns, strict=True)]
        for row in (columns, *rows):
            cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            _print(console, Text(f"  {cells}".rstrip()), plain=True)
        for note in notes:
            _print(console, Text(f"  {note}"), plain=True)
        _print(console, Text(), plain=True)
        return
    table = Table(title=heading, title_justify="left", title_style="bold", pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in set(right) else "left", overflow="fold")
    styles = {True: "green", False: "bold red", None: ""}
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style=styles[good[number]] if good else "")
    console.print(table)
    for note in notes:
        console.print(Text(note, "dim"))
    console.print()


def _place(site: Site) -> str:
    return f"{place_of(site)} ({site.function})" if site.function else place_of(site)


def _print(console: Console, text: Text, *, plain: bool) -> None:
    if plain:
        console.print(text.plain, soft_wrap=True, markup=False, highlight=False, emoji=False)
    else:
        console.print(text, highlight=False)
