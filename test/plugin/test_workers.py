"""With several GPUs the processes of pytest-xdist take one each; otherwise they share what there is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, pytest

@pytest.mark.parametrize("i", range(12))
def test_which(i):
    with open(os.environ["SEEN"], "a") as seen:
        print(os.environ["PYTEST_XDIST_WORKER"], os.environ.get("CUDA_VISIBLE_DEVICES"), file=seen)
"""


def seen_by_workers(folder: Path, environment: dict[str, str]) -> set[tuple[str, str]]:
    """What three processes see, in a project that has this repository's ``conftest.py``."""
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "test_it.py").write_text(PROGRAM, encoding="utf-8")
    seen = folder / "seen.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "SEEN": str(seen)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {tuple(line.split()) for line in seen.read_text(encoding="utf-8").splitlines()}  # type: ignore[misc]


def bare() -> dict[str, str]:
    hidden = ("CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def with_tool(folder: Path, output: str) -> dict[str, str]:
    """An environment with a driver's tool that lists these GPUs."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nprintf '{output}'\n", encoding="utf-8")
    tool.chmod(0o755)
    return bare() | {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}


def test_each_takes_one_of_two(tmp_path: Path) -> None:
    seen = seen_by_workers(tmp_path, with_tool(tmp_path, r"0\n1\n"))
    assert seen <= {("gw0", "0"), ("gw1", "1"), ("gw2", "0")}
    assert len(seen) > 1


def test_those_that_are_hidden_stay_hidden(tmp_path: Path) -> None:
    seen = seen_by_workers(tmp_path, bare() | {"CUDA_VISIBLE_DEVICES": "5, 7"})
    assert seen <= {("gw0", "5"), ("gw1", "7"), ("gw2", "5")}


@pytest.mark.parametrize("listed", [r"0\n", ""], ids=["one GPU", "no GPU"])
def test_what_there_is_is_shared(tmp_path: Path, listed: str) -> None:
    seen = seen_by_workers(tmp_path, with_tool(tmp_path, listed))
    assert {gpus for _, gpus in seen} == {"None"}
