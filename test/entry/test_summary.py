"""What a run says of the tests that it left out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.gpu
def test_left_out():
    pass

@pytest.mark.simulation
def test_that_skips_itself():
    pytest.skip("something is not installed")
"""


def test_only_tests_that_lack_a_device_are_counted_as_such(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    said = subprocess.run(
        [sys.executable, "-m", "pytest", "test_it.py"],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert "1 GPU tests left out: this machine has no CUDA device" in said
    assert "simulation tests left out" not in said
