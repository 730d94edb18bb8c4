"""The page as text: what it holds, that it is well formed, and that nothing of the user's gets out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from crosscurrent.report import html
from crosscurrent.report.document import HostWaits, Report, Section, Unclear, Verdict
from crosscurrent.report.html.markup import Markup, element
from crosscurrent.report.html.timeline import MAX_ARROWS, MAX_SLICES
from crosscurrent.report.modelled import overlap_of_records
from crosscurrent.report.slices import slices_of, thinned
from crosscurrent.report.watched import report_of_overlap
from crosscurrent.trace.records import Site

HOST, MAIN, FETCH = 0, 1, 2
EVIL = "</script><script>alert('x')</script><img src=http://evil.example/x.png onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def timeline_data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="timeline-data">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def test_the_verdict_comes_first(racy: Any) -> None:
    words = Page(html.render(racy.report())).words
    order = [words.index(part) for part in ("1 race", "Findings", "Host waits", "Sync calls", "Timeline")]
    assert order == sorted(order)


def test_a_finding_has_both_sources_and_the_fix(racy: Any) -> None:
    finding = racy.report().findings[0]
    words = Page(html.render(racy.report())).words
    assert "hidden = slot @ weight" in words
    assert "slot.copy_(host, non_blocking=True)" in words
    assert finding.id in words
    assert "fetch.wait_event(event)" in words


def test_without_a_race_there_are_no_findings(ordered: Any) -> None:
    text = html.render(ordered.report())
    assert "Findings" not in Page(text).words
    assert "No race" in Page(text).words
    assert "<svg" not in text


def test_witness_values_are_shown_when_present(racy: Any) -> None:
    report = racy.report()
    assert "Witness" not in Page(html.render(report)).words
    finding = replace(report.findings[0], witness="1.25 and nan", schedule="v1:abc")
    words = Page(html.render(replace(report, findings=(finding,)))).words
    assert "Witness 1.25 and nan Schedule: v1:abc" in words
    assert "witnessed" in words


def test_the_drawing_shows_the_pair_the_edges_and_what_is_missing(racy: Any) -> None:
    text = html.render(racy.report())
    (drawing,) = re.findall(r"<svg.*?</svg>", text)
    page = Page(drawing)
    groups = [attributes.get("class") for tag, attributes in page.elements if tag == "g"]
    assert groups.count("racing") == 2
    assert groups.count("arrow missing") == 1
    assert groups.count("arrow edge") >= 1, "the edge that does exist"
    assert {"main", "fetch", "mm", "copy_"} <= set(page.text)


def test_a_race_far_apart_is_drawn_with_what_lies_between_counted(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    trace.alloc(1, MAIN, 64)
    trace.alloc(2, MAIN, 64)
    trace.op(MAIN, "aten.relu.default", (1, "w"))
    for _ in range(500):
        trace.op(MAIN, "aten.neg.default", (2, "w"))
    trace.op(FETCH, "aten.copy_.default", (1, "r"))
    (drawing,) = re.findall(r"<svg.*?</svg>", html.render(trace.report()))
    assert "499 records not shown" in drawing
    assert drawing.count("<text") < 40


def test_a_finding_without_a_trace_is_drawn_from_itself(racy: Any) -> None:
    report = replace(racy.report(), records=())
    text = html.render(report)
    (drawing,) = re.findall(r"<svg.*?</svg>", text)
    assert drawing.count('class="racing"') == 2
    assert drawing.count('class="arrow missing"') == 1
    assert 'id="timeline-data"' not in text
    Page(text)


def test_a_race_with_the_host_and_a_reuse_are_drawn(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    trace.alloc(1, HOST, 64, pinned=True)
    trace.op(FETCH, "aten.copy_.default", (1, "w"))
    trace.op(HOST, "numpy", (1, "r"))
    trace.alloc(2, MAIN, 64)
    trace.op(FETCH, "aten.neg.default", (2, "r"))
    trace.free(2)
    trace.alloc(3, MAIN, 64)
    trace.op(MAIN, "aten.add.Tensor", (3, "w"))
    report = trace.report()
    assert [finding.kind.value for finding in report.findings] == ["read-after-write", "reuse"]
    host, reuse = re.findall(r"<svg.*?</svg>", html.render(report))
    assert ">host<" in host
    assert ">freed<" in reuse
    assert ">allocated<" in reuse


def test_host_waits_advice_unknown_sections_and_overlap(racy: Any) -> None:
    site = Site("a.py", 3, "f")
    rows = (("parity",), ("exact",))
    Section(title="Layers", columns=("layer",), rows=rows, good=(True, False))
    report = replace(
        racy.report(),
        host_waits=(HostWaits("item", "", site, ("main",), 7),),
        unknown=(Unclear("mine.op", site, "no schema", 2),),
        sections=(
            Section(title="Layers", columns=("layer",), rows=(("parity",), ("exact",)), good=(True, False)),
        ),
        overlap=overlap_of_records(racy.records, racy.info),
        command="crosscurrent check train.py",
    )
    words = Page(html.render(report)).words
    for part in (
        "7 host waits",
        "necessary",
        "The verdict does not cover these calls.",
        "no schema",
        "\u2713 parity",
        "\u2717 exact",
        "Overlap (model)",
        "To repeat: crosscurrent check train.py",
    ):
        assert part in words


def test_advice_that_was_not_asked_for_is_not_taken_for_none(racy: Any) -> None:
    assert "was not asked" in Page(html.render(replace(racy.report(), advice=None))).words
    assert "no sync call" in Page(html.render(replace(racy.report(), advice=()))).words


# Nothing of the user's gets out.


def evil(racy: Any) -> Report:
    """A report in which every text that a user could choose is an attack."""
    report = racy.report()
    finding = report.findings[0]
    site = Site(EVIL, 1, EVIL, ((EVIL, 1, EVIL),))
    side = replace(finding.first, op=EVIL, lane=EVIL, site=site, dtype=EVIL)
    bad = replace(
        finding,
        first=side,
        missing=EVIL,
        fix=f"`{EVIL}`",
        notes=(EVIL,),
        witness=EVIL,
        schedule=EVIL,
        freed_at=site,
    )
    lanes = [lane._replace(name=EVIL) for lane in report.info.lanes]
    records = tuple(
        record._replace(name=EVIL) if hasattr(record, "name") else record for record in report.records
    )
    return replace(
        report,
        title=EVIL,
        summary=EVIL,
        command=EVIL,
        findings=(bad,),
        records=records,
        info=report.info._replace(lanes=lanes, sites=[site] * len(report.info.sites)),
        host_waits=(HostWaits(EVIL, EVIL, site, (EVIL,), 1),),
        unknown=(Unclear(EVIL, site, EVIL),),
        sections=(Section(title=EVIL, columns=(EVIL,), rows=((EVIL,),), text=EVIL),),
        environment=((EVIL, EVIL),),
    )


def test_text_of_the_user_is_escaped(racy: Any) -> None:
    text = html.render(evil(racy))
    page = Page(text)
    assert "img" not in {tag for tag, _ in page.elements}
    assert [tag for tag, _ in page.elements].count("script") == 2, "the data, and the page's own script"
    assert EVIL in "".join(page.text), "it is shown as it is"
    assert not {name for _, attributes in page.elements for name in attributes if name.startswith("on")}


def test_the_page_names_no_address_but_its_own_parts(racy: Any) -> None:
    for tag, attributes in Page(html.render(racy.report())).elements:
        for name in ("src", "href", "action", "data"):
            assert attributes.get(name) is None or attributes[name].startswith("#"), (tag, attributes)


def test_the_policy_allows_only_its_own_script_and_style(racy: Any) -> None:
    (policy,) = [
        attributes["content"]
        for tag, attributes in Page(html.render(racy.report())).elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_markup_escapes_everything_else() -> None:
    assert element("p", "<b>", Markup("<i>"), title='"') == '<p title="&quot;">&lt;b&gt;<i></p>'
    assert element("p", ["a", ("b", None)], hidden=True, lang=None) == "<p hidden>ab</p>"


# Long traces.


def test_a_trace_of_100_000_operations_is_thinned_and_says_so(long_report: Report) -> None:
    report = long_report
    start = time.perf_counter()
    text = html.render(report)
    seconds = time.perf_counter() - start
    data = timeline_data(text)
    # Racing slices come on top of the most that are drawn, and so does one open run on each lane.
    assert len(data["slices"]) <= MAX_SLICES + 2 * len(report.findings) + len(data["lanes"])
    assert len(data["arrows"]) <= MAX_ARROWS
    words = Page(text).words
    assert re.search(r"Thinned: 10\d,\d\d\d operations are drawn as \d\d,\d\d\d slices", words)
    assert re.search(r"4,000 of \d\d,\d\d\d sync edges are drawn", words)
    assert len(text) < 4_000_000
    assert seconds < 60, "it takes about 3 s on an idle machine"


def test_thinning_loses_no_operation(long_report: Report) -> None:
    report = long_report
    everything = slices_of(report.records, report.info, report.rates, report.findings)
    drawn = thinned(everything, max_slices=1000, max_arrows=100)
    assert sum(piece.num for piece in drawn.slices) == len(everything.slices)
    assert len(drawn.arrows) == 100
    for before, after in zip(everything.races, drawn.races, strict=True):
        for one, other in ((before.first, after.first), (before.second, after.second)):
            assert everything.slices[one] == drawn.slices[other], "racing operations stay as they are"
    for arrow in drawn.arrows:
        source, target = drawn.slices[arrow.source], drawn.slices[arrow.target]
        assert source.record <= arrow.before <= source.last
        assert target.record <= arrow.after <= target.last
        assert arrow.start <= arrow.stop, "an edge never points back in time"


def test_a_short_trace_is_not_thinned(racy: Any) -> None:
    text = html.render(racy.report())
    assert "Thinned" not in text
    assert len(timeline_data(text)["slices"]) == 13


# Files.


def test_a_file_is_written_whole(racy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    html.write(racy.report(), folder / "report.html")
    assert [path.name for path in folder.iterdir()] == ["report.html"]
    Page((folder / "report.html").read_text(encoding="utf-8"))


def test_names_that_are_no_text_do_not_cost_the_report(tmp_path: Path) -> None:
    name = b"caf\xe9.py".decode("utf-8", errors="surrogateescape")
    report = Report(title=name, verdict=Verdict.RACE_FREE)
    html.write(report, tmp_path / "report.html")
    assert "caf" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_page_of_overlap_alone_speaks_of_no_races(ordered: Any) -> None:
    found = overlap_of_records(ordered.records, ordered.info)
    report = report_of_overlap(found, title="train.py")
    words = Page(html.render(report)).words
    assert found.hidden_share is not None
    assert f"{100 * found.hidden_share:.0f} % of the transfers hidden" in words
    assert "Overlap (model)" in words
    assert "nothing was measured" in words
    for part in ("race", "Host waits", "Sync calls", "missing edge"):
        assert part not in words.replace("Races were not looked for", "")
