"""The words of a finding: which edge is missing, and the least change that adds it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from crosscurrent.races.causes import Cause, LackedWait, RaceKind
from crosscurrent.trace.records import (
    HOST,
    HostWait,
    Lane,
    MemoryKind,
    RecordEvent,
    Site,
    TraceInfo,
    WaitEvent,
)

_MOST_NAMED: Final = 3
"""Findings, and waits, that a note names; the rest is counted."""


class MissingWait(NamedTuple):
    """A wait that is not there, in names; as text it is a change to the program."""

    first: Lane
    """The lane to be waited for."""

    second: Lane
    """The lane that has to wait."""

    site: Site
    """Where: before which call, of which op."""

    op: str

    @property
    def place(self) -> tuple[Site, str]:
        """Where a loop over streams lacks one wait for each of them."""
        return self.site, self.op

    def __str__(self) -> str:
        first = stream_word(self.first.name)
        before = f"before {self.op} at {place(self.site)}"
        if self.second.index == HOST:
            return f"`{first}.synchronize()` {before}"
        return f"`{stream_word(self.second.name)}.wait_stream({first})` {before}"


def place(site: Site) -> str:
    """A call site as a person reads it: the path from the working directory, if it lies below."""
    path = site.file.removeprefix(os.getcwd() + os.sep)
    where = f"{path}:{site.line}" if site.line else "unknown place"
    return f"{where} ({site.function})" if site.function else where


def lane_of(lane: int, info: TraceInfo) -> Lane:
    """The lane's name and device, or its number where the trace does not name it."""
    if 0 <= lane < len(info.lanes):
        return info.lanes[lane]
    return Lane(lane, "host" if lane == HOST else f"lane {lane}")


def site_of(site: int, info: TraceInfo) -> Site:
    """A call site, or a placeholder where the trace does not know it."""
    return info.site_at(site) or Site("<unknown>", 0, "<unknown>")


def missing_edge(head: Cause, info: TraceInfo) -> str:
    """The edge that is not there, from lane and op to lane and op."""
    first, second = lane_of(head.first_lane, info).name, lane_of(head.second_lane, info).name
    edge = (
        f"nothing orders {head.first.name} on {first} at {_at(head.first.site, info)} "
        f"before {head.second.name} on {second} at {_at(head.second.site, info)}"
    )
    if head.freed is None:
        return edge
    return f"{edge}, which may get the same memory: the block was freed at {_at(head.freed.free, info)}"


def fix_for(group: Sequence[Cause], info: TraceInfo) -> str:
    """The least change that adds the edge.

    An event after the last first access of the group, waited for before its first second access, so
    that the one edge repairs all its pairs.
    """
    head = group[0]
    if head.kind is RaceKind.REUSE:
        return _reuse_fix(head, info)
    # Causes on other lanes lack the same in the same lines; the words are for the headline's lanes.
    repaired = [
        cause
        for cause in group
        if (cause.first_lane, cause.second_lane) == (head.first_lane, head.second_lane)
        and cause.first.index < head.second.index
    ]
    last = max(repaired, key=lambda cause: cause.first.index)
    first, second = lane_of(head.first_lane, info).name, lane_of(head.second_lane, info).name
    before = f"before {head.second.name} at {_at(head.second.site, info)}"
    ready = head.context.ready
    event = None
    if ready is not None and ready.index > last.first.index and ready.via == "record":
        event = f"the event recorded on {first} at {_at(ready.site, info)}"
    if head.second_lane == HOST:
        if event is not None:
            return f"call `event.synchronize()` on {event}, {before}"
        return (
            f"record an event on {first} after {last.first.name} at {_at(last.first.site, info)} "
            f"and call `event.synchronize()` {before}"
        )
    if event is not None:
        return f"let {second} wait for {event}: `{stream_word(second)}.wait_event(event)` {before}"
    return (
        f"record an event on {first} after {last.first.name} at {_at(last.first.site, info)} "
        f"(`event.record({stream_word(first)})`) and let {second} wait for it "
        f"(`{stream_word(second)}.wait_event(event)`) {before}"
    )


def _reuse_fix(head: Cause, info: TraceInfo) -> str:
    freed = head.freed
    assert freed is not None
    first = lane_of(head.first_lane, info).name
    free = _at(freed.free, info)
    second = lane_of(head.second_lane, info).name
    if head.memory is MemoryKind.PINNED:
        return (
            f"keep the pinned tensor alive until {first} is done with it: "
            f"call `event.synchronize()` on an event recorded after {head.first.name} "
            f"before the free at {free}"
        )
    before = f"before {head.second.name} at {_at(head.second.site, info)}"
    wait = f"`{stream_word(second)}.wait_stream({stream_word(first)})` {before}"
    if freed.owner == head.first_lane:
        # The pool's own stream still uses the block: record_stream does nothing for that stream.
        return f"let {second} wait for {first}, to whose pool the block belongs: {wait}"
    return (
        f"call `tensor.record_stream({stream_word(first)})` before the tensor is freed at {free}, "
        f"or let {second} wait first: {wait}"
    )


def notes_on(head: Cause, info: TraceInfo) -> list[str]:
    """What the sync calls around the race tried, and why it was not enough."""
    notes = []
    second = lane_of(head.second_lane, info).name
    first = lane_of(head.first_lane, info).name
    context = head.context
    if context.unrecorded is not None:
        notes.append(
            f"the wait at {_at(context.unrecorded.site, info)} is for an event that had not been recorded "
            "by then, and orders nothing"
        )
        if context.unrecorded.lane == head.first_lane:
            notes[-1] += (
                f"; if {head.first.name} was to come after {head.second.name}, issue {head.second.name} "
                "and record the event before that wait"
            )
    if context.elsewhere is not None:
        record, wait = context.elsewhere
        notes.append(
            f"the wait of {second} at {_at(wait.site, info)} is for {_waited_for(record, wait, info)}, "
            f"not for {first}"
        )
    elif context.early is not None and head.kind is not RaceKind.REUSE:
        record, wait = context.early
        notes.append(
            f"the wait at {_at(wait.site, info)} uses an event recorded on {first} "
            f"at {_at(record.site, info)}, before {head.first.name}: too early to cover it"
        )
    return notes


def in_names(wait: LackedWait, info: TraceInfo) -> MissingWait:
    """A wait that is not there; from wherever the line was called."""
    site = site_of(wait.site, info)._replace(stack=())
    return MissingWait(lane_of(wait.lane, info), lane_of(wait.second, info), site, wait.op)


def mended_note(ids: Sequence[str], waits: Sequence[MissingWait], *, partly: bool) -> str:
    """That what other findings lack mends this one, too, or some of its pairs."""
    what, do = ("wait", "mends") if len(waits) == 1 else ("waits", "mend")
    lack = "lacks" if len(ids) == 1 else "lack"
    *most, last = _first_few(ids)
    who = f"{', '.join(most)} and {last}" if most else last
    this = "some of these pairs" if partly else "this"
    return f"the {what} that {who} {lack} {do} {this}, too: {'; '.join(_first_few(waits))}"


def _first_few(named: Sequence[object]) -> list[str]:
    few = [str(each) for each in named[:_MOST_NAMED]]
    return few if len(named) <= _MOST_NAMED else [*few, f"{len(named) - _MOST_NAMED:,} more"]


def _waited_for(record: RecordEvent | None, wait: WaitEvent | HostWait, info: TraceInfo) -> str:
    if record is not None:
        return lane_of(record.lane, info).name
    lanes = wait.lanes if isinstance(wait, HostWait) else ()
    return ", ".join(lane_of(lane, info).name for lane in lanes)


def _at(site: int, info: TraceInfo) -> str:
    return place(site_of(site, info))


def stream_word(lane: str) -> str:
    """The lane's name as a word in code: ``stream 3`` is ``stream_3``."""
    return "".join(letter if letter.isalnum() else "_" for letter in lane)
