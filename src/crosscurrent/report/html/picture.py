"""The lanes around a race, drawn: time runs downwards, one column a lane.

``scene`` chooses what is shown. Records that are left out are counted where they are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crosscurrent.races.findings import Finding
from crosscurrent.report.html.markup import Markup, element, joined
from crosscurrent.report.html.scene import Scene, holds
from crosscurrent.report.source import short_op, short_place
from crosscurrent.trace.records import (
    HOST,
    Alloc,
    Free,
    HostWait,
    Op,
    Record,
    RecordEvent,
    Site,
    TraceInfo,
    WaitEvent,
)

LANES = 4
"""Columns drawn for one finding, at most."""

COLUMN, ROW, TOP, GAP, BOX = 148, 50, 44, 26, 36


@dataclass(slots=True)
class _Row:
    """One record, or (``record`` None) a number of records that are left out."""

    record: Record | None
    lane: int = HOST
    title: str = ""
    detail: str = ""
    kind: str = "op"
    skipped: int = 0
    y: int = 0


def picture(finding: Finding, records: Sequence[Record], info: TraceInfo) -> Markup:
    """The drawing for one finding, as SVG."""
    rows = _rows(finding, records, info)
    lanes = sorted({row.lane for row in rows if row.record is not None})
    names = {finding.first.lane_index: finding.first.lane, finding.second.lane_index: finding.second.lane}
    for lane in info.lanes:
        names.setdefault(lane.index, lane.name)
    column = {lane: 10 + COLUMN // 2 + i * COLUMN for i, lane in enumerate(lanes)}
    y = TOP
    for row in rows:
        step = ROW if row.record is not None else GAP
        row.y = y + step // 2
        y += step
    width, height = 20 + COLUMN * len(lanes), y + 8
    racing = (finding.first.lane_index, finding.second.lane_index)
    return element(
        "svg",
        [_lane(column[lane], names.get(lane, f"lane {lane}"), height, lane in racing) for lane in lanes],
        _edges(rows, column),
        [_draw(row, column) for row in rows],
        _missing(finding, rows, column),
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=finding.missing,
        class_="lanes",
    )


def _rows(finding: Finding, records: Sequence[Record], info: TraceInfo) -> list[_Row]:
    sides = (finding.first, finding.second)
    if not all(holds(records, side.index) for side in sides):
        return [_row(Op(side.index, side.lane_index, side.op, -1, ()), finding, info) for side in sides]
    scene = Scene(finding, records)
    lanes = {side.lane_index for side in sides}
    rows: list[_Row] = []
    previous: Record | None = None
    for record in scene.chosen:
        row = _row(record, finding, info)
        if row.lane not in lanes and len(lanes) == LANES:
            continue
        lanes.add(row.lane)
        if previous is not None and (skipped := scene.left_out(previous, record)):
            rows.append(_Row(None, skipped=skipped))
        rows.append(row)
        previous = record
    return rows


def _row(record: Record, finding: Finding, info: TraceInfo) -> _Row:
    for side in (finding.first, finding.second):
        if record.index == side.index:
            does = "writes" if side.write else "reads"
            detail = f"{does}, {short_place(side.site)}"
            return _Row(record, side.lane_index, short_op(side.op), detail, "racing")
    where = short_place(_site(record, info))
    match record:
        case Op(lane=lane, name=name):
            return _Row(record, lane, short_op(name), where)
        case RecordEvent(lane=lane):
            return _Row(record, lane, "record", where, "sync")
        case WaitEvent(lane=lane, via=via):
            return _Row(record, lane, via, where, "sync")
        case HostWait(kind=kind):
            return _Row(record, HOST, kind, where, "sync")
        case Alloc(lane=lane):
            return _Row(record, lane, "allocated", where, "memory")
        case Free():
            return _Row(record, HOST, "freed", where, "memory")
    raise AssertionError(f"{record} is never drawn")


def _site(record: Record, info: TraceInfo) -> Site:
    return info.site_at(getattr(record, "site", -1)) or Site("?", 0, "?")


def _lane(x: int, name: str, height: int, racing: bool) -> Markup:
    return element(
        "g",
        element("line", x1=x, y1=34, x2=x, y2=height - 4, class_="lifeline"),
        element("rect", x=x - COLUMN // 2 + 6, y=4, width=COLUMN - 12, height=28, rx=14, class_="head"),
        element("text", _cut(name, 18), x=x, y=23, class_="lane-name"),
        class_="lane racing" if racing else "lane",
    )


def _draw(row: _Row, column: dict[int, int]) -> Markup:
    if row.record is None:
        noun = "record" if row.skipped == 1 else "records"
        x = min(column.values())
        return element(
            "g",
            element("rect", x=x - COLUMN // 2 + 4, y=row.y - 9, width=COLUMN - 8, height=18),
            element("text", f"{row.skipped:,} {noun} not shown", x=x, y=row.y + 4),
            class_="gap",
        )
    x = column[row.lane]
    half = COLUMN // 2 - 8
    if row.kind == "sync":
        return element(
            "g",
            element("rect", x=x - half, y=row.y - 15, width=2 * half, height=30, rx=15, class_="back"),
            element("circle", cx=x - half + 14, cy=row.y, r=4),
            element("text", _cut(row.title, 14), x=x - half + 24, y=row.y - 2, class_="title start"),
            element("text", _cut(row.detail, 17), x=x - half + 24, y=row.y + 10, class_="detail start"),
            class_="sync",
        )
    return element(
        "g",
        element("rect", x=x - half, y=row.y - BOX // 2, width=2 * half, height=BOX, rx=6, class_="back"),
        element("text", _cut(row.title, 16), x=x, y=row.y - 2, class_="title"),
        element("text", _cut(row.detail, 21), x=x, y=row.y + 12, class_="detail"),
        class_=row.kind,
    )


def _edges(rows: Sequence[_Row], column: dict[int, int]) -> Markup:
    """Arrows from where an event was recorded to where it was waited for, if both are drawn."""
    drawn = {row.record.event: row for row in rows if isinstance(row.record, RecordEvent)}
    arrows: list[Markup] = []
    for row in rows:
        wait = row.record
        if isinstance(wait, WaitEvent | HostWait) and wait.event in drawn:
            arrows.append(_arrow(drawn[wait.event], row, column, "edge"))
        elif isinstance(wait, HostWait) and wait.event is None:
            for lane in wait.lanes:
                before = [
                    other
                    for other in rows
                    if other.record is not None and other.lane == lane and other.y < row.y
                ]
                if before:
                    arrows.append(_arrow(before[-1], row, column, "edge"))
    return joined(arrows)


def _missing(finding: Finding, rows: Sequence[_Row], column: dict[int, int]) -> Markup:
    ends = {row.record.index: row for row in rows if row.record is not None}
    first, second = ends[finding.first.index], ends[finding.second.index]
    return _arrow(first, second, column, "missing")


def _arrow(source: _Row, target: _Row, column: dict[int, int], kind: str) -> Markup:
    half = COLUMN // 2 - 8
    x1, x2 = column[source.lane], column[target.lane]
    if x1 == x2:  # two queues of one name cannot be; a wait drawn on its own lane can
        out = x1 + half
        path = f"M{out},{source.y} C{out + 26},{source.y} {out + 26},{target.y} {out + 7},{target.y}"
        tip, point = out + 1, -1
    else:
        right = 1 if x2 > x1 else -1
        out, into = x1 + right * half, x2 - right * half
        bend = max(18, abs(into - out) // 2)
        path = (
            f"M{out},{source.y} C{out + right * bend},{source.y} "
            f"{into - right * bend},{target.y} {into - right * 7},{target.y}"
        )
        tip, point = into - right, right
    head = f"M{tip},{target.y} l{-8 * point},-4.5 v9 z"
    return element(
        "g", element("path", d=path), element("path", d=head, class_="tip"), class_=f"arrow {kind}"
    )


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "\u2026"
