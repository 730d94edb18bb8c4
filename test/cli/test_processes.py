"""Programs that spawn processes: these run, on simulated CUDA if the program does, and are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from crosscurrent.cli import main

SIMULATE = () if torch.cuda.is_available() else ("--simulate", "--devices=2")


def _check(folder: Path, source: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, list[str]]:
    """The exit code, what was printed, and the remarks of the document."""
    (folder / "program.py").write_text(source)
    document = folder / "check.json"
    code = main(["check", *SIMULATE, "--json", str(document), str(folder / "program.py")])
    return code, capfd.readouterr().out, json.loads(document.read_text())["remarks"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pool_that_needs_cuda_to_start_runs(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without CUDA in its workers, each would die while it starts, and be started again, for ever."""
    # A server of forks imports the program itself in newer Pythons. What it forks could not use CUDA, had
    # that import done so.
    at_import = "stream = torch.cuda.Stream()" if method == "spawn" else ""
    source = f"""\
import multiprocessing
import torch

{at_import}

def begin():
    torch.cuda.set_device(0)

def work(number):
    return torch.full((2,), float(number), device="cuda").sum().item(), torch.cuda.is_available()

if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1, initializer=begin) as pool:
        print(pool.map(work, [1, 2]))
"""
    code, said, remarks = _check(tmp_path, source, capfd)
    assert said == "[(2.0, True), (4.0, True)]\n"
    assert code == 0
    assert len(remarks) == 1
    assert remarks[0].startswith("1 process that the program spawned ran, but nobody watched it")


def test_a_failed_program_leaves_no_process_to_wait_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = """\
import multiprocessing

def work(tasks):
    tasks.get()

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=work, args=(spawn.Queue(),)).start()
    raise RuntimeError("before the first task was sent")
"""
    code, _, remarks = _check(tmp_path, source, capfd)
    assert code == 3
    assert remarks[1:] == ["1 process that the program left running when it failed had to be ended"]


def test_a_program_without_processes_has_no_remarks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _check(tmp_path, "import torch\ntorch.ones(2, device='cuda')\n", capfd) == (0, "", [])
