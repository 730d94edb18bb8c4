"""A profile of a real GPU as a timeline: what ``torch.profiler`` exports as a Chrome trace.

What is read of it, and nothing else:

- ``kernel``, ``gpu_memcpy``, ``gpu_memset``: what ran on which device and stream, and when. The name of
  a copy says where its bytes went (``Memcpy HtoD (Pinned -> Device)``).
- ``cuda_runtime``, ``cuda_driver``: the calls of the host; a call and what it launched share their
  ``correlation``.
- ``cuda_sync``: which stream waited for which recording (``enable_cuda_sync_events``). Without these there
  are no makespans.
- ``cpu_op``: the op around a call, which says what kind of wait it was, and call sites, as ``profile``
  writes them.
- ``user_annotation``: the piece of the run that counts.

Calls of several threads are taken in the order of their times.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from crosscurrent.report.costs import Direction
from crosscurrent.report.makespan import Mark, Step, Stop, Wait, Work
from crosscurrent.report.overlap import Activity, Blocked, Timeline
from crosscurrent.trace.records import Site

SITE_PREFIX: Final = "crosscurrent site "
"""Of annotations that name a call site: ``crosscurrent site FILE:LINE:FUNCTION``, quoted as in a URL."""

RUN: Final = "crosscurrent run"
"""The annotation around what is to be looked at; calls outside of it (the profiler's own) do not count."""

_PLAIN = "/ !#$&'()*+,:;<=>?@[]^`{|}"
"""What is not quoted in them: printable ASCII, but what means something in JSON or in quoting itself."""

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALL_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
_BLOCKING = {
    "cudaDeviceSynchronize": "device synchronize",
    "cuCtxSynchronize": "device synchronize",
    "cudaStreamSynchronize": "stream synchronize",
    "cuStreamSynchronize": "stream synchronize",
    "cudaEventSynchronize": "event synchronize",
    "cuEventSynchronize": "event synchronize",
    "cudaMemcpy": "blocking copy",
    "cudaMalloc": "allocation of device memory",
    "cudaFree": "release of device memory",
    "cudaHostAlloc": "allocation of pinned memory",
    "cudaMallocHost": "allocation of pinned memory",
    "cudaHostRegister": "allocation of pinned memory",
    "cudaFreeHost": "release of pinned memory",
    "cudaHostUnregister": "release of pinned memory",
}
_ITEM_OPS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})
_SHAPE_OPS = frozenset(
    {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"}
)
_COPY_OPS = frozenset({"aten::copy_", "aten::_to_copy"})


class _Launch(NamedTuple):
    """A call of the host, and what is known of where it came from."""

    name: str
    start: int
    stop: int
    correlation: int
    site: Site | None
    ops: tuple[str, ...]
    """The ops around it, outermost first."""


@dataclass(slots=True)
class _Streams:
    """Numbers the streams of a profile as lanes, from 1."""

    lanes: dict[tuple[int, int], int] = field(default_factory=dict)

    def lane(self, device: int, stream: int) -> int:
        return self.lanes.setdefault((device, stream), 1 + len(self.lanes))


def read(path: Path) -> Timeline:
    """The timeline of an exported profile (``.json`` or ``.json.gz``).

    Raises:
        ValueError: the file is no Chrome trace.
    """
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; export it with profile.export_chrome_trace") from error
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{path} has no 'traceEvents'; export it with profile.export_chrome_trace")
    return timeline_of_events(events)


def timeline_of_events(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """The timeline of the events of a Chrome trace."""
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    zero = min((event["ts"] for event in complete), default=0)
    launches = _launches(complete, zero)
    by_correlation = {launch.correlation: launch for launch in launches}
    run = next((_span(event, zero) for event in complete if _is_run(event)), None)
    activities: list[Activity] = []
    correlations: list[int] = []
    streams = _Streams()
    for event in complete:
        if event.get("cat") in _DEVICE_CATEGORIES:
            activities.append(_activity(event, zero, by_correlation))
            correlations.append(event["args"].get("correlation", -1))
            streams.lane(activities[-1].device, event["args"].get("stream", 0))
    within = [launch for launch in launches if run is None or run[0] <= launch.start < run[1]]
    launched: dict[int, list[Activity]] = {}  # a graph launches many things at once
    for correlation, activity in zip(correlations, activities, strict=True):
        launched.setdefault(correlation, []).append(activity)
    program, waits = _program(complete, launches, launched, streams)
    start, stop = run or (
        min((activity.start for activity in activities), default=0),
        max((activity.stop for activity in activities), default=0),
    )
    return Timeline(
        activities=activities,
        blocked=[
            Blocked(launch.start, launch.stop, kind, launch.site)
            for launch in within
            if (kind := _blocking_kind(launch, launched.get(launch.correlation, []))) is not None
        ],
        start=start,
        stop=stop,
        program=program,
        waits=waits,
    )


def _span(event: Mapping[str, Any], zero: float) -> tuple[int, int]:
    """In nanoseconds from the first event on; a Chrome trace has microseconds with three decimals."""
    start = round((event["ts"] - zero) * 1000)
    return start, start + round(event["dur"] * 1000)


def _is_run(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and event.get("name") == RUN


def _launches(events: Sequence[Mapping[str, Any]], zero: float) -> list[_Launch]:
    """The calls of the host in order, each with the ops and annotations around it on its thread."""
    threads: dict[object, list[tuple[int, int, Mapping[str, Any]]]] = {}
    for event in events:
        if event.get("cat") in _CALL_CATEGORIES or event.get("cat") == "cpu_op":
            start, stop = _span(event, zero)
            threads.setdefault((event.get("pid"), event.get("tid")), []).append((start, -stop, event))
    launches: list[_Launch] = []
    for thread in threads.values():
        thread.sort(key=lambda item: item[:2])
        around: list[tuple[int, Mapping[str, Any]]] = []
        for start, minus_stop, event in thread:
            while around and around[-1][0] <= start:
                around.pop()
            if event["cat"] in _CALL_CATEGORIES:
                launches.append(_launch(event, start, -minus_stop, [outer for _, outer in around]))
            else:
                around.append((-minus_stop, event))
    launches.sort(key=lambda launch: launch.start)
    return launches


def _launch(event: Mapping[str, Any], start: int, stop: int, around: list[Mapping[str, Any]]) -> _Launch:
    site = next(
        (site_of(outer["name"]) for outer in reversed(around) if outer["name"].startswith(SITE_PREFIX)), None
    )
    ops = tuple(outer["name"] for outer in around)
    return _Launch(event["name"], start, stop, event.get("args", {}).get("correlation", -1), site, ops)


def annotation_of(site: Site) -> str:
    """The annotation that names a call site. The profiler knows no name that is not ASCII."""
    text = f"{site.file}:{site.line}:{site.function}"
    return SITE_PREFIX + quote(text, safe=_PLAIN, errors="surrogateescape")


def site_of(annotation: str) -> Site:
    """The call site that an annotation names."""
    text = unquote(annotation.removeprefix(SITE_PREFIX), errors="surrogateescape")
    file, line, function = text.rsplit(":", 2)
    return Site(file, int(line), function)


def _activity(event: Mapping[str, Any], zero: float, launches: Mapping[int, _Launch]) -> Activity:
    arguments = event["args"]
    start, stop = _span(event, zero)
    launch = launches.get(arguments.get("correlation", -1))
    device, stream = arguments.get("device", 0), arguments.get("stream", 0)
    # The few bytes of an ``item`` go to pageable memory, too, but pinning something does not help there.
    reads_value = launch is not None and not _ITEM_OPS.isdisjoint(launch.ops)
    direction = _direction(event["name"]) if event["cat"] == "gpu_memcpy" else None
    return Activity(
        start,
        stop,
        device,
        f"GPU {device} stream {stream}",
        event["name"],
        direction,
        arguments.get("bytes", 0) if direction is not None else 0,
        launch.site if launch is not None else None,
        direction is not None and "Pageable" in event["name"] and not reads_value,
    )


def _direction(name: str) -> Direction | None:
    if "HtoD" in name:
        return Direction.HOST_TO_DEVICE
    if "DtoH" in name:
        return Direction.DEVICE_TO_HOST
    return Direction.PEER if "PtoP" in name else None


def _blocking_kind(launch: _Launch, launched: Sequence[Activity]) -> str | None:
    """What kind of wait a call was; None for one that lets the host go on."""
    kind = _BLOCKING.get(launch.name)
    if kind is None:
        is_staged = "emcpy" in launch.name and any(activity.pageable for activity in launched)
        return "pageable copy" if is_staged else None
    if "synchronize" in kind:
        if not _ITEM_OPS.isdisjoint(launch.ops):
            return "item"
        if not _SHAPE_OPS.isdisjoint(launch.ops):
            return "data-dependent shape"
        if not _COPY_OPS.isdisjoint(launch.ops):
            return "blocking copy"
    return kind


def _program(
    events: Sequence[Mapping[str, Any]],
    launches: Sequence[_Launch],
    launched: Mapping[int, Sequence[Activity]],
    streams: _Streams,
) -> tuple[list[Step] | None, list[tuple[str, Site | None] | None]]:
    """The calls of the host as a program to play; None for a profile without sync events."""
    syncs, marks = _syncs(events, streams)
    if not syncs:
        return None, []
    steps: list[Step] = []
    waits: list[tuple[str, Site | None] | None] = []
    waiting = dict(launched)  # a call of the runtime and the call of the driver in it share a correlation
    for launch in launches:
        if launch.correlation in marks:
            steps.append(Mark(marks[launch.correlation], launch.correlation))
            waits.append(None)
        elif launch.correlation in syncs:
            steps.append(_sync_step(syncs[launch.correlation], streams))
            waits.append((_blocking_kind(launch, []) or "wait_event", launch.site))
        for activity in sorted(waiting.pop(launch.correlation, []), key=lambda activity: activity.start):
            lane = _lane_of(activity, streams)
            kind = "kernels" if activity.direction is None else f"copies, {activity.direction.value}"
            steps.append(Work(lane, activity.stop - activity.start, 0, kind))
            waits.append(None)
            if activity.pageable and activity.direction is Direction.DEVICE_TO_HOST:
                steps.append(Stop(None, (lane,)))
                waits.append(("pageable copy", launch.site))
    return steps, waits


def _syncs(
    events: Sequence[Mapping[str, Any]], streams: _Streams
) -> tuple[dict[int, Mapping[str, Any]], dict[int, int]]:
    """The sync event of each call that waits; and of each call that recorded an event, the lane."""
    syncs: dict[int, Mapping[str, Any]] = {}
    marks: dict[int, int] = {}
    for event in events:
        if event.get("cat") == "cuda_sync":
            arguments = event["args"]
            syncs[arguments.get("correlation", -1)] = event
            recorded = arguments.get("wait_on_cuda_event_record_corr_id", -1)
            if recorded >= 0 and arguments.get("wait_on_stream", -1) >= 0:
                marks[recorded] = streams.lane(arguments.get("device", 0), arguments["wait_on_stream"])
    return syncs, marks


def _lane_of(activity: Activity, streams: _Streams) -> int:
    return streams.lane(activity.device, int(activity.stream.rpartition(" ")[2]))


def _sync_step(event: Mapping[str, Any], streams: _Streams) -> Step:
    arguments = event["args"]
    recorded = arguments.get("wait_on_cuda_event_record_corr_id", -1)
    name = event["name"]
    if "Wait" in name:
        return Wait(streams.lane(arguments.get("device", 0), arguments.get("stream", 0)), recorded)
    if "Event" in name:
        return Stop(recorded, ())
    if "Stream" in name:
        return Stop(None, (streams.lane(arguments.get("device", 0), arguments.get("stream", 0)),))
    return Stop(None, tuple(streams.lanes.values()))
