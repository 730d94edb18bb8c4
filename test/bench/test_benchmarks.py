"""The scripts in benchmarks/ run, and the figures that they print are those that they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("*.py")))
def test_each_explains_itself(script: str) -> None:
    ran = run(script, "--help")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("usage: ")


def test_device_memory_does_not_grow_with_the_sequence_and_plain_autograds_does(tmp_path: Path) -> None:
    small = ["--cache-length=24", "--chunk-size=8", "--plain-up-to=8", "--policy=h2o"]
    ran = run("memory.py", *small, "--json", str(tmp_path / "out.json"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    measured = document["measured"]
    assert [each["sequence_length"] for each in measured] == [24 * multiple for multiple in (4, 8, 16, 32)]
    peaks = [each["long_context"] for each in measured]
    assert max(peaks) <= 1.05 * min(peaks)
    plain = [each["plain_autograd"] for each in measured]
    assert plain[1] > 1.8 * plain[0] > 0
    assert plain[2:] == [None, None]
    for peak in peaks:
        assert f"{peak:,}" in ran.stdout
