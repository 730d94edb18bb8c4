"""How many sync edges are missing, and which single wait mends several findings.

A finding is told by its two accesses, so that nothing is hidden behind another. But a wait right before an
access covers all that was issued on the other lane so far, and all that this lane had waited for, and who
waits for the waiter later is served, too: where one link of a chain is missing there is a race at each of
those that follow. Findings that lack the same wait lack one edge, and those that the waits of others mend
lack none of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crosscurrent.races.findings import Finding
from crosscurrent.report.wording import readable


class SharedWait(NamedTuple):
    """One wait that mends several findings, or one on each of several streams."""

    findings: tuple[int, ...]
    """Their positions in the list of findings."""

    fixes: tuple[str, ...]
    """The wait, as a change to the program; several where the same is missing on several streams."""

    @property
    def sentence(self) -> str:
        """What mends which findings, numbered from 1 as they are shown."""
        *most, last = (str(number + 1) for number in self.findings)
        one = "One wait mends" if len(self.fixes) == 1 else "One wait, on each of its streams, mends"
        return f"{one} races {', '.join(most)} and {last}: {'; '.join(self.fixes)}."


def num_missing(findings: Sequence[Finding]) -> int:
    """How many edges the findings lack: if they are there, no race is left."""
    alone = sum(not finding.lacks and not finding.mended_by for finding in findings)
    return alone + len(_sets_of_waits(findings))


def shared_waits(findings: Sequence[Finding]) -> list[SharedWait]:
    """The waits that mend several findings each, the one that mends most first."""
    shared = []
    for waits in _sets_of_waits(findings):
        mended = _mended_by(waits, findings)
        if len(mended) > 1:
            # In the order of the finding that has them all.
            listed = next(finding.lacks for finding in findings if waits.issubset(finding.lacks))
            shared.append(SharedWait(mended, tuple(map(readable, listed))))
    return sorted(shared, key=lambda wait: -len(wait.findings))


def _sets_of_waits(findings: Sequence[Finding]) -> list[frozenset[str]]:
    """The waits of each finding that has any (on each of its lanes, say), but for those within others'."""
    distinct = list(dict.fromkeys(frozenset(finding.lacks) for finding in findings if finding.lacks))
    return [waits for waits in distinct if not any(waits < others for others in distinct)]


def _mended_by(waits: frozenset[str], findings: Sequence[Finding]) -> tuple[int, ...]:
    lacking = {finding.id for finding in findings if finding.lacks and waits.issuperset(finding.lacks)}
    return tuple(
        number
        for number, finding in enumerate(findings)
        if finding.id in lacking or (finding.mended_by and lacking.issuperset(finding.mended_by))
    )
