"""``docs/performance.md`` names every field of the document, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.bench.page import BEGIN, END
from crosscurrent.cli import main

PROGRAM = """\
import torch
side = torch.cuda.Stream()
host = torch.ones(1 << 20).pin_memory()
with torch.cuda.stream(side):
    there = torch.empty(1 << 20, device="cuda").copy_(host, non_blocking=True)
torch.cuda.current_stream().wait_stream(side)
there.sum().item()
"""

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")


def _documented(title: str) -> set[str]:
    """The fields named in the first column of the table below a title."""
    rows = PAGE.split(f"\n{title}\n", 1)[1].split("| field | ", 1)[1].split("\n\n", 1)[0]
    first = re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE)
    return {name for cell in first for name in re.findall(r"`(\w+)`", cell)}


def _names(value: Any) -> Iterator[str]:
    """The fields of a value, at any depth."""
    if isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from _names(each)
    elif isinstance(value, list):
        for each in value:
            yield from _names(each)


@pytest.mark.simulation
def test_every_field_is_documented_and_every_documented_field_is_there(measured: dict[str, Any]) -> None:
    result = measured["results"][0]
    assert _documented("## The document") == measured.keys()
    assert _documented("A result:") == result.keys()
    assert _documented("What was measured with a flag:") == result["on"].keys()
    section = PAGE.split("\n## The document\n", 1)[1]
    assert section.count("_both_ways") == 1
    named = set(re.findall(r"`(\w+)`", section))
    for part in ("ratio", "roofline", "rates", "comparison"):
        missing = {name for name in _names(result[part]) if not name.endswith("_both_ways")} - named
        assert not missing
    assert set(_names(result["on"]["all_steps"])) <= named


@pytest.mark.simulation
def test_every_field_of_an_overlap_is_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    assert main(["overlap", "--simulate", "--json", "out.json", "program.py"]) == 0
    document = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert document["blocked_by"]
    assert document["bounds"]["obstacles"]
    assert _documented("## Overlap of your own code") == document.keys()
    section = PAGE.split("\n## Overlap of your own code\n", 1)[1].split("\n## ", 1)[0]
    assert set(_names(document)) <= set(re.findall(r"`(\w+)`", section))


def test_figures_stand_between_the_marks_or_are_not_there() -> None:
    between = PAGE.split(BEGIN, 1)[1].split(END, 1)[0]
    assert "Nothing is measured yet" in between or "Measured by `crosscurrent bench" in between
