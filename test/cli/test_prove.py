"""``crosscurrent check --prove`` and ``--save``: what changes, by the names that the script gives it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscurrent.cli import main

SIMULATE = () if torch.cuda.is_available() else ("--simulate",)

RACY = """\
import torch
copies = torch.cuda.Stream()
host = torch.empty(4, pin_memory=True)
loss = torch.ones(4, device="cuda").square()
with torch.cuda.stream(copies):
    host.copy_(loss, non_blocking=True)
copies.synchronize()
"""
FIXED = RACY.replace("with ", "copies.wait_stream(torch.cuda.current_stream())\nwith ")
HARMLESS = """\
import torch
copies = torch.cuda.Stream()
host = torch.empty(4, pin_memory=True)
loss = torch.zeros(4, device="cuda")
copies.wait_stream(torch.cuda.current_stream())
loss.zero_()
with torch.cuda.stream(copies):
    host.copy_(loss, non_blocking=True)
copies.synchronize()
"""
"""The copy races with the second zeroing only, and finds zeros before it, too."""

IN_A_FUNCTION = """\
import sys
import torch
def train():
    model = torch.nn.Linear(8, 8, device="cuda")
    lane = torch.cuda.Stream()
    batch = torch.ones(4, 8).pin_memory()
    with torch.cuda.stream(lane):
        inputs = batch.to("cuda", non_blocking=True)
    print(model(inputs).square().sum().item() > 0)
sys.exit(train())
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _check(source: str, *options: str) -> int:
    Path("program.py").write_text(source, encoding="utf-8")
    return main(["check", *SIMULATE, "--json", "out.json", *options, "program.py"])


def _findings() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path("out.json").read_text(encoding="utf-8"))["findings"]
    return found


def test_a_race_is_shown_by_the_variable_that_it_spoils(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(RACY, "--prove") == 1
    (finding,) = _findings()
    assert finding["proof"]["proven"]
    assert finding["proof"]["unproven"] is None
    (change,) = finding["proof"]["changes"]
    assert change == {
        "name": "host", "what": "value", "elements": 4, "total": 4, "nan": 4, "distance": 0.0,
    }  # fmt: skip
    said = capsys.readouterr().err
    assert "witness  host: 4 of 4 elements changed, all of them NaN" in said
    assert finding["schedule"] in said


def test_nothing_is_proven_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(RACY) == 1
    (finding,) = _findings()
    assert (finding["witness"], finding["schedule"], finding["proof"]) == (None, None, None)
    assert "witness" not in capsys.readouterr().err


def test_a_race_that_changes_nothing_is_unproven_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(HARMLESS, "--prove", "--html", "out.html") == 1
    for finding in _findings():
        assert not finding["proof"]["proven"]
        assert finding["schedule"] is None
        assert finding["proof"]["unproven"] in finding["witness"]
    assert "witness  unproven: " in capsys.readouterr().err
    page = Path("out.html").read_text(encoding="utf-8")
    assert "no value changed" in page
    assert ">witnessed<" not in page


def test_without_a_race_there_is_nothing_to_prove() -> None:
    assert _check(FIXED, "--prove") == 0
    assert _findings() == []


def test_a_program_that_was_saved_shows_the_same_values_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(RACY, "--prove", "--save", "step one.ccp", "--html", "out.html") == 1
    (finding,) = _findings()
    command = finding["proof"]["replay"]
    assert command == f"crosscurrent replay 'step one.ccp' {finding['schedule']}"
    assert command in capsys.readouterr().err
    assert "crosscurrent replay" in Path("out.html").read_text(encoding="utf-8")
    assert main(shlex.split(command)[1:]) == 1
    assert "host: 4 of 4 elements changed, all of them NaN" in capsys.readouterr().out
    assert main(["replay", "step one.ccp"]) == 0


def test_what_a_function_did_is_told_by_what_the_host_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(IN_A_FUNCTION, "--prove") == 1
    proofs = [finding["proof"] for finding in _findings()]
    assert any(
        change["what"] == "host read" and "program.py:9" in change["name"]
        for proof in proofs
        for change in proof["changes"]
    )
    assert "at program.py:9 (read 1 of the host)" in capsys.readouterr().err


@pytest.mark.simulation
def test_a_proof_needs_no_import_before_the_simulation(tmp_path: Path) -> None:
    """What is imported only while CUDA is simulated must not take it for a real one."""
    import subprocess
    import sys

    Path("program.py").write_text(RACY, encoding="utf-8")
    program = "import sys; from crosscurrent.cli import main; sys.exit(main())"
    options = ["check", "--simulate", "--prove", "program.py"]
    finished = subprocess.run(
        [sys.executable, "-c", program, *options], capture_output=True, text=True, check=False, timeout=300
    )
    assert finished.returncode == 1
    assert "witness  host: 4 of 4 elements changed" in finished.stderr


def test_an_early_end_still_gives_a_proof() -> None:
    assert _check(RACY + "raise SystemExit(0)\n", "--prove") == 1
    assert _findings()[0]["proof"]["changes"][0]["name"] == "host"


def test_the_script_is_never_taken_for_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    Path("program.py").write_text(RACY, encoding="utf-8")
    for option in ("--json", "--html", "--perfetto", "--save"):
        assert main(["check", *SIMULATE, option, "program.py", "program.py"]) == 2
        assert "name another file" in capsys.readouterr().err
    assert Path("program.py").read_text(encoding="utf-8") == RACY


def test_two_results_need_two_files(capsys: pytest.CaptureFixture[str]) -> None:
    Path("same").write_text("old", encoding="utf-8")
    assert _check(RACY, "--html", "same", "--perfetto", "same") == 2
    assert "two results" in capsys.readouterr().err
    assert Path("same").read_text(encoding="utf-8") == "old"
