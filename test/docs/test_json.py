"""``docs/json.md`` names every field of what ``overlap`` and ``bench`` write, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscurrent.bench.document import as_json as bench_document
from crosscurrent.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
SIMULATE = () if torch.cuda.is_available() else ("--simulate",)
COPY = """\
import torch
side = torch.cuda.Stream()
host = torch.ones(1024, pin_memory=True)
with torch.cuda.stream(side):
    x = host.to("cuda", non_blocking=True)
x.sum().item()
"""


def _section(command: str) -> str:
    return PAGE.split(f"\n## `crosscurrent {command}`\n", 1)[1].split("\n## ", 1)[0]


def _documented(command: str) -> set[str]:
    """The fields in the first column of the command's table."""
    rows = re.findall(r"^\| (`.*?) \|", _section(command), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def _written(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return document


def test_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("copy.py").write_text(COPY, encoding="utf-8")
    assert main(["overlap", *SIMULATE, "--json", "overlap.json", "copy.py"]) == 0
    document = _written("overlap.json")
    assert _documented("overlap") == document.keys()
    for field in (*document["copies"][0], *document["blocked_by"][0], *(document["bounds"] or ())):
        assert f"`{field}`" in PAGE


def test_bench() -> None:
    named = set(re.findall(r"`(\w+)`", _section("bench").split("Names end", 1)[0]))
    assert bench_document([], {}).keys() <= named


def test_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("copy.py").write_text(COPY, encoding="utf-8")
    main(["check", *SIMULATE, "--advice", "--json", "check.json", "copy.py"])
    for field in _written("check.json")["advice"][0]:
        assert f"`{field}`" in _section("check")
