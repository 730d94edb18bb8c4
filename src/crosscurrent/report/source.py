"""The lines of source around a call site, and names short enough to read."""

from __future__ import annotations

import linecache
import os
from typing import NamedTuple

from crosscurrent.report.costs import base_name
from crosscurrent.trace.records import Site


class Line(NamedTuple):
    """One line of source."""

    number: int
    text: str
    called: bool
    """Whether this is the line of the call."""


def excerpt(site: Site, context: int = 2) -> list[Line]:
    """The line of a call and those around it, dedented; [] where there is no source."""
    if site.file == "<string>":
        return []  # the name of any text that was executed; since Python 3.13 linecache knows `python -c`
    linecache.checkcache(site.file)
    lines = linecache.getlines(site.file)
    if not 1 <= site.line <= len(lines):
        return []
    first = max(1, site.line - context)
    last = min(len(lines), site.line + context)
    texts = [lines[number - 1].rstrip().expandtabs(4) for number in range(first, last + 1)]
    indent = min((len(text) - len(text.lstrip()) for text in texts if text), default=0)
    return [
        Line(number, text[indent:], number == site.line)
        for number, text in zip(range(first, last + 1), texts, strict=True)
    ]


def path_of(site: Site) -> str:
    """The file of a call site, from the working directory if it lies below."""
    return site.file.removeprefix(os.getcwd() + os.sep)


def place_of(site: Site) -> str:
    """``file:line``, as editors and terminals take it."""
    return f"{path_of(site)}:{site.line}" if site.line else "unknown place"


def short_place(site: Site) -> str:
    """``file:line`` without folders, for where there is little room."""
    return f"{os.path.basename(site.file)}:{site.line}" if site.line else "?"


WELL_KNOWN = {"_local_scalar_dense": "item", "_to_copy": "to"}
"""Operators that nobody calls by their names: what people write."""


def short_op(name: str) -> str:
    """``aten.copy_.default`` is ``copy_``; a name that is no operator's stays as it is."""
    if name.count(".") < 2 and "::" not in name:
        return name
    base = base_name(name)
    return WELL_KNOWN.get(base, base)


def shape_of(shape: tuple[int, ...], dtype: str) -> str:
    """``float32[4, 8]``."""
    dtype = dtype.removeprefix("torch.")
    return f"{dtype}[{', '.join(map(str, shape))}]" if dtype or shape else ""


def bytes_of(nbytes: int) -> str:
    """A size as a person reads it."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.3g} {unit}"


def time_of(nanoseconds: int) -> str:
    """A duration as a person reads it."""
    value = float(nanoseconds)
    for unit in ("ns", "us", "ms", "s"):
        if value < 1000 or unit == "s":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if value >= 100 or unit == "ns" else f"{value:.3g} {unit}"


def percent(share: float) -> str:
    """A share that is not the whole never reads 100 %, nor does something read 0 %."""
    if 0.995 <= share < 1:
        return "99 %"
    if 0 < share < 0.01:
        return "under 1 %"
    return f"{100 * share:.0f} %"
