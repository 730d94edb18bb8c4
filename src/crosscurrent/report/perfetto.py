"""A trace for ui.perfetto.dev: lanes as threads, operations as slices, sync edges and races as flows.

The format is the JSON of Chrome's tracing, which Perfetto reads. The times are those of the model clock:
nothing in it was measured. Each device is a process, each lane one of its threads; the host is a process
of its own. A flow is drawn from a slice to a slice: from the last operation that an edge covers to the
first that waits for it. Flows of the category ``race`` join racing pairs, from the one that the model clock
has first.

What Perfetto's importer asks for, and else drops in silence: flows are told apart by a number; a flow event
belongs to the slice that was begun last on its thread, so it comes right after its slice in the file, too; a
flow begins before it ends; times are cut off to nanoseconds; numbers of threads are none of processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosscurrent.files import in_one_act
from crosscurrent.report.document import Report
from crosscurrent.report.slices import Slice, Slices, slices_of
from crosscurrent.report.source import place_of, shape_of
from crosscurrent.trace.records import HOST, Access, Lane, Op, TraceInfo

Event = dict[str, Any]

FIRST_THREAD = 1_000
"""The number of the host's thread; above those of all processes, of which there is one for each device."""


def write(report: Report, path: Path) -> None:
    """Write the trace in one act.

    Raises:
        ValueError: the report has no trace; keep it with ``watch(trace=True)``.
    """
    if not report.records:
        raise ValueError("this report has no trace to write; keep it with crosscurrent.watch(trace=True)")
    with in_one_act(path) as partial:
        partial.write_text(render(report), encoding="utf-8")


def render(report: Report) -> str:
    """The trace as text."""
    drawing = slices_of(report.records, report.info, report.rates, report.findings)
    document = {
        "traceEvents": list(_events(drawing, report)),
        "otherData": {
            "title": report.title,
            "verdict": report.headline,
            "clock": f"model: {report.rates}",
            **dict(report.environment),
        },
    }
    return json.dumps(document, separators=(",", ":"))


def _events(drawing: Slices, report: Report) -> Iterator[Event]:
    used = {piece.lane for piece in drawing.slices}
    yield from _names([lane for lane in report.info.lanes if lane.index in used])
    ops = {record.index: record for record in report.records if isinstance(record, Op)}
    racing: dict[int, list[str]] = {}
    for race in drawing.races:
        for end in (race.first, race.second):
            racing.setdefault(end, []).append(report.findings[race.finding].id)
    flows = _flows(drawing, report)
    for position, piece in enumerate(drawing.slices):
        yield _slice(piece, ops.get(piece.record), racing.get(position, []), report.info)
        yield from flows.get(position, ())


def _flows(drawing: Slices, report: Report) -> dict[int, list[Event]]:
    """The ends of all flows, by the positions of their slices."""
    flows: dict[int, list[Event]] = {}
    for number, arrow in enumerate(drawing.arrows):
        source, target = drawing.slices[arrow.source], drawing.slices[arrow.target]
        # A flow has to begin and end within its slices; a slice does not hold its own last moment.
        start = max(source.start, source.stop - 1)
        stop = max(target.start, target.stop - 1, start) if target.wait else target.start
        shared = {"name": arrow.via, "cat": "sync", "id": number}
        flows.setdefault(arrow.source, []).append(_end("s", shared, source, start, report.info))
        flows.setdefault(arrow.target, []).append(_end("f", shared, target, stop, report.info))
    for number, race in enumerate(drawing.races, start=len(drawing.arrows)):
        kind = report.findings[race.finding].kind.value
        shared = {"name": f"race: {kind}", "cat": "race", "id": number}
        # The accesses may run in either order: in the model, the second one may well be the earlier one.
        ends = sorted((race.first, race.second), key=lambda end: (drawing.slices[end].start, end))
        for phase, end in zip("sf", ends, strict=True):
            piece = drawing.slices[end]
            flows.setdefault(end, []).append(_end(phase, shared, piece, piece.start, report.info))
    return flows


def _names(lanes: list[Lane]) -> Iterator[Event]:
    for lane in lanes:
        process = _process(lane)
        name = "host" if lane.device is None else f"cuda:{lane.device}"
        thread = {"ph": "M", "pid": process, "tid": FIRST_THREAD + lane.index}
        for kind, value in (("process_name", name), ("thread_name", lane.name)):
            yield {**thread, "name": kind, "args": {"name": value}}
        for kind, order in (("process_sort_index", process), ("thread_sort_index", lane.index)):
            yield {**thread, "name": kind, "args": {"sort_index": order}}


def _process(lane: Lane) -> int:
    return 1 if lane.device is None else 2 + lane.device


def _slice(piece: Slice, op: Op | None, findings: list[str], info: TraceInfo) -> Event:
    details: Event = {"record": piece.record, "where": _place(piece.site, info)}
    if op is not None:
        details["op"] = op.name
        for word, write in (("reads", False), ("writes", True)):
            touched = [_access(access) for access in op.accesses if access.write is write]
            if touched:
                details[word] = touched
    if findings:
        details["races"] = findings
    event = {
        "ph": "X",
        "name": piece.name,
        "cat": "wait" if piece.wait else "op",
        **_thread(piece, info),
        "ts": _microseconds(piece.start),
        "dur": _microseconds(piece.stop - piece.start),
        "args": details,
    }
    if findings:
        event["cname"] = "terrible"  # a reserved color, red
    return event


def _access(access: Access) -> str:
    where = f"block {access.block} [{access.region.start}:{access.region.stop}]"
    return f"{where} {shape_of(access.shape, access.dtype)}".rstrip()


def _end(phase: str, shared: Event, piece: Slice, moment: int, info: TraceInfo) -> Event:
    """One end of a flow, bound to the slice around it."""
    bound = {"bp": "e"} if phase == "f" else {}
    return {"ph": phase, **bound, **shared, **_thread(piece, info), "ts": _microseconds(moment)}


def _thread(piece: Slice, info: TraceInfo) -> Event:
    lane = info.lanes[piece.lane] if piece.lane < len(info.lanes) else Lane(HOST, "host")
    return {"pid": _process(lane), "tid": FIRST_THREAD + piece.lane}


def _place(site: int, info: TraceInfo) -> str:
    found = info.site_at(site)
    return "" if found is None else place_of(found)


def _microseconds(nanoseconds: int) -> float:
    """A time that is the same nanosecond again when a reader multiplies by 1000 and cuts the fraction off."""
    value = nanoseconds / 1000
    return value if int(value * 1000) == nanoseconds else math.nextafter(value, math.inf)
