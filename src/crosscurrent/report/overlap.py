"""How much of the transfers ran behind kernels, what is left, and what stands in the way.

Definitions. All intervals are half open, in whole nanoseconds, and they are *united, not added*: a
moment in which two copies run counts once.

- *Transfer*: the moments in which a copy between host and device, or between two devices, runs.
- *Kernel*: the moments in which a device computes; copies and fills within one device count as that.
- *Hidden*: the moments of both on one device. A kernel of another device hides nothing.
- *Hidden share*: |transfer and kernel| / |transfer|. Without transfers there is none.
- *Exposed*: |transfer without kernel|. No change of order can save more than this.
- *Blocked*: the moments in which the host stands in a call that waits.

Times of several devices are added. A part (the copies of one stream, one direction, one call site) has
the time of its own copies; parts that run at once share moments, so that they may sum to more than
the whole.

For the makespans see ``Bounds``. The analysis knows nothing of where a timeline is from: ``modelled``
makes one from the records of a trace, ``kineto`` from a profile of a real GPU.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from crosscurrent.report.bounds import MAX_PASSES, Bounds, bounds
from crosscurrent.report.costs import Direction
from crosscurrent.report.intervals import Span, common, length, united, without
from crosscurrent.report.makespan import Step
from crosscurrent.report.overlap_json import as_json
from crosscurrent.report.overlap_text import definitions, sentences, tables
from crosscurrent.report.source import place_of
from crosscurrent.schedules.countdown import Countdown
from crosscurrent.trace.records import Site

MAX_COPIES = 5
"""Single copies that are named."""

_PARTS = 2
"""Passes over a program that working out all the parts of a run takes as long as."""

PASSES = MAX_PASSES + _PARTS
"""Passes over a program that an analysis takes, at most."""


class Activity(NamedTuple):
    """A kernel (``direction`` None) or a copy, when it ran."""

    start: int
    stop: int
    device: int
    stream: str
    name: str
    direction: Direction | None = None
    nbytes: int = 0
    site: Site | None = None
    pageable: bool = False


class Blocked(NamedTuple):
    """A call in which the host waited."""

    start: int
    stop: int
    call: str
    site: Site | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What ran when."""

    activities: Sequence[Activity]
    blocked: Sequence[Blocked] = ()
    start: int = 0
    stop: int = 0
    """Of the whole run; an activity may end later."""

    program: Sequence[Step] | None = None
    """The same as a program, for the makespans; None where the sync edges are not known."""

    waits: Sequence[tuple[str, Site | None] | None] = ()
    """By position in ``program``: the call and call site of a wait."""

    modelled: str = ""
    """The rates of the model that made it up; empty for what was measured."""


class Part(NamedTuple):
    """Some of the copies."""

    name: str
    num: int
    nbytes: int
    time: int
    hidden: int

    @property
    def exposed(self) -> int:
        """Time of these copies in which no kernel ran."""
        return self.time - self.hidden


class BlockedPart(NamedTuple):
    """The host waits of one call site."""

    call: str
    site: Site | None
    num: int
    time: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What the analysis says; times in nanoseconds."""

    total: int
    kernel: int
    transfer: int
    hidden: int
    idle: int
    """When a device neither computed nor copied."""

    blocked: int
    num_copies: int
    num_pageable: int
    by_direction: tuple[Part, ...]
    by_stream: tuple[Part, ...]
    by_site: tuple[Part, ...]
    copies: tuple[Part, ...]
    """The single copies with the most exposed time."""

    blocked_by: tuple[BlockedPart, ...]
    bounds: Bounds | None
    modelled: str
    num_devices: int

    @property
    def exposed(self) -> int:
        """Transfer time in which no kernel ran."""
        return self.transfer - self.hidden

    @property
    def hidden_share(self) -> float | None:
        """``|transfer and kernel| / |transfer|``; None without transfers."""
        return self.hidden / self.transfer if self.transfer else None

    @property
    def sentences(self) -> tuple[str, ...]:
        """What it comes to, and why the gain is small where it is small."""
        return sentences(self)

    @property
    def definitions(self) -> str:
        """What the words mean."""
        return definitions()

    def to_json(self) -> dict[str, object]:
        """All of it as plain lists, dictionaries, strings and numbers; see ``overlap_json.as_json``."""
        return as_json(self)

    def tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Title, columns and rows of each table."""
        return tables(self)


def analyse(timeline: Timeline, countdown: Countdown | None = None) -> Overlap:
    """The overlap of a run. ``countdown`` counts the passes over it: ``PASSES`` at most."""
    countdown = countdown or Countdown()
    limits = None
    with countdown.part(MAX_PASSES):
        if timeline.program is not None:
            limits = bounds(timeline.program, timeline.waits, countdown)
    with countdown.part(_PARTS):
        overlap = _analyse(timeline, limits)
        countdown.take(_PARTS)
    return overlap


def _analyse(timeline: Timeline, limits: Bounds | None) -> Overlap:
    copies = [activity for activity in timeline.activities if activity.direction is not None]
    devices = sorted({activity.device for activity in timeline.activities})
    kernels = {
        device: united(
            (activity.start, activity.stop)
            for activity in timeline.activities
            if activity.direction is None and activity.device == device
        )
        for device in devices
    }
    whole = _part("all", copies, kernels)
    start = min([timeline.start, *(activity.start for activity in timeline.activities)])
    stop = max([timeline.stop, *(activity.stop for activity in timeline.activities)])
    busy = [
        united(
            (activity.start, activity.stop) for activity in timeline.activities if activity.device == device
        )
        for device in devices
    ]
    return Overlap(
        total=stop - start,
        kernel=sum(map(length, kernels.values())),
        transfer=whole.time,
        hidden=whole.hidden,
        idle=sum(length(without([(start, stop)], spans)) for spans in busy) if stop > start else 0,
        blocked=length(united((call.start, call.stop) for call in timeline.blocked)),
        num_copies=len(copies),
        num_pageable=sum(copy.pageable for copy in copies),
        by_direction=_parts(copies, kernels, lambda copy: copy.direction, _direction_name),
        by_stream=_parts(copies, kernels, lambda copy: copy.stream, lambda copy: copy.stream),
        by_site=_parts(copies, kernels, lambda copy: copy.site, lambda copy: _site_name(copy.site)),
        copies=_single(copies, kernels),
        blocked_by=_blocked_parts(timeline.blocked),
        bounds=limits,
        modelled=timeline.modelled,
        num_devices=len(devices),
    )


def _part(name: str, copies: Sequence[Activity], kernels: dict[int, list[Span]]) -> Part:
    time = hidden = 0
    for device in sorted({copy.device for copy in copies}):
        spans = united((copy.start, copy.stop) for copy in copies if copy.device == device)
        time += length(spans)
        hidden += length(common(spans, kernels.get(device, [])))
    return Part(name, len(copies), sum(copy.nbytes for copy in copies), time, hidden)


def _parts(
    copies: Sequence[Activity],
    kernels: dict[int, list[Span]],
    key: Callable[[Activity], Hashable],
    name: Callable[[Activity], str],
) -> tuple[Part, ...]:
    groups: dict[Hashable, list[Activity]] = {}
    for copy in copies:
        groups.setdefault(key(copy), []).append(copy)
    parts = [_part(name(group[0]), group, kernels) for group in groups.values()]
    return tuple(sorted(parts, key=lambda part: (-part.exposed, part.name)))


def _single(copies: Sequence[Activity], kernels: dict[int, list[Span]]) -> tuple[Part, ...]:
    """The copies with the most exposed time."""
    exposed = []
    for copy in copies:
        spans = without([(copy.start, copy.stop)], _around(kernels.get(copy.device, []), copy))
        exposed.append((length(spans), copy))
    exposed.sort(key=lambda item: (-item[0], item[1].start))
    return tuple(
        Part(
            f"{copy.name} on {copy.stream}" + (f" at {_site_name(copy.site)}" if copy.site else ""),
            1,
            copy.nbytes,
            copy.stop - copy.start,
            copy.stop - copy.start - rest,
        )
        for rest, copy in exposed[:MAX_COPIES]
        if rest
    )


def _around(spans: list[Span], copy: Activity) -> list[Span]:
    """The spans that a copy meets, found by halving: there may be many copies, and many kernels."""
    first = bisect_right(spans, copy.start, key=lambda span: span[1])
    last = bisect_left(spans, copy.stop, key=lambda span: span[0])
    return spans[first:last]


def _blocked_parts(blocked: Iterable[Blocked]) -> tuple[BlockedPart, ...]:
    groups: dict[tuple[str, Site | None], list[Blocked]] = {}
    for call in blocked:
        groups.setdefault((call.call, call.site), []).append(call)
    parts = [
        BlockedPart(call, site, len(group), length(united((each.start, each.stop) for each in group)))
        for (call, site), group in groups.items()
    ]
    return tuple(sorted(parts, key=lambda part: (-part.time, part.call, _site_name(part.site))))


def _direction_name(copy: Activity) -> str:
    assert copy.direction is not None
    return copy.direction.value


def _site_name(site: Site | None) -> str:
    return "unknown place" if site is None else place_of(site)
