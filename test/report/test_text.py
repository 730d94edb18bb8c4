"""Reports in a terminal: in color, and as plain text."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from crosscurrent.report.document import HostWaits, Section, Unclear, Verdict
from crosscurrent.report.modelled import overlap_of_records
from crosscurrent.report.text import finding_text, show, show_overlap
from crosscurrent.report.wording import readable
from crosscurrent.trace.records import Site


def shown(report: Any, *, terminal: bool = False, width: int = 80) -> str:
    stream = io.StringIO()
    show(report, Console(file=stream, force_terminal=terminal, width=width, color_system="truecolor"))
    return stream.getvalue()


def test_both_call_sites_are_shown_with_their_source(racy: Any, program: str) -> None:
    text = shown(racy.report())
    for line, source in (
        (16, "    hidden = slot @ weight"),
        (9, "        slot.copy_(host, non_blocking=True)"),
    ):
        assert f"{program}:{line}" in text
        assert f"  > {line:>5} | {source}" in text


def test_it_says_what_is_missing_and_how_to_fix_it(racy: Any) -> None:
    report = racy.report()
    text = shown(report)
    assert readable(report.findings[0].missing) in text, "nothing is wrapped or cut"
    assert readable(report.findings[0].fix) in text
    assert report.findings[0].id in text


def test_the_verdict_comes_last(racy: Any, ordered: Any) -> None:
    assert shown(racy.report()).splitlines()[-2].startswith("1 race in train.py")
    assert shown(ordered.report()).splitlines()[-2].startswith("no race in train.py")


def test_pinned_memory_of_the_set_up_is_no_host_wait(ordered: Any) -> None:
    site = Site("train.py", 3, "main")
    waits = (HostWaits("allocation", "pinned memory", site, (), times=2, idle=2),)
    text = shown(ordered.report(host_waits=waits))
    assert "The host waited" not in text
    assert "Pinned memory was allocated while the device had nothing to do" in text
    assert "train.py:3" in text


def test_pinned_memory_in_a_loop_is_explained(ordered: Any) -> None:
    site = Site("train.py", 3, "main")
    waits = (HostWaits("allocation", "pinned memory", site, (), times=3, idle=1),)
    text = shown(ordered.report(host_waits=waits))
    assert "The host waited" in text
    assert "allocation of pinned memory: the driver makes it" in text
    assert "Allocate once, before the loop" in text
    assert "had nothing to do" not in text


def test_witness_and_schedule_are_shown(racy: Any) -> None:
    finding = replace(racy.report().findings[0], witness="block 10\n1.25 and nan", schedule="v1:abc")
    text = finding_text(finding).plain
    assert "  witness  block 10\n           1.25 and nan\n" in text
    assert "  schedule v1:abc" in text
    assert "  witness" not in finding_text(racy.report().findings[0]).plain


def test_many_pairs_are_counted_and_not_all_listed(racy: Any) -> None:
    from crosscurrent.races.findings import RacingPair

    finding = racy.report().findings[0]
    pair = RacingPair(kind=finding.kind, first=finding.first, second=finding.second, count=2)
    text = finding_text(replace(finding, also=(pair,) * 8)).plain
    assert text.count("\n  also ") == 6
    assert "3 more pairs" in text


def test_tables(racy: Any) -> None:
    report = replace(
        racy.report(),
        unknown=(Unclear("mine.op", Site("a.py", 3, "f"), "no schema", 2),),
        sections=(Section(title="Layers", columns=("layer", "verdict"), rows=(("parity", "held"),)),),
    )
    text = shown(report)
    assert "The host waited:\n  call  waits for  times  where\n  item  main       1" in text
    assert "no schema" in text
    assert "Layers:\n  layer   verdict\n  parity  held\n" in text
    assert "necessary" in text, "the advice"


def test_plain_output_has_no_control_characters(racy: Any) -> None:
    text = shown(racy.report(), terminal=False)
    assert "\x1b" not in text
    assert text.isascii(), "no boxes, either"
    assert "\x1b[" in shown(racy.report(), terminal=True), "its twin has colors"


def test_no_color_is_heeded(racy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(racy.report(), terminal=True)


def test_names_are_not_taken_for_markup(racy: Any) -> None:
    report = replace(racy.report(), title="[bold]x[/bold] :smile:")
    for terminal in (False, True):
        assert "[bold]x[/bold] :smile:" in shown(report, terminal=terminal)


def test_a_narrow_terminal_loses_no_word(racy: Any) -> None:
    text = shown(racy.report(), terminal=True, width=40)
    words = "".join(part for part in text.split())
    assert "record" in words
    assert "\u2026" not in text


def test_overlap_is_shown(ordered: Any) -> None:
    stream = io.StringIO()
    show_overlap(overlap_of_records(ordered.records, ordered.info), Console(file=stream, width=200))
    assert "This is a model, not a measurement" in stream.getvalue()
    assert "By direction:" in stream.getvalue()


def test_a_failure_of_another_kind_is_no_race(ordered: Any) -> None:
    report = replace(ordered.report(), verdict=Verdict.FAILED, summary="1 layer failed.")
    assert shown(report).endswith("failed in train.py --steps 2 (simulated CUDA)\n1 layer failed.\n")


def test_sentences_are_filled_with_a_hanging_indent(racy: Any) -> None:
    lines = finding_text(racy.report().findings[0], width=60).plain.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  missing  "))
    assert lines[start + 1].startswith(" " * 11)
    paths = [line for line in lines[start:] if "/" in line]
    assert all(len(line) <= 60 for line in lines[start:] if line not in paths), "only a long path sticks out"
