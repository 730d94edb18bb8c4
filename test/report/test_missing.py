"""One wait that mends several findings is one missing edge, and is said to be."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from crosscurrent.races.causes import RaceKind
from crosscurrent.races.findings import Finding, RacingPair
from crosscurrent.report import html
from crosscurrent.report.document import Report
from crosscurrent.report.missing import num_missing, shared_waits
from crosscurrent.report.text import show


def _text(report: Report) -> str:
    stream = io.StringIO()
    show(report, Console(file=stream))
    return stream.getvalue()


def _beside(finding: Finding, **changes: Any) -> Finding:
    """Another finding, with another first access."""
    line = replace_site(finding.first.site, line=finding.first.site.line + 1)
    first = replace(finding.first, site=line, index=finding.first.index + 1)
    return replace(finding, id=f"{finding.id}-other", first=first, **changes)


def replace_site(site: Any, **changes: Any) -> Any:
    return site._replace(**changes)


def test_findings_with_one_second_line_lack_one_wait(racy: Any) -> None:
    report: Report = racy.report()
    finding = report.findings[0]
    both = finding, _beside(finding, kind=RaceKind.WRITE_AFTER_WRITE)
    assert num_missing(both) == 1
    (shared,) = shared_waits(both)
    assert shared.findings == (0, 1)
    assert shared.fix.startswith("`fetch.wait_stream(main)` before copy_ at ")
    report = replace(report, findings=both)
    for text in (_text(report), html.render(report)):
        assert "1 sync edge is missing" in text
        assert "One wait mends races 1 and 2" in text
    assert _text(report).count("race 2 of 2") == 1, "both are still shown"


def test_other_lines_and_lanes_lack_waits_of_their_own(racy: Any) -> None:
    finding = racy.report().findings[0]
    elsewhere = replace(finding.second, site=replace_site(finding.second.site, line=999))
    other_lane = replace(finding.first, lane_index=7)
    for other in (
        _beside(finding, second=elsewhere),
        replace(finding, first=other_lane),
        _beside(finding, kind=RaceKind.REUSE),
        _beside(
            finding, also=(RacingPair(kind=finding.kind, first=other_lane, second=finding.second, count=1),)
        ),
    ):
        assert shared_waits((finding, other)) == []
        assert num_missing((finding, other)) == 2


def test_a_single_finding_shares_nothing(racy: Any) -> None:
    report = racy.report()
    assert num_missing(report.findings) == 1
    assert "One wait mends" not in _text(report)
