"""Sentences that the terminal and the page share."""

from __future__ import annotations

import re

from crosscurrent.races.advice import Advice, Verdict
from crosscurrent.races.causes import RaceKind
from crosscurrent.races.findings import Finding
from crosscurrent.report.source import place_of, shape_of, short_op

_OPERATOR = re.compile(r"\baten\.(\w+)\.\w+")

_WELL_KNOWN = {"_local_scalar_dense": "item"}
"""Operators that nobody calls by their names."""

_MEANING = {
    RaceKind.READ_AFTER_WRITE: "may be read before it is written",
    RaceKind.WRITE_AFTER_READ: "may be overwritten while it is still read",
    RaceKind.WRITE_AFTER_WRITE: "is written twice, in either order",
    RaceKind.REUSE: "may be handed out again while it is still in use",
}


def title(finding: Finding) -> str:
    """What can go wrong, in one line."""
    what = shape_of(finding.first.shape, finding.first.dtype) or "memory"
    return f"{what} {_MEANING[finding.kind]}"


def capital(text: str) -> str:
    """A clause as a sentence of its own."""
    return text[:1].upper() + text[1:]


def readable(text: str) -> str:
    """With the short names of operators: ``aten.copy_.default`` is ``copy_``."""
    return _OPERATOR.sub(lambda found: _WELL_KNOWN.get(found[1], found[1]), text)


def reasons(advice: Advice, *, most: int = 2) -> list[str]:
    """Why a sync call is needed or not."""
    lines = [
        f"without it {short_op(race.first.op)} on {race.first.lane} ({place_of(race.first.site)}) and "
        f"{short_op(race.second.op)} on {race.second.lane} ({place_of(race.second.site)}) race"
        for race in advice.protects[:most]
    ]
    if len(advice.protects) > most:
        rest = len(advice.protects) - most
        lines.append(f"and {rest} more race" + "s" * (rest != 1))
    if advice.verdict is Verdict.REDUNDANT:
        lines.append("no race appears without it")
    if advice.verdict is Verdict.NO_EDGE:
        lines.append("it orders nothing")
    if advice.verdict is Verdict.NECESSARY and advice.redundant_alone:
        lines.append(f"{advice.redundant_alone} of its {advice.count} waits could go one at a time")
    return [capital(line) for line in lines]
