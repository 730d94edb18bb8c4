"""Which waits of a trace are needed, what they protect, and which only cost time.

Each sync edge is dropped and the trace judged again: all edges of one call site together, and each
alone. If a race appears, the edge is necessary, and the race is what it protects; if none does, it is
redundant. A ``wait_stream`` counts as one edge. That each of two edges is redundant alone does not
mean that both can go: they may protect the same. ``redundant_alone`` tells such edges apart.

What was a race in the recorded trace already is nothing that an edge protects; fix the findings
first, for an edge that would protect a part of a race is not credited with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from crosscurrent.races.findings import Finding, findings_of
from crosscurrent.races.needs import skeleton_of
from crosscurrent.races.skeleton import Edge, Skeleton
from crosscurrent.races.wording import lane_of, place, site_of
from crosscurrent.trace.records import HOST, HostWait, Op, Record, RecordEvent, Site, TraceInfo


class Verdict(Enum):
    """What dropping an edge does."""

    NECESSARY = "necessary"
    REDUNDANT = "redundant"
    VALUE = "value"
    """Nothing else that the trace follows needs it, but the host gets a value by it, or pageable memory,
    and what it does with that is not followed."""

    NO_EDGE = "no edge"
    """It orders nothing: a wait for an event that nobody had recorded, or a host wait without work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The waits of one call site: needed or not, for what, and what could take their place."""

    kind: str
    """``wait_event``, ``wait_stream``, or the kind of a host wait."""

    site: Site
    waiter: str
    """The lanes that wait."""

    waited_for: str
    """The lanes whose work is waited for."""

    blocks_host: bool
    """Whether the host stands still; ``query`` orders the host without that."""

    op: str
    count: int
    """Waits made at this call site."""

    verdict: Verdict
    """Of all waits of this call site together."""

    protects: tuple[Finding, ...] = ()
    """The races that appear without them."""

    num_needed: int = 0
    """How many of the waits are needed even if all others stay."""

    needed_at: tuple[int, ...] = ()
    """The positions in the trace of those waits."""

    replacement: str = ""
    """What to write instead, for a call that makes the host wait; empty where there is nothing better."""

    @property
    def redundant_alone(self) -> int:
        """How many of the waits can go one at a time."""
        return self.count - self.num_needed

    def __str__(self) -> str:
        times = "" if self.count == 1 else f", {self.count} times"
        lines = [
            f"{self.verdict.value}: {self.kind} at {place(self.site)}: {self.waiter} waits for "
            f"{self.waited_for or 'nothing'}{times}"
        ]
        lines += [f"  protects {each.kind.value}: {each.first}; {each.second}" for each in self.protects]
        if self.replacement:
            lines.append(f"  instead:  {self.replacement}")
        return "\n".join(lines)


def advise(records: Sequence[Record], info: TraceInfo) -> list[Advice]:
    """What each wait of a trace is good for, by call site, in the order of the first wait of each.

    The work is one pass over the trace, and for each call site and each wait a pass over a part of
    its sync edges.
    """
    skeleton = skeleton_of(records)
    lanes = {record.event: record.lane for record in records if isinstance(record, RecordEvent)}
    sites: dict[tuple[int, str, bool], list[Edge]] = {}
    for edge in skeleton.edges:
        record = edge.record
        kind = record.kind if isinstance(record, HostWait) else record.via
        sites.setdefault((record.site, kind, edge.lane == HOST), []).append(edge)
    values = _values(records)
    return [_advise(skeleton, edges, lanes, values, info) for edges in sites.values()]


def _values(records: Sequence[Record]) -> set[int]:
    """The host waits that end an op which wrote nothing that the trace follows: it wrote for the host."""
    return {
        wait.index
        for op, wait in pairwise(records)
        if isinstance(wait, HostWait)
        and isinstance(op, Op)
        and op.lane in wait.lanes
        and not any(access.write for access in op.accesses)
    }


def _advise(
    skeleton: Skeleton, edges: list[Edge], lanes: dict[int, int], values: set[int], info: TraceInfo
) -> Advice:
    record = edges[0].record
    value = any(edge.record.index in values for edge in edges)
    sources = sorted({lane for edge in edges for lane in _sources(edge, lanes)})
    protects = findings_of(skeleton.broken({edge.number for edge in edges}), info)
    # Dropping fewer edges never breaks more: where all can go together, so can each.
    needed = [edge for edge in edges if protects and skeleton.broken({edge.number}, first_only=True)]
    if protects:
        verdict = Verdict.NECESSARY
    elif value:
        verdict = Verdict.VALUE
    else:
        verdict = Verdict.REDUNDANT if sources else Verdict.NO_EDGE
    return Advice(
        kind=record.kind if isinstance(record, HostWait) else record.via,
        site=site_of(record.site, info),
        waiter=", ".join(lane_of(lane, info).name for lane in sorted({edge.lane for edge in edges})),
        waited_for=", ".join(lane_of(lane, info).name for lane in sources),
        blocks_host=isinstance(record, HostWait) and record.kind != "query",
        op=record.op if isinstance(record, HostWait) else "",
        count=len(edges),
        verdict=verdict,
        protects=tuple(protects),
        num_needed=len(needed),
        needed_at=tuple(edge.record.index for edge in needed),
        replacement=_replacement(record, protects, value) if isinstance(record, HostWait) else "",
    )


def _sources(edge: Edge, lanes: dict[int, int]) -> list[int]:
    if edge.event is None:
        return [lane for lane, _ in edge.work]
    return [lanes[edge.event]] if edge.event in lanes else []


def _replacement(wait: HostWait, protects: Sequence[Finding], value: bool) -> str:
    """What could take the place of a host wait."""
    if wait.kind == "query":
        return ""
    if wait.kind == "allocation":
        return "allocate the pinned buffer once, before the loop, and use it again"
    if wait.kind == "pageable copy" and not value:
        return "put the host tensor into pinned memory and copy with `non_blocking=True`"
    if wait.kind == "strided copy":
        return "make the pinned side of the copy contiguous, so that the copy runs on its stream"
    host_side = [each for each in protects if each.second.lane_index == HOST]
    stream_side = [each for each in protects if each.second.lane_index != HOST]
    edges = "; ".join(dict.fromkeys(each.fix for each in stream_side))
    if value:
        copy = (
            "copy the value to pinned memory with `non_blocking=True`, record an event, and read it "
            "after `event.synchronize()` when it is needed, or keep the decision on the device"
        )
        return f"{copy}; and {edges}" if edges else copy
    if wait.kind == "blocking copy" and not host_side:
        return "copy with `non_blocking=True`, and pinned memory on the host's side" + (
            f"; and {edges}" if edges else ""
        )
    if host_side:
        later = (
            f"the host itself needs this: wait as late as {place(host_side[0].second.site)}, "
            "and only for an event recorded right after the work that it reads or overwrites"
        )
        return f"{later}; and {edges}" if edges else later
    return edges or "drop it: nothing that the trace follows needs it"
