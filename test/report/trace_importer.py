"""Imports a Chrome trace by the rules of Perfetto's importer, and lists all that this would drop.

The rules, in the terms of its statistics: events are sorted by their times in whole nanoseconds (fractions
are cut off), stably. A slice has to lie within the slice that is open on its thread, or begin when that is
over (``slice_drop_overlapping_complete_event``). A flow event belongs to the slice that was begun last on its
thread when its turn comes (``flow_no_enclosing_slice``); flows are told apart by a number, with name and
category (``flow_invalid_id``, ``flow_duplicate_id``, ``flow_end_without_start``). An id that is no number is
read as hexadecimal digits. What nobody names, nobody finds: threads and processes have names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Event = dict[str, Any]


class Imported(NamedTuple):
    """What came of a trace."""

    slices: list[Event]
    flows: list[tuple[Event, Event, Event]]
    """The slice that a flow leaves, the slice that it enters, and the event that ended it."""

    dropped: list[str]
    """Everything that the importer would complain of."""


def import_trace(document: dict[str, Any]) -> Imported:
    """Import the document of a trace."""
    return _Importer().run(document["traceEvents"])


def nanoseconds(microseconds: float) -> int:
    """A time, as the importer cuts it off."""
    return int(microseconds * 1000)


class _Importer:
    def __init__(self) -> None:
        self._out = Imported([], [], [])
        self._open: dict[tuple[int, int], list[Event]] = {}
        self._begun: dict[tuple[int, str, str], Event] = {}
        self._threads: set[tuple[int, int]] = set()
        self._processes: set[int] = set()

    def run(self, events: list[Event]) -> Imported:
        for event in events:
            if event["ph"] == "M":
                self._name(event)
        timed = [event for event in events if event["ph"] != "M"]
        for event in timed:
            if not all(isinstance(event.get(key), int) and event[key] >= 0 for key in ("pid", "tid")):
                self._drop("a process or a thread without a number", event)
            if (event["pid"], event["tid"]) not in self._threads or event["pid"] not in self._processes:
                self._drop("a thread or a process without a name", event)
            if event["ts"] < 0:
                self._drop("trace_sorter_negative_timestamp_dropped", event)
        for event in sorted(timed, key=lambda event: nanoseconds(event["ts"])):
            handler = {"X": self._slice, "s": self._begin, "f": self._end}.get(event["ph"])
            if handler is None:
                self._drop("an unknown kind of event", event)
            else:
                handler(event)
        return self._out

    def _drop(self, why: str, event: Event) -> None:
        self._out.dropped.append(f"{why}: {event}")

    def _name(self, event: Event) -> None:
        if event["name"] == "thread_name" and event["args"]["name"]:
            if event["tid"] in self._processes:
                self._drop("a thread with the number of a process is taken for its main thread", event)
            self._threads.add((event["pid"], event["tid"]))
        if event["name"] == "process_name" and event["args"]["name"]:
            self._processes.add(event["pid"])

    def _slice(self, event: Event) -> None:
        start, length = nanoseconds(event["ts"]), nanoseconds(event["dur"])
        stack = self._open.setdefault((event["pid"], event["tid"]), [])
        while stack:
            top_start, top_length = nanoseconds(stack[-1]["ts"]), nanoseconds(stack[-1]["dur"])
            if top_start + top_length > start or (top_start == start and top_length == length == 0):
                break
            stack.pop()
        if length < 0 or (
            stack and start + length > nanoseconds(stack[-1]["ts"]) + nanoseconds(stack[-1]["dur"])
        ):
            self._drop("slice_drop_overlapping_complete_event", event)
            return
        stack.append(event)
        self._out.slices.append(event)

    def _flow(self, event: Event) -> tuple[tuple[int, str, str], Event] | None:
        try:
            number = event["id"] if isinstance(event["id"], int) else int(event["id"], 16)
        except ValueError:
            self._drop("flow_invalid_id", event)
            return None
        stack = self._open.get((event["pid"], event["tid"]))
        if not stack:
            self._drop("flow_no_enclosing_slice", event)
            return None
        return (number, event["cat"], event["name"]), stack[-1]

    def _begin(self, event: Event) -> None:
        found = self._flow(event)
        if found is not None and self._begun.setdefault(*found) is not found[1]:
            self._drop("flow_duplicate_id", event)

    def _end(self, event: Event) -> None:
        found = self._flow(event)
        if found is None:
            return
        if event.get("bp") != "e":
            self._drop("a flow that ends at the next slice, and not at the one around it", event)
        elif found[0] not in self._begun:
            self._drop("flow_end_without_start", event)
        else:
            self._out.flows.append((self._begun[found[0]], found[1], event))
