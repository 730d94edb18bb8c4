"""How many sync edges are missing, and which single wait mends several findings.

A finding is told by its two accesses, so that nothing is hidden behind another. But a wait right before an
access covers all that was issued on the other lane so far. Findings between the same two lanes, whose
second access is in the same line, are mended by the same wait there: they lack one edge, not several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crosscurrent.races.causes import RaceKind
from crosscurrent.races.findings import Finding
from crosscurrent.races.wording import place, stream_word
from crosscurrent.report.source import short_op
from crosscurrent.trace.records import HOST


class SharedWait(NamedTuple):
    """One wait that mends several findings."""

    findings: tuple[int, ...]
    """Their positions in the list of findings."""

    fix: str
    """The wait, as a change to the program."""

    @property
    def sentence(self) -> str:
        """What mends which findings, numbered from 1 as they are shown."""
        *most, last = (str(number + 1) for number in self.findings)
        return f"One wait mends races {', '.join(most)} and {last}: {self.fix}."


def num_missing(findings: Sequence[Finding]) -> int:
    """How many edges the findings lack."""
    return len(findings) - sum(len(shared.findings) - 1 for shared in shared_waits(findings))


def shared_waits(findings: Sequence[Finding]) -> list[SharedWait]:
    """The waits that mend several findings each, in the order of the findings."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, finding in enumerate(findings):
        if _lacks_one_edge(finding):
            where = finding.first.lane_index, finding.second.lane_index, finding.second.site
            groups.setdefault(where, []).append(number)
    return [SharedWait(tuple(group), _fix(findings[group[0]])) for group in groups.values() if len(group) > 1]


def _lacks_one_edge(finding: Finding) -> bool:
    """Not a reuse, which has other cures, and nothing that lacks the same edge on further lanes."""
    lanes = finding.first.lane_index, finding.second.lane_index
    return finding.kind is not RaceKind.REUSE and all(
        (pair.first.lane_index, pair.second.lane_index) == lanes for pair in finding.also
    )


def _fix(finding: Finding) -> str:
    first, second = finding.first, finding.second
    before = f"before {short_op(second.op)} at {place(second.site)}"
    if second.lane_index == HOST:
        return f"`{stream_word(first.lane)}.synchronize()` {before}"
    return f"`{stream_word(second.lane)}.wait_stream({stream_word(first.lane)})` {before}"
