"""``crosscurrent overlap``: a program's overlap, its own exit, and wrong use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscurrent.cli import main

# Sums small enough for the model's launches to keep up: a large product hides the copies of the next batch.
PROGRAM = """\
import sys
import torch
SIZE, BATCHES = 256, 4
compute = torch.cuda.current_stream()
fetch = compute if "exposed" in sys.argv else torch.cuda.Stream()
hosts = [torch.ones(SIZE, SIZE).pin_memory() for _ in range(BATCHES)]
slots = [torch.empty(SIZE, SIZE, device="cuda") for _ in range(BATCHES)]
big = torch.ones(2048, 2048, device="cuda")
fetch.wait_stream(compute)
for host, slot in zip(hosts, slots):
    with torch.cuda.stream(fetch):
        slot.copy_(host, non_blocking=True)
    compute.wait_stream(fetch)
    slot @ slot
    big @ big
print("done", *sys.argv[1:])
"""

SIMULATE = () if torch.cuda.is_available() else ("--simulate",)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _overlap(source: str, *arguments: str) -> int:
    Path("program.py").write_text(source, encoding="utf-8")
    options = ("--json", "out.json", "--html", "out.html")
    return main(["overlap", *SIMULATE, *options, "program.py", *arguments])


def _json() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return found


def test_a_stream_of_its_own_hides_copies(capsys: pytest.CaptureFixture[str]) -> None:
    assert _overlap(PROGRAM, "--json", "x") == 0
    output = capsys.readouterr()
    assert output.out == "done --json x\n"  # what comes after the program's name is the program's
    document = _json()
    assert (document["format"], document["verdict"]) == ("crosscurrent overlap", "measured")
    assert document["copies_made"] == 4
    assert 0 < document["hidden_share"] < 1
    assert document["program"]["arguments"] == ["--json", "x"]
    assert "By call site:" in output.err
    assert "<h2>Overlap" in Path("out.html").read_text(encoding="utf-8")


def test_the_stream_of_the_kernels_hides_nothing() -> None:
    assert _overlap(PROGRAM, "exposed") == 0
    assert _json()["hidden_share"] == 0


@pytest.mark.simulation
def test_a_model_is_marked_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert _overlap(PROGRAM) == 0
    document = _json()
    assert document["simulated"] is True
    assert "TFLOP/s" in document["modelled"]
    output = capsys.readouterr().err
    assert "This is a model, not a measurement" in output
    assert "By a model: nothing was measured." in output


@pytest.mark.gpu
def test_a_measurement_is_marked_as_one() -> None:
    assert _overlap(PROGRAM) == 0
    document = _json()
    assert (document["simulated"], document["modelled"]) == (False, "")


def test_an_item_is_a_host_wait_with_its_line() -> None:
    assert _overlap("import torch\nx = torch.ones(4, device='cuda')\nx.sum().item()\n") == 0
    (wait,) = [each for each in _json()["blocked_by"] if each["call"] == "item"]
    assert (Path(wait["file"]).name, wait["line"]) == ("program.py", 3)


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("sys.exit(4)", 4, None),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
    ],
)
def test_a_program_that_fails_is_no_verdict(
    end: str, status: int, error: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _overlap(f"{PROGRAM}{end}\n") == 3
    document = _json()
    assert document["verdict"] == "no verdict"
    assert (document["program"]["exit_status"], document["program"]["error"]) == (status, error)
    assert document["copies_made"] == 4
    assert "this is the overlap up to there" in capsys.readouterr().err


def test_a_program_that_leaves_at_once_is_reported_all_the_same() -> None:
    ending = "import os\nsys.stdout.flush()\nos._exit(0)\n"
    Path("program.py").write_text(f"{PROGRAM}{ending}", encoding="utf-8")
    command = [sys.executable, "-m", "crosscurrent", "overlap", *SIMULATE, "--json", "out.json", "program.py"]
    assert subprocess.run(command, check=False, capture_output=True, timeout=120).returncode == 0
    assert _json()["copies_made"] == 4


@pytest.mark.simulation  # a process with a CUDA context cannot be forked
def test_a_forked_child_ends_as_it_would_and_reports_nothing() -> None:
    fork = "import os\npid = os.fork()\nif pid == 0:\n    sys.exit(7)\n"
    wait = "print('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    Path("program.py").write_text(f"{PROGRAM}{fork}{wait}", encoding="utf-8")
    command = [sys.executable, "-m", "crosscurrent", "overlap", *SIMULATE, "program.py"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "child 7"
    assert ended.stderr.count("By direction:") == 1


def test_a_module_is_run_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("module_to_measure.py").write_text(PROGRAM, encoding="utf-8")
    assert main(["overlap", *SIMULATE, "-m", "module_to_measure", "argument"]) == 0
    assert capsys.readouterr().out == "done argument\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--simulate", "nowhere.py"), "there is no script nowhere.py"),
        (("--simulate", "-m", "no_such_module"), "there is no module no_such_module"),
        (("--json", "nowhere/x.json", "program.py"), "there is no folder nowhere"),
        (("--simulate", "--devices", "0", "program.py"), "devices must be at least 1"),
    ],
)
def test_wrong_use_runs_nothing(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    assert main(["overlap", *arguments]) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.out == ""


@pytest.mark.no_gpu
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    assert main(["overlap", "program.py"]) == 2
    assert "--simulate gives the picture of a cost model" in capsys.readouterr().err
