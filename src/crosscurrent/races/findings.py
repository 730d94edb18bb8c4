"""What the detector says: races, each cause once, in words that name the fix.

The detector hands over *causes*: pairs of accesses that share their kind, lanes, ops and call sites.
``findings_of`` turns them into findings, where one finding is one missing edge:

- A pair of ops that conflicts in several ways (both change a tensor in place, say) is one finding,
  of the kind that says most: read-after-write before write-after-write before write-after-read.
- Causes of one kind between the same two lanes that a single edge would repair are one finding. An
  edge is a moment in issue order: work issued on the first lane before it comes before work issued
  on the second lane after it. A cause spans the time from its first access to its second, so the
  fewest moments that stab all spans are the missing edges, and a greedy sweep finds them.
- What may reuse a freed block while one lane still uses it is one finding, for all blocks that were
  allocated in one line; whatever reuses them.
- Findings with the same two lines in their headlines, on other lanes, are one.

All pairs that a finding stands for are in ``also``: nothing is merged out of sight. Where the waits that
other findings lack mend one, or some of its pairs, it says so.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from crosscurrent.races.causes import Cause, LackedWait, RaceKind
from crosscurrent.races.wording import (
    MissingWait,
    fix_for,
    in_names,
    lane_of,
    mended_note,
    missing_edge,
    notes_on,
    place,
    site_of,
)
from crosscurrent.trace.records import HOST, Access, MemoryKind, Op, Site, TraceInfo

_RANK = {kind: rank for rank, kind in enumerate(RaceKind)}

_SHORT = {
    RaceKind.READ_AFTER_WRITE: "raw",
    RaceKind.WRITE_AFTER_WRITE: "waw",
    RaceKind.WRITE_AFTER_READ: "war",
    RaceKind.REUSE: "reuse",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RacingAccess:
    """One side of a race."""

    op: str
    lane: str
    lane_index: int
    index: int
    """The position of the op in the trace."""

    site: Site
    write: bool
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    """The bytes touched, within the block: ``start <= byte < stop`` (strided accesses skip some)."""

    block: int

    def __str__(self) -> str:
        does = "writes" if self.write else "reads"
        return f"{self.op} on {self.lane} {does} it at {place(self.site)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RacingPair:
    """A further pair that the same missing edge leaves unordered."""

    kind: RaceKind
    first: RacingAccess
    second: RacingAccess
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One missing edge, and the racing accesses that show it.

    ``count`` is the number of racing pairs of ops seen, those of ``also`` included. ``certain`` is
    False only where the exact overlap of two strided regions could not be decided within its bound.
    ``witness`` and ``schedule`` are filled in by whoever reverses the pair: what changed, and the
    schedule that shows it.
    """

    id: str
    kind: RaceKind
    first: RacingAccess
    second: RacingAccess
    memory: MemoryKind
    missing: str
    fix: str
    notes: tuple[str, ...] = ()
    also: tuple[RacingPair, ...] = ()
    count: int = 1
    certain: bool = True
    freed_at: Site | None = None
    """Where the block was given back, for a reuse."""

    lacks: tuple[MissingWait, ...] = ()
    """The waits of its own that it takes; none where those of other findings mend it, or care does."""

    helpers: tuple[MissingWait, ...] = ()
    """The waits of others that it takes as well."""

    mended_by: tuple[str, ...] = ()
    """The ids of findings that lack its helpers."""

    takes_care: bool = False
    """Whether waits do not mend all of it: ``record_stream`` does, or a longer life of the memory."""

    witness: str | None = None
    schedule: str | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.kind.value} on {self.memory.value} memory [{self.id}]"
            + ("" if self.count == 1 else f", {self.count} times")
            + ("" if self.certain else " (uncertain: the overlap could not be decided)"),
            f"  first:   {self.first}",
            f"  second:  {self.second}",
            f"  missing: {self.missing}",
            f"  fix:     {self.fix}",
        ]
        lines += [f"  note:    {note}" for note in self.notes]
        lines += [
            f"  also:    {pair.kind.value}: {pair.first}; {pair.second}"
            + ("" if pair.count == 1 else f" ({pair.count} times)")
            for pair in self.also
        ]
        return "\n".join(lines)


def findings_of(causes: Iterable[Cause], info: TraceInfo) -> list[Finding]:
    """One finding for each missing edge, in the order in which the races happened."""
    groups = [group for bundle in _bundles(causes) for group in _missing_edges(bundle)]
    groups.sort(key=lambda group: (group[0].second.index, group[0].first.index, _RANK[group[0].kind]))
    findings: list[Finding] = []
    seen: dict[str, int] = {}
    merged = _by_line(groups)
    for group in merged:
        identity = _identity(group[0], info)
        times = seen[identity] = seen.get(identity, 0) + 1
        name = identity if times == 1 else f"{identity}-{times}"
        findings.append(_finding(name, group, info))
    owners = {wait: finding.id for finding in reversed(findings) for wait in finding.lacks}
    return [_with_menders(finding, owners) for finding in findings]


def _finding(name: str, group: Sequence[Cause], info: TraceInfo) -> Finding:
    head = group[0]
    lacks = _in_names(set().union(*(cause.lacks for cause in group)), info)
    helpers = _in_names(set().union(*(cause.mended_by for cause in group)), info)
    own = set(lacks)
    return Finding(
        id=name,
        kind=head.kind,
        first=_side(head.first, head.first_access, head.first_lane, info),
        second=_side(head.second, head.second_access, head.second_lane, info),
        memory=head.memory,
        missing=missing_edge(head, info),
        fix=fix_for(group, info),
        notes=tuple(notes_on(head, info)),
        also=_pairs_beside(group, info),
        count=_count(group),
        certain=any(cause.certain for cause in group),
        freed_at=site_of(head.freed.free, info) if head.freed is not None else None,
        lacks=lacks,
        helpers=tuple(wait for wait in helpers if wait not in own),
        takes_care=any(cause.lacks_care for cause in group),
    )


def _in_names(waits: Iterable[LackedWait], info: TraceInfo) -> tuple[MissingWait, ...]:
    return tuple(dict.fromkeys(in_names(wait, info) for wait in sorted(waits)))


def _with_menders(finding: Finding, owners: Mapping[MissingWait, str]) -> Finding:
    """A finding that says which others' waits mend it; of those that lack the same wait, the first."""
    # A finding that is told alone names none that is not there.
    if not finding.helpers or finding.takes_care or not owners.keys() >= set(finding.helpers):
        return finding
    ids = tuple(dict.fromkeys(owners[wait] for wait in finding.helpers))
    note = mended_note(ids, finding.helpers, partly=bool(finding.lacks))
    return replace(finding, mended_by=ids, notes=(*finding.notes, note))


def _side(op: Op, access: Access, lane: int, info: TraceInfo) -> RacingAccess:
    """One side of a race, in names."""
    return RacingAccess(
        op=op.name,
        lane=lane_of(lane, info).name,
        lane_index=lane,
        index=op.index,
        site=site_of(op.site, info),
        write=access.write,
        shape=access.shape,
        dtype=access.dtype,
        start=access.region.start,
        stop=access.region.stop,
        block=access.block,
    )


def _bundles(causes: Iterable[Cause]) -> list[list[list[Cause]]]:
    """Causes that one edge might repair, as lists of pairs; a pair lists its kinds, the main one first."""
    pairs: dict[tuple[int, ...], list[Cause]] = {}
    for cause in causes:
        freed = cause.freed
        key: tuple[int, ...]
        if freed is None:
            key = (cause.first_lane, cause.second_lane, cause.first.site, cause.second.site)
        else:
            key = (cause.first_lane, freed.owner, freed.allocated)
        pairs.setdefault(key, []).append(cause)
    bundles: dict[tuple[object, ...], list[list[Cause]]] = {}
    for key, pair in pairs.items():
        head = min(pair, key=lambda cause: _RANK[cause.kind])
        if head.freed is not None:
            # The nearest reuse and the last use say most; of these, a write more than a read.
            pair.sort(key=lambda each: (each.second.index, -each.first.index, not each.first_access.write))
            bundles[key] = [pair]
        else:
            pair.sort(key=lambda each: (_RANK[each.kind], each.second.index, each.first.index))
            bundles.setdefault((head.kind, head.first_lane, head.second_lane), []).append(pair)
    return list(bundles.values())


def _missing_edges(pairs: list[list[Cause]]) -> list[list[Cause]]:
    """The pairs, grouped by the fewest edges that repair them; each group starts with its headline."""
    spans = sorted(pairs, key=lambda pair: pair[0].second.index)
    groups: list[list[list[Cause]]] = []
    edge = -1
    for pair in spans:
        # The next edge goes as late as it may: right before the first access that needs it.
        if pair[0].first.index < edge:
            groups[-1].append(pair)
        else:
            edge = pair[0].second.index
            groups.append([pair])
    result = []
    for group in groups:
        # The headline is the tightest pair: the earliest second access, the latest first one.
        group.sort(key=lambda pair: (pair[0].second.index, -pair[0].first.index))
        result.append([cause for pair in group for cause in pair])
    return result


def _by_line(groups: list[list[Cause]]) -> list[list[Cause]]:
    """Groups whose headlines are the same two lines are one: a loop over streams lacks its edge on each."""
    merged: dict[tuple[RaceKind, int, int, MemoryKind], list[Cause]] = {}
    for group in groups:
        head = group[0]
        merged.setdefault((head.kind, head.first.site, head.second.site, head.memory), []).extend(group)
    return list(merged.values())


def _count(group: Sequence[Cause]) -> int:
    """Pairs of ops: one that conflicts in several ways, or in several memories, counts once."""
    ways: dict[tuple[object, ...], int] = {}
    for cause in group:
        first = (cause.first_lane, cause.first.site, cause.first.name)
        pair = (first, cause.second_lane, cause.second.site, cause.second.name)
        ways[pair] = max(ways.get(pair, 0), cause.count)
    return sum(ways.values())


def _identity(cause: Cause, info: TraceInfo) -> str:
    """A name for the cause that the next run gives it, too: no addresses, and no numbers that vary."""
    words = [cause.kind.value]
    for op, lane in ((cause.first, cause.first_lane), (cause.second, cause.second_lane)):
        site = site_of(op.site, info)
        role = "host" if lane == HOST else "stream"
        # Only the file's name: where a program was checked out and from where it was started may vary.
        words += [role, op.name, os.path.basename(site.file), str(site.line), site.function]
    digest = hashlib.blake2b("\0".join(words).encode(), digest_size=5).hexdigest()
    return f"{_SHORT[cause.kind]}-{digest}"


def _pairs_beside(group: Sequence[Cause], info: TraceInfo) -> tuple[RacingPair, ...]:
    """The pairs of a group other than its headline."""
    return tuple(
        RacingPair(
            kind=cause.kind,
            first=_side(cause.first, cause.first_access, cause.first_lane, info),
            second=_side(cause.second, cause.second_access, cause.second_lane, info),
            count=cause.count,
        )
        for cause in group[1:]
    )
