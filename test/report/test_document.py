"""What a report says of itself, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import crosscurrent
from crosscurrent.report.document import Report, Section, Unclear, Verdict
from crosscurrent.report.source import bytes_of, excerpt, place_of, shape_of, short_op, time_of
from crosscurrent.report.watched import report_of
from crosscurrent.trace.records import Site


def test_one_race(racy: Any) -> None:
    report = racy.report()
    assert report.headline == "1 race"
    assert report.sentence.startswith("1 sync edge is missing")


def test_no_race(ordered: Any) -> None:
    report = ordered.report()
    assert (report.verdict, report.headline) == (Verdict.RACE_FREE, "No race")
    assert "same bits" in report.sentence


def test_what_was_not_understood_is_no_pass() -> None:
    unclear = (Unclear("mine.op", Site("a.py", 1, "f"), "no schema"),)
    report = Report(title="a.py", verdict=Verdict.NO_VERDICT, unknown=unclear)
    assert report.headline == "No verdict"
    assert "could not be understood" in report.sentence


def test_a_section_has_rows_as_wide_as_its_columns() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        Section(title="Layers", columns=("layer", "verdict"), rows=(("parity",),))
    with pytest.raises(ValueError, match="1 of them judged"):
        Section(title="Layers", columns=("layer",), rows=(("parity",), ("exact",)), good=(True,))


def side_stream_copy(*, wait: bool) -> None:
    side = torch.cuda.Stream()
    source = torch.ones(4, device="cuda")
    if wait:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        source + 1


@pytest.mark.simulation
@pytest.mark.parametrize("wait", [True, False])
def test_a_watch_becomes_a_report(wait: bool) -> None:
    with crosscurrent.simulate(), crosscurrent.watch(trace=True) as watch:
        side_stream_copy(wait=wait)
    report = report_of(watch, title="copy", simulated=True, advise=True)
    assert report.verdict is (Verdict.RACE_FREE if wait else Verdict.RACES)
    assert list(report.findings) == watch.findings
    assert list(report.records) == watch.records
    assert report.advice is not None
    assert [advice.kind for advice in report.advice] == (["wait_stream"] if wait else [])
    assert ("torch", torch.__version__) in report.environment


@pytest.mark.simulation
def test_a_watch_without_a_trace_becomes_a_report_without_timeline() -> None:
    with crosscurrent.simulate(), crosscurrent.watch() as watch:
        side_stream_copy(wait=False)
        torch.ones(2, device="cuda").sum().item()
        torch.ones(2, device="cuda").sum().item()
    report = report_of(watch, title="copy", simulated=True)
    assert report.findings
    assert (list(report.findings), report.records, report.advice) == (watch.findings, (), None)
    assert [(wait.kind, wait.times) for wait in report.host_waits] == [("item", 1), ("item", 1)]


# Names and numbers as people read them.


def test_an_excerpt_is_dedented_and_marks_the_call(program: str) -> None:
    lines = excerpt(Site(program, 9, "prefetch"), context=1)
    assert [(line.number, line.text, line.called) for line in lines] == [
        (8, "with torch.cuda.stream(fetch):", False),
        (9, "    slot.copy_(host, non_blocking=True)", True),
        (10, "    ready = fetch.record_event()", False),
    ]


@pytest.mark.parametrize("line", [0, 99])
def test_a_line_that_is_not_there_has_no_excerpt(program: str, line: int) -> None:
    assert excerpt(Site(program, line, "f")) == []


def test_a_file_that_is_not_there_has_no_excerpt() -> None:
    assert excerpt(Site("<string>", 1, "f")) == []


def test_an_excerpt_is_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("one\n")
    assert excerpt(Site(str(file), 1, "f"))[0].text == "one"
    file.write_text("two, and longer\n")
    assert excerpt(Site(str(file), 1, "f"))[0].text == "two, and longer"


def test_places_below_the_working_directory_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert place_of(Site(str(tmp_path / "a.py"), 3, "f")) == "a.py:3"
    assert place_of(Site("/elsewhere/a.py", 3, "f")) == "/elsewhere/a.py:3"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (short_op("aten.copy_.default"), "copy_"),
        (short_op("aten::copy_"), "copy_"),
        (short_op("numpy()"), "numpy()"),
        (shape_of((4, 8), "torch.float32"), "float32[4, 8]"),
        (shape_of((), "float32"), "float32[]"),
        (shape_of((), ""), ""),
        (bytes_of(0), "0 B"),
        (bytes_of(1023), "1023 B"),
        (bytes_of(1536), "1.5 KiB"),
        (bytes_of(5 << 40), "5120 GiB"),
        (time_of(0), "0 ns"),
        (time_of(999), "999 ns"),
        (time_of(1500), "1.5 us"),
        (time_of(2_000_000_000), "2 s"),
    ],
)
def test_numbers_and_names(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_new_trace_is_race_free(new_trace: Callable[[], Any]) -> None:
    assert new_trace().report().verdict is Verdict.RACE_FREE
