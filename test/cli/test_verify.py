"""``crosscurrent verify``: exit codes, the table, the JSON, and what it does not claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.cli import main
from crosscurrent.suite import LAYERS, exactness


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _json() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return found


def test_all_that_is_asked_held() -> None:
    command = "import sys; from crosscurrent.cli import main; sys.exit(main())"
    options = ["verify", "--layers", "exactness", "--json", "out.json"]
    finished = subprocess.run(
        [sys.executable, "-c", command, *options], capture_output=True, text=True, check=False, timeout=300
    )
    assert finished.returncode == 0, finished.stdout
    assert finished.stderr == ""  # no progress where there is no terminal
    assert finished.stdout.count("held") == 4
    assert "exactness: loss and gradients agree with plain autograd" in finished.stdout
    document = _json()
    assert (document["format"], document["version"]) == ("crosscurrent verify", 1)
    assert document["verdict"] == "held"
    assert [(r["layer"], r["policy"], r["quantizer"], r["verdict"]) for r in document["results"]] == [
        ("exactness", policy, quantizer, "held")
        for policy in ("lastrec", "h2o")
        for quantizer in ("default", "torch-quantized8")
    ]


def test_one_failure_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exactness, "TOLERANCE", 0.0)
    assert main(["verify", "--layers", "exactness", "--json", "out.json"]) == 1
    output = capsys.readouterr().out
    assert "exactness: 4 failed" in output
    assert _json()["verdict"] == "failed"


@pytest.mark.no_gpu
def test_without_cuda_it_says_what_it_could_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--no_simulate", "--json", "out.json"]) == 3
    output = capsys.readouterr().out
    document = _json()
    assert document["verdict"] == "not run"
    assert document["cuda"] == "none"
    verdicts = {(result["layer"], result["verdict"]) for result in document["results"]}
    assert verdicts == {(layer.name, "not run" if layer.needs_cuda else "held") for layer in LAYERS}
    assert {"contracts", "parity", "races"} <= {layer.name for layer in LAYERS if layer.needs_cuda}
    for layer in LAYERS:
        assert (layer.claim in output) == (not layer.needs_cuda)
        assert (f"{layer.name}: 4 not run" in output) == layer.needs_cuda


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--layers", "exactnes"], "the layers are contracts, exactness, parity, races"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
        (["surplus"], "--help"),
    ],
)
def test_wrong_use_is_exit_code_2_and_one_line(
    options: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *options]) == 2
    error = capsys.readouterr().err
    assert advice in error
    assert error.count("\n") == 1
