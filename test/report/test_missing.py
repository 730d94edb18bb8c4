"""One wait that mends several findings is one missing edge, and is said to be."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from crosscurrent.races.causes import RaceKind
from crosscurrent.races.findings import Finding
from crosscurrent.races.wording import MissingWait
from crosscurrent.report import html
from crosscurrent.report.document import Report
from crosscurrent.report.missing import num_missing, shared_waits
from crosscurrent.report.text import show
from crosscurrent.trace.records import Lane, Site


def _text(report: Report) -> str:
    stream = io.StringIO()
    show(report, Console(file=stream))
    return stream.getvalue()


def _beside(finding: Finding, **changes: Any) -> Finding:
    """Another finding, with another first access."""
    line = replace_site(finding.first.site, line=finding.first.site.line + 1)
    first = replace(finding.first, site=line, index=finding.first.index + 1)
    return replace(finding, id=f"{finding.id}-other", first=first, **changes)


def _elsewhere(finding: Finding) -> MissingWait:
    """The same wait, in another line."""
    (wait,) = finding.lacks
    return wait._replace(site=Site("other.py", 1, "step"))


def replace_site(site: Any, **changes: Any) -> Any:
    return site._replace(**changes)


def test_findings_with_one_second_line_lack_one_wait(racy: Any) -> None:
    report: Report = racy.report()
    finding = report.findings[0]
    both = finding, _beside(finding, kind=RaceKind.WRITE_AFTER_WRITE)
    assert num_missing(both) == 1
    (shared,) = shared_waits(both)
    assert shared.findings == (0, 1)
    (wait,) = shared.waits
    assert str(wait).startswith("`fetch.wait_stream(main)` before aten.copy_.default at ")
    assert "mends races 1 and 2: `fetch.wait_stream(main)` before copy_ at " in shared.sentence
    report = replace(report, findings=both)
    for text in (_text(report), html.render(report)):
        assert "1 sync edge is missing" in text
        assert "One wait mends races 1 and 2" in text
    assert _text(report).count("race 2 of 2") == 1, "both are still shown"


def test_other_waits_are_edges_of_their_own(racy: Any) -> None:
    finding = racy.report().findings[0]
    for other in (
        _beside(finding, lacks=(_elsewhere(finding),)),
        _beside(
            finding, kind=RaceKind.REUSE, lacks=(), takes_care=True
        ),  # it takes a longer life of the memory
    ):
        assert shared_waits((finding, other)) == []
        assert num_missing((finding, other)) == 2


def test_what_another_wait_mends_lacks_no_edge(racy: Any) -> None:
    finding = racy.report().findings[0]
    after = _beside(finding, lacks=(), helpers=finding.lacks)
    assert num_missing((finding, after)) == 1
    assert [shared.findings for shared in shared_waits((finding, after))] == [(0, 1)]


def test_what_two_waits_mend_together_is_mended_by_none_alone(racy: Any) -> None:
    finding = racy.report().findings[0]
    other = replace(finding, id="other", lacks=(_elsewhere(finding),))
    last = _beside(finding, lacks=(), helpers=finding.lacks + other.lacks)
    assert num_missing((finding, other, last)) == 2
    assert shared_waits((finding, other, last)) == []


def test_waits_in_one_line_on_several_lanes_are_one_edge(racy: Any) -> None:
    finding = racy.report().findings[0]
    store = finding.lacks[0]._replace(second=Lane(3, "store"))
    both = replace(finding, id="both", lacks=(*finding.lacks, store))
    assert num_missing((finding, both)) == num_missing((both,)) == 1
    (shared,) = shared_waits((finding, both))
    assert shared.findings == (0, 1)
    assert shared.sentence.startswith("One wait, on each of its streams, mends races 1 and 2: `")
    assert len(shared.waits) == 2


def test_the_wait_that_mends_most_is_named_first(racy: Any) -> None:
    finding = racy.report().findings[0]
    few = replace(finding, id="few", lacks=(_elsewhere(finding),))
    findings = (
        few,
        _beside(few, lacks=(), helpers=few.lacks),
        finding,
        *(replace(finding, id=f"after {number}", lacks=(), helpers=finding.lacks) for number in range(2)),
    )
    assert [shared.findings for shared in shared_waits(findings)] == [(2, 3, 4), (0, 1)]


def test_a_single_finding_shares_nothing(racy: Any) -> None:
    report = racy.report()
    assert num_missing(report.findings) == 1
    assert "One wait mends" not in _text(report)


def test_waits_of_one_finding_in_two_lines_are_two_edges(racy: Any) -> None:
    finding = racy.report().findings[0]
    both = replace(finding, id="both", lacks=(*finding.lacks, _elsewhere(finding)))
    assert num_missing((both,)) == num_missing((finding, both)) == 2
    assert shared_waits((finding, both)) == []


def test_what_takes_a_wait_of_its_own_as_well_is_not_mended_by_another(racy: Any) -> None:
    finding = racy.report().findings[0]
    mixed = _beside(finding, lacks=(_elsewhere(finding),), helpers=finding.lacks)
    assert num_missing((finding, mixed)) == 2
    assert shared_waits((finding, mixed)) == []
