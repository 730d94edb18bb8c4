"""``docs/json.md`` names every field of the two documents, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscurrent.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
SIMULATE = () if torch.cuda.is_available() else ("--simulate",)
RACY = """\
import torch
side = torch.cuda.Stream()
x = torch.ones(4, device="cuda")
with torch.cuda.stream(side):
    y = x * 2
y.sum().item()
"""


def _documented(title: str) -> set[str]:
    """The fields named in the first column of the table under a line that starts with ``title``."""
    section = PAGE.split(f"\n{title}", 1)[1]
    rows = re.findall(r"^\| (`.*?) \|", section.split("\n\n| field", 1)[1].split("\n\n", 1)[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def _documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    Path("racy.py").write_text(RACY, encoding="utf-8")
    assert main(["check", *SIMULATE, "--prove", "--advice", "--json", "check.json", "racy.py"]) == 1
    assert main(["verify", "--layers", "exactness", "--json", "verify.json"]) == 0
    check, verify = (
        json.loads(Path(name).read_text(encoding="utf-8")) for name in ("check.json", "verify.json")
    )
    return check, verify


def test_every_field_is_documented_and_every_documented_field_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, verify = _documents(tmp_path, monkeypatch)
    assert _documented("## `crosscurrent check`") == check.keys()
    finding = check["findings"][0]
    assert _documented("A finding:") == finding.keys()
    assert _documented("A proof:") == finding["proof"].keys()
    for field in finding["proof"]["changes"][0]:
        assert f"`{field}`" in PAGE
    assert _documented("An access:") == finding["first"].keys()
    assert _documented("## `crosscurrent verify`") == verify.keys()
    for field in (*check["program"], *check["host_waits"][0], *verify["results"][0]):
        assert f"`{field}`" in PAGE
