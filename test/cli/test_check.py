"""``crosscurrent check``: verdicts, exit codes, and programs that end in unusual ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscurrent.cli import main

RACY = """\
import torch
copies = torch.cuda.Stream()
host = torch.empty(4, pin_memory=True)
loss = torch.ones(4, device="cuda").square()
with torch.cuda.stream(copies):
    host.copy_(loss, non_blocking=True)
"""
FIXED = RACY.replace("with ", "copies.wait_stream(torch.cuda.current_stream())\nwith ")

SIMULATE = () if torch.cuda.is_available() else ("--simulate",)
simulated_only = pytest.mark.simulation


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _check(source: str, *options: str) -> int:
    Path("program.py").write_text(source, encoding="utf-8")
    return main(["check", *SIMULATE, "--json", "out.json", "program.py", *options])


def _json() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return found


def _run(source: str) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own, for programs that end or double the process."""
    Path("program.py").write_text(source, encoding="utf-8")
    command = "import sys; from crosscurrent.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", command, "check", *SIMULATE, "--json", "out.json", "program.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def _alone() -> str:
    """What the program prints when nobody checks it: a child that had CUDA may not even be able to exit."""
    return subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, check=True, timeout=300
    ).stdout


def test_a_race_is_exit_code_1_and_told_in_full() -> None:
    assert _check(RACY) == 1
    document = _json()
    assert (document["format"], document["version"], document["verdict"]) == (
        "crosscurrent check",
        1,
        "races",
    )
    assert document["program"] == {
        "name": "program.py",
        "module": False,
        "arguments": [],
        "exit_status": 0,
        "error": None,
    }
    (finding,) = document["findings"]
    assert finding["kind"] == "read-after-write"
    assert finding["memory"] == "device"
    assert (finding["first"]["line"], finding["second"]["line"]) == (4, 6)
    assert {access["file"] for access in (finding["first"], finding["second"])} == {"program.py"}
    assert finding["first"]["bytes"] == [0, 16]
    assert finding["missing_edge"]
    assert finding["fix"]


def test_its_repair_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert _check(FIXED) == 0
    assert _json()["verdict"] == "no race"
    assert _json()["findings"] == []
    assert "no race" in capsys.readouterr().err


def test_the_output_of_the_program_passes_through_alone(capsys: pytest.CaptureFixture[str]) -> None:
    source = FIXED + "import sys\nprint('loss', sys.argv[1:])\nprint('remark', file=sys.stderr)\n"
    options = ["--json", "mine.json", "-m", "x", "--d", "--", "--help"]
    assert _check(source, *options) == 0
    written = capsys.readouterr()
    assert written.out == f"loss {options}\n"
    assert not Path("mine.json").exists()
    assert written.err.startswith("remark\n")


def test_a_module_is_run_as_python_would() -> None:
    Path("a_racy_module.py").write_text(RACY, encoding="utf-8")
    assert main(["check", *SIMULATE, "--json", "out.json", "-m", "a_racy_module", "--lr", "1"]) == 1
    assert _json()["program"]["module"] is True
    assert _json()["program"]["arguments"] == ["--lr", "1"]


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("raise ValueError('bad shape')", 1, "ValueError: bad shape"),
        ("import sys; sys.exit(4)", 4, None),
        ("import sys; sys.exit('no data')", 1, "no data"),
    ],
)
@pytest.mark.parametrize("source", [RACY, FIXED])
def test_a_program_that_fails_gives_no_verdict_but_what_was_found(
    source: str, end: str, status: int, error: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check(source + end) == 3
    document = _json()
    assert document["verdict"] == "no verdict"
    assert document["program"]["exit_status"] == status
    assert document["program"]["error"] == error
    assert len(document["findings"]) == (1 if source == RACY else 0)
    assert "the program itself failed" in capsys.readouterr().err


def test_an_interrupt_leaves_what_was_found() -> None:
    assert _check(RACY + "raise KeyboardInterrupt") == 130
    assert len(_json()["findings"]) == 1
    assert _json()["verdict"] == "no verdict"


@pytest.mark.parametrize(("source", "status", "code"), [(RACY, 0, 1), (FIXED, 0, 0), (FIXED, 5, 3)])
def test_os_exit_cannot_pass_for_a_verdict(source: str, status: int, code: int) -> None:
    finished = _run(source + f"import os\nos._exit({status})\n")
    assert finished.returncode == code, finished.stderr
    assert _json()["program"]["exit_status"] == status
    assert len(_json()["findings"]) == (1 if source == RACY else 0)


def test_a_killed_program_leaves_no_json_not_even_an_old_one() -> None:
    Path("out.json").write_text("{}", encoding="utf-8")
    finished = _run(RACY + "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert finished.returncode not in (0, 1)
    assert not Path("out.json").exists()


@pytest.mark.parametrize("leave", ["os._exit(7)", "sys.exit(7)", "raise SystemExit(7)"])
def test_a_forked_child_ends_as_it_would_and_the_verdict_is_its_parents(leave: str) -> None:
    source = (
        FIXED + "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        f"    {leave}\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    finished = _run(source)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == (_alone() if torch.cuda.is_available() else "7\n")
    assert finished.stderr.count("no race") == 1
    assert _json()["verdict"] == "no race"


def test_another_program_cannot_take_the_place_of_the_checked_one(capsys: pytest.CaptureFixture[str]) -> None:
    source = RACY + "import os, sys\nos.execvp(sys.executable, [sys.executable, '-c', ''])\n"
    assert _check(source) == 3
    assert "check the new one instead" in capsys.readouterr().err
    assert len(_json()["findings"]) == 1


def test_a_forked_child_may_become_another_program() -> None:
    source = (
        FIXED + "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.execv(sys.executable, [sys.executable, '-c', 'print(5)'])\n"
        "os.waitpid(child, 0)\n"
    )
    finished = _run(source)
    assert (finished.returncode, finished.stdout) == (0, "5\n"), finished.stderr


def test_a_program_that_closes_its_output_keeps_its_verdict() -> None:
    finished = _run(FIXED + "import sys\nsys.stdout.close()\n")
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(("first", "code"), [("int", 1), ("copies.synchronize", 0)])
def test_races_of_exit_functions_are_seen(first: str, code: int) -> None:
    exits = f"import atexit\natexit.register(lambda: host.sum())\natexit.register({first})\n"
    assert _check(FIXED + exits) == code


def test_races_of_a_thread_that_outlives_the_script_are_seen() -> None:
    body = "\n".join(f"    {line}" for line in RACY.splitlines()[1:])
    source = f"import threading, torch\ndef work():\n{body}\nthreading.Thread(target=work).start()\n"
    assert _check(source) == 1


@simulated_only
def test_two_simulated_devices() -> None:
    assert _check("import torch\nassert torch.cuda.device_count() == 1\n") == 0
    Path("program.py").write_text("import torch\nassert torch.cuda.device_count() == 2\n", encoding="utf-8")
    assert main(["check", "--simulate", "--devices", "2", "program.py"]) == 0


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--simulate", "missing.py"], "there is no script missing.py"),
        (["--simulate", "-m", "missing_module"], "there is no module missing_module"),
        (["--simulate", "--json", "nowhere/out.json", "empty.py"], "there is no folder nowhere"),
        pytest.param(
            ["--simulate", "--devices", "0", "empty.py"], "devices must be at least 1", marks=simulated_only
        ),
        (["--simulate"], "--help"),
        (["--simulate", "--unheard-of", "empty.py"], "--help"),
    ],
)
def test_wrong_use_is_exit_code_2_and_one_line(
    arguments: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.py").write_text("", encoding="utf-8")
    assert main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert advice in error
    assert error.count("\n") == 1


@simulated_only
def test_without_a_device_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.py").write_text("", encoding="utf-8")
    assert main(["check", "empty.py"]) == 2
    assert "--simulate" in capsys.readouterr().err


def test_training_with_asynchronous_transfers_has_no_race() -> None:
    small = "--model.num_layers=2 --model.embed_size=16 --model.num_heads=2 --batch_size=1 --steps=2"
    caches = "--sequence_length=60 --kv_cache.cache_length=16 --grad.chunk_size=8 --grad.layers_per_cell=1"
    options = f"{small} {caches} --device=cuda --grad.async_cpu_transfer=True".split()
    # A script and not `-m crosscurrent`: pytest loads installed plugins by a hook that runpy cannot use.
    program = "import sys\nfrom crosscurrent.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    Path("program.py").write_text(program, encoding="utf-8")
    arguments = ["check", *SIMULATE, "--json", "out.json", "program.py", "train", *options]
    assert main(arguments) == 0
    document = _json()
    assert len(document["lanes"]) >= 4  # the host and three streams
    assert document["unknown"] == []


def test_reports_are_written_as_pages_and_traces() -> None:
    assert _check(RACY) == 1
    options = ["--html", "out.html", "--perfetto", "out.trace", "--advice"]
    assert main(["check", *SIMULATE, *options, "program.py"]) == 1
    page = Path("out.html").read_text(encoding="utf-8")
    assert _json()["findings"][0]["id"] in page
    assert " ".join(["crosscurrent check", *SIMULATE, "--advice program.py"]) in page
    assert json.loads(Path("out.trace").read_text(encoding="utf-8"))["traceEvents"]


def test_advice_says_which_waits_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("program.py").write_text(FIXED + "torch.cuda.synchronize()\n", encoding="utf-8")
    assert main(["check", *SIMULATE, "--advice", "program.py"]) == 0
    advice = capsys.readouterr().err.split("Sync calls:")[1].splitlines()
    (wait,) = (line for line in advice if "wait_stream" in line)
    (synchronize,) = (line for line in advice if "synchronize" in line)
    assert "necessary" in wait
    assert "necessary" not in synchronize


def test_what_is_not_understood_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    # Which of its branches ran, and what they did, is not seen from outside.
    conditional = "torch.ops.higher_order.cond(True, lambda v: v + 1, lambda v: v - 1, (loss,))\n"
    assert _check(FIXED + conditional) == 3
    document = _json()
    assert (document["verdict"], document["findings"]) == ("no verdict", [])
    assert [what["op"] for what in document["unknown"]] == ["cond"]
    assert "no verdict" in capsys.readouterr().err
    assert _check(RACY + conditional) == 1  # a race is one all the same
