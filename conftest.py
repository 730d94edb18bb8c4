"""What every test of this repository shares: one thread a process, and an honest summary."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

# pytest-xdist runs one process a core. More threads in each would only take cores from one another.
# This has to be said before torch is first imported; the worker processes inherit it.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


def gpu_of_worker(worker: str, gpus: Sequence[str]) -> str | None:
    """The GPU of a process of pytest-xdist ("gw0", "gw1", ...): one each, in turns. None: all it can see."""
    number = worker.removeprefix("gw")
    return gpus[int(number) % len(gpus)] if number.isdecimal() and len(gpus) > 1 else None


def _gpus() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True).stdout.replace("\n", ",")
    return [gpu.strip() for gpu in (listed or "").split(",") if gpu.strip()]


# As early: CUDA looks at this when it is first used. Tests that need two devices are left out then, and
# counted; a run without pytest-xdist has them.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (gpu := gpu_of_worker(worker, _gpus())) is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu

import pytest  # noqa: E402


class Need(NamedTuple):
    """What a marker says that a test needs, and what the summary says where it is missing."""

    met: Callable[[], bool]
    reason: str
    left_out: str


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _can_simulate() -> bool:
    return not _has_cuda()


def _has_no_cuda() -> bool:
    return not _has_cuda()


def _has_two_devices() -> bool:
    import torch

    return not torch.cuda.is_available() or torch.cuda.device_count() > 1


def _has_chromium() -> bool:
    return any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")))


NEEDS = {
    "gpu": Need(
        _has_cuda,
        "needs a real CUDA device",
        "GPU tests left out: this machine has no CUDA device (`tox -e gpu` runs them)",
    ),
    "simulation": Need(
        _can_simulate,
        "simulates CUDA, which is refused beside a real CUDA device",
        "simulation tests left out: this process can use a CUDA device "
        "(`CUDA_VISIBLE_DEVICES= python -m pytest`, or a CPU build of PyTorch, runs them)",
    ),
    "no_gpu": Need(
        _has_no_cuda,
        "is about a machine without a CUDA device",
        "tests left out that are about a machine without a CUDA device: this one has one",
    ),
    "two_gpus": Need(
        _has_two_devices,
        "needs two CUDA devices",
        "tests left out that need two CUDA devices: this machine has one (simulated ones do as well)",
    ),
    "chromium": Need(
        _has_chromium,
        "needs Chromium",
        "browser tests left out: this machine has no Chromium (Debian: `apt-get install chromium`)",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests that need what this machine lacks."""
    for marker, need in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker) is not None]
        if marked and not need.met():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=need.reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests this run did not make, and why."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in skipped]
    for need in NEEDS.values():
        if num_left_out := reasons.count(need.reason):
            terminalreporter.write_line(f"{num_left_out} {need.left_out}")
