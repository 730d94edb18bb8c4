"""``crosscurrent verify``: exit codes, the table, the JSON, and what it does not claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from crosscurrent.cli import main
from crosscurrent.cli.console import show_table
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
    # Where there is no terminal, a plain line for each answer.
    said = finished.stderr.splitlines()
    assert [line.split(" (")[0] for line in said] == [
        f"[{number}/4] exactness: {policy}, {quantizer}: held"
        for number, (policy, quantizer) in enumerate(
            [(policy, name) for policy in ("lastrec", "h2o") for name in ("default", "torch-quantized8")], 1
        )
    ]
    assert finished.stdout.count("held") == 4
    assert finished.stdout.isascii()
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
        (["--workers", "0"], "at least 1"),
        (["--workers", "-1"], "at least 1"),
        (["--layers", "exactness", "--perfetto", "out.pf"], "add it to --layers"),
        (["--html", "."], "is a folder"),
        (["--html", "same", "--json", "same"], "two results"),
    ],
)
def test_wrong_use_is_exit_code_2_and_one_line(
    options: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *options]) == 2
    error = capsys.readouterr().err
    assert advice in error
    assert error.count("\n") == 1


@pytest.mark.simulation
def test_page_and_trace_show_the_layers_and_what_the_race_layer_saw() -> None:
    options = ["--layers", "races", "--workers", "2", "--html", "out.html", "--perfetto", "out.pf"]
    assert main(["verify", *options, "--json", "out.json"]) == 0
    page = Path("out.html").read_text(encoding="utf-8")
    assert "Of 4 questions about the long-context gradient: 4 held." in page
    assert "no race on 4 lanes" in page
    assert "<h1>All held</h1>" in page
    assert "The host waited nowhere" not in page  # nobody counted
    assert "The timeline is that of lastrec, default." in page
    assert len(json.loads(Path("out.pf").read_text(encoding="utf-8"))["traceEvents"]) > 1000
    # By several processes, and yet in the order of one.
    scenarios = [(result["policy"], result["quantizer"]) for result in _json()["results"]]
    assert scenarios == [
        (policy, name) for policy in ("lastrec", "h2o") for name in ("default", "torch-quantized8")
    ]
    assert all(result["evidence"] == {"findings": []} for result in _json()["results"])


def test_a_race_that_a_layer_found_is_on_the_page() -> None:
    import crosscurrent
    from crosscurrent.cli.verify_report import as_report
    from crosscurrent.suite import race_freedom, scenarios
    from crosscurrent.suite.layer import Outcome, Verdict
    from crosscurrent.suite.verification import Cuda, Result

    with Cuda.available().context(), crosscurrent.watch(trace=True) as seen:
        import torch

        lane = torch.cuda.Stream()
        values = torch.ones(4, device="cuda")
        with torch.cuda.stream(lane):
            values * 2
    first, second = scenarios()[:2]
    outcomes = (Outcome.held("no race"), race_freedom.judge(seen))
    results = [
        Result(layer="races", scenario=scenario, outcome=outcome, seconds=1.0)
        for scenario, outcome in zip((first, second), outcomes, strict=True)
    ]
    report = as_report(results, Cuda.available(), Verdict.FAILED, "")
    assert report.findings == tuple(seen.findings)
    assert report.sections[0].good == (True, False)
    assert second.name in report.sentence


def test_an_interrupt_shows_what_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from crosscurrent.suite import verification

    right = verification.run

    def interrupted(*arguments: Any) -> Any:
        yield next(iter(right(*arguments)))
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "run", interrupted)
    assert main(["verify", "--layers", "exactness", "--json", "out.json"]) == 130
    said = capsys.readouterr()
    assert "60 gradients" in said.out
    assert "exactness: 1 held" in said.out  # and not what it claims when all of them held
    assert "3 of 4 questions were not answered" in said.err
    assert not Path("out.json").exists()


def test_tables_have_no_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("a column", show_edge=False, pad_edge=False)
    table.add_row("a cell")
    show_table(table)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == ["a column", "a cell", ""]
