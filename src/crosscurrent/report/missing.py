"""How many sync edges are missing, and which single wait mends several findings.

A finding is told by its two accesses, so that nothing is hidden behind another. But a wait right before an
access covers all that was issued on the other lane so far, and all that this lane had waited for, and who
waits for the waiter later is served, too: where one link of a chain is missing there is a race at each of
those that follow. Findings that lack the same wait lack one edge, and those that the waits of others mend
lack none of their own. What one finding lacks at one place, on several streams, is one edge as well; at two
places it is two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crosscurrent.races.findings import Finding
from crosscurrent.races.wording import MissingWait
from crosscurrent.report.wording import readable


class SharedWait(NamedTuple):
    """One wait that mends several findings, or one on each of several streams."""

    findings: tuple[int, ...]
    """Their positions in the list of findings."""

    waits: tuple[MissingWait, ...]
    """The wait; several where the same is missing on several streams."""

    @property
    def sentence(self) -> str:
        """What mends which findings, numbered from 1 as they are shown."""
        *most, last = (str(number + 1) for number in self.findings)
        one = "One wait mends" if len(self.waits) == 1 else "One wait, on each of its streams, mends"
        fixes = "; ".join(readable(str(wait)) for wait in self.waits)
        return f"{one} races {', '.join(most)} and {last}: {fixes}."


def num_missing(findings: Sequence[Finding]) -> int:
    """How many edges the findings lack: if they are there, no race is left."""
    alone = sum(finding.takes_care or not _takes(finding) for finding in findings)
    return alone + len(_edges(findings))


def shared_waits(findings: Sequence[Finding]) -> list[SharedWait]:
    """The waits that mend several findings each, the one that mends most first."""
    edges = _edges(findings)
    holders: dict[MissingWait, list[int]] = {}
    for position, edge in enumerate(edges):
        for wait in edge:
            holders.setdefault(wait, []).append(position)
    mended: list[list[int]] = [[] for _ in edges]
    for number, finding in enumerate(findings):
        takes = _takes(finding)
        if takes and not finding.takes_care:
            for position in holders[takes[0]]:
                if set(takes) <= edges[position].keys():
                    mended[position].append(number)
    shared = [
        SharedWait(tuple(numbers), tuple(edge))
        for edge, numbers in zip(edges, mended, strict=True)
        if len(numbers) > 1
    ]
    return sorted(shared, key=lambda each: -len(each.findings))


def _takes(finding: Finding) -> tuple[MissingWait, ...]:
    return finding.lacks + finding.helpers


def _edges(findings: Sequence[Finding]) -> list[dict[MissingWait, None]]:
    """The waits that the findings take; those that one of them lacks at one place are together."""
    sets: list[dict[MissingWait, None]] = []
    for finding in findings:
        places: dict[object, dict[MissingWait, None]] = {}
        for wait in finding.lacks:
            places.setdefault(wait.place, {})[wait] = None
        sets += places.values()
    # The largest first, so that those within others add nothing.
    sets.sort(key=len, reverse=True)
    # A finding that is told without those whose waits mend it takes these, too.
    sets += [{wait: None} for finding in findings for wait in finding.helpers]
    edges = []
    covered: set[MissingWait] = set()
    for waits in sets:
        if not covered.issuperset(waits):
            covered.update(waits)
            edges.append(waits)
    return edges
