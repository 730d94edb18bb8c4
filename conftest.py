"""What every test of this repository shares: one thread a process, and an honest summary."""

from __future__ import annotations

import os

# pytest-xdist runs one process a core. More threads in each would only take cores from one another.
# This has to be said before torch is first imported; the worker processes inherit it.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests marked ``gpu`` where there is no CUDA device."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_tests:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason="needs a real CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests a run without a GPU did not make."""
    left_out = [
        report for report in terminalreporter.stats.get("skipped", []) if "gpu" in getattr(report, "keywords", {})
    ]
    if left_out:
        terminalreporter.write_line(
            f"{len(left_out)} GPU tests left out: this machine has no CUDA device (`tox -e gpu` runs them)"
        )
