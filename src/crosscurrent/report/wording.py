"""Sentences that the terminal and the page share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from crosscurrent.races.advice import Advice, Verdict
from crosscurrent.races.causes import RaceKind
from crosscurrent.races.findings import Finding
from crosscurrent.report.source import WELL_KNOWN, place_of, shape_of, short_op

if TYPE_CHECKING:
    from crosscurrent.report.document import HostWaits

_OPERATOR = re.compile(r"\b(?:aten|c10d)\.(\w+)\.\w+")

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


_WITHOUT_STREAMS = {
    "allocation": (
        "allocation of pinned memory",
        "the driver",
        "the driver makes it, and may let all work of the device finish first, though nothing can rely on "
        "that. Allocate once, before the loop, and use the memory again.",
    ),
    "pageable copy": (
        "pageable copy",
        "its own bytes",
        "the host itself takes part in it. Pin that memory once, and copy with `non_blocking=True`.",
    ),
    "strided copy": (
        "strided copy",
        "its own bytes",
        "it goes through a temporary, which the host fills or reads itself. Give each piece that travels a "
        "contiguous buffer of its own.",
    ),
}
"""What holds the host up without waiting for a stream: its name, what takes so long, and what to do."""

MOST_PLACES = 3
"""Places of the set-up that are named."""


def wait_kind(wait: HostWaits) -> str:
    """The call that held the host up."""
    return _WITHOUT_STREAMS[wait.kind][0] if wait.kind in _WITHOUT_STREAMS else wait.kind


def waits_for(wait: HostWaits) -> str:
    """What it held the host up for."""
    if wait.streams or wait.kind not in _WITHOUT_STREAMS:
        return ", ".join(wait.streams) or "nothing: all was done"
    return _WITHOUT_STREAMS[wait.kind][1]


def who_waits(advice: Advice) -> str:
    """The lanes that wait, and for what."""
    if advice.waited_for or advice.kind not in _WITHOUT_STREAMS:
        return f"{advice.waiter} for {advice.waited_for or 'nothing'}"
    return f"{advice.waiter} for {_WITHOUT_STREAMS[advice.kind][1]}"


def wait_notes(waits: Iterable[HostWaits]) -> list[str]:
    """Why calls hold the host up that wait for no stream, and what to do about them; each kind once."""
    kinds = dict.fromkeys(wait.kind for wait in waits if not wait.streams)
    return [
        f"{_WITHOUT_STREAMS[kind][0]}: {_WITHOUT_STREAMS[kind][2]}"
        for kind in kinds
        if kind in _WITHOUT_STREAMS
    ]


def set_up_note(waits: Sequence[HostWaits]) -> str:
    """That pinned memory was allocated where it should be, and where that was."""
    places = list(dict.fromkeys(place_of(wait.site) for wait in waits))
    more = f" and {len(places) - MOST_PLACES:,} more places" if len(places) > MOST_PLACES else ""
    return (
        "Pinned memory was allocated while the device had nothing to do, which held nothing up: "
        f"{', '.join(places[:MOST_PLACES])}{more}"
    )


def capital(text: str) -> str:
    """A clause as a sentence of its own."""
    return text[:1].upper() + text[1:]


def readable(text: str) -> str:
    """With the short names of operators: ``aten.copy_.default`` is ``copy_``."""
    return _OPERATOR.sub(lambda found: WELL_KNOWN.get(found[1], found[1]), text)


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
        verb = "is" if advice.redundant_alone == 1 else "are"
        lines.append(
            f"{advice.redundant_alone} of its {advice.count} waits {verb} not needed while the others stay"
        )
    return [capital(line) for line in lines]
