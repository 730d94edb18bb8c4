"""When everything would run, if only program order and sync edges held it back.

``play`` walks a program in the order in which the host issued it. Work starts as soon as

- the work before it on its lane is done,
- everything its lane was told to wait for is done, and
- the host has issued it,

and for no other reason: lanes run side by side without getting in each other's way. The last moment
is then the length of the longest chain of work and edges, the *critical path*. With ``host_is_free``
issuing costs nothing, but a host wait still holds up whatever the host issues after it: that is the
makespan that the sync edges themselves allow. All times are whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from crosscurrent.trace.records import HOST


class Work(NamedTuple):
    """Something that takes ``duration`` on its lane, and ``issue`` of the host to launch."""

    lane: int
    duration: int
    issue: int = 0
    kind: str = "kernels"
    """What it keeps busy, for totals by kind; it has no influence on when it runs."""


class Mark(NamedTuple):
    """An event recorded on a lane."""

    lane: int
    event: int


class Wait(NamedTuple):
    """A lane waits for a recording; one that was never made orders nothing."""

    lane: int
    event: int


class Stop(NamedTuple):
    """The host waits for a recording or, without one, for all work of some lanes; or for ``duration``."""

    event: int | None
    lanes: tuple[int, ...]
    duration: int = 0


Step = Work | Mark | Wait | Stop


class Run(NamedTuple):
    """What ``play`` found, by position in the program."""

    start: list[int]
    stop: list[int]
    """Of work and host waits; a mark or a wait of a lane has the moment of its issue, twice."""

    makespan: int
    path: list[int]
    """The work on the critical path, in order."""

    edges: list[int]
    """The waits through which the critical path passes from lane to lane, in order."""


class _Moment(NamedTuple):
    """A point in time, the work that ended there, and the wait (or -1) through which it is known."""

    time: int
    work: int
    edge: int


_BEGINNING = _Moment(0, -1, -1)


def play(program: Sequence[Step], *, host_is_free: bool = False, dropped: Container[int] = ()) -> Run:
    """Let a program run, without the waits at the positions ``dropped``."""
    start, stop = [0] * len(program), [0] * len(program)
    behind: list[_Moment] = [_BEGINNING] * len(program)
    lanes: dict[int, _Moment] = {}
    events: dict[int, _Moment] = {}
    host = last = _BEGINNING

    for i, step in enumerate(program):
        start[i] = stop[i] = host.time
        match step:
            case Work(lane, duration, issue, _):
                if lane == HOST:
                    behind[i] = host
                    stop[i] = host.time + duration
                    host = _Moment(stop[i], i, -1)
                else:
                    if not host_is_free:
                        host = host._replace(time=host.time + issue)
                    behind[i] = _later(lanes.get(lane, _BEGINNING), host)
                    start[i] = behind[i].time
                    stop[i] = start[i] + duration
                    lanes[lane] = _Moment(stop[i], i, -1)
                if stop[i] > last.time:
                    last = _Moment(stop[i], i, -1)
            case Mark(lane, event):
                # A recording is also an act of the host: it is not done before it was issued.
                events[event] = _later(lanes.get(lane, _BEGINNING), host)
            case Wait(lane, event) if i not in dropped and event in events:
                known = lanes.get(lane, _BEGINNING)
                if events[event].time > known.time:
                    lanes[lane] = events[event]._replace(edge=i)
            case Stop(event, awaited, duration) if i not in dropped:
                for moment in _awaited(event, awaited, events, lanes):
                    if moment.time > host.time:
                        host = moment._replace(edge=i)
                if not host_is_free:
                    host = host._replace(time=host.time + duration)
                stop[i] = host.time
    path, edges = _walk_back(last, behind)
    return Run(start, stop, max(last.time, host.time), path, edges)


def _later(lane: _Moment, host: _Moment) -> _Moment:
    return host if host.time > lane.time else lane


def _awaited(
    event: int | None, awaited: tuple[int, ...], events: dict[int, _Moment], lanes: dict[int, _Moment]
) -> list[_Moment]:
    if event is not None:
        return [events[event]] if event in events else []
    return [lanes[lane] for lane in awaited if lane in lanes]


def _walk_back(last: _Moment, behind: Sequence[_Moment]) -> tuple[list[int], list[int]]:
    path: list[int] = []
    edges: list[int] = []
    moment = last
    while moment.work >= 0:
        path.append(moment.work)
        moment = behind[moment.work]
        if moment.edge >= 0:
            edges.append(moment.edge)
    return path[::-1], edges[::-1]
