"""``crosscurrent bench cpu-small``: what it writes, what it says, and that a wrong gradient fails it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscurrent.bench import runner
from crosscurrent.bench.configurations import CONFIGURATIONS
from crosscurrent.bench.counts import count
from crosscurrent.bench.page import BEGIN, END
from crosscurrent.cli import main
from crosscurrent.gradient.call import Call
from crosscurrent.gradient.long_context import LongContextGradientModel

SMALL = CONFIGURATIONS["cpu-small"]
TIMES = ("forward", "backward", "step", "host_forward", "host_backward")

simulated_only = pytest.mark.simulation


@pytest.mark.simulation
def test_the_document_says_what_was_measured(measured: dict[str, Any]) -> None:
    assert (measured["format"], measured["version"], measured["verdict"]) == (
        "crosscurrent bench",
        1,
        "equal",
    )
    assert measured["torch"] == torch.__version__
    assert measured["errors"] == {}
    (result,) = measured["results"]
    assert (result["name"], result["simulated"]) == ("cpu-small", True)
    assert result["clock"] == "model clock of the simulation"
    assert result["description"] == SMALL.description()
    assert any("deterministic" in note for note in measured["notes"])
    assert any(note.startswith("Simulated:") for note in measured["notes"])


@pytest.mark.simulation
def test_medians_ratios_and_shares_follow_from_the_steps(measured: dict[str, Any]) -> None:
    (result,) = measured["results"]
    for flag in ("off", "on"):
        steps = result[flag]["all_steps"]
        assert len(steps) == result["repeats"] == SMALL.repeats
        for name in TIMES:
            assert result[flag][f"{name}_seconds"] == statistics.median(step[name] for step in steps)
            assert all(step[name] > 0 for step in steps)
        assert all(step["step"] == step["forward"] + step["backward"] for step in steps)
        assert result[flag]["roofline_share"] == result["roofline"]["seconds"] / result[flag]["step_seconds"]
    for name in ("forward", "backward", "step"):
        off, on = (result[flag][f"{name}_seconds"] for flag in ("off", "on"))
        assert result["ratio"][name] == off / on


@pytest.mark.simulation
def test_the_roofline_is_that_of_the_counts_and_rates(measured: dict[str, Any]) -> None:
    (result,) = measured["results"]
    counts, bound = count(SMALL), result["roofline"]
    for name, counted in (("forward", counts.forward), ("backward", counts.backward)):
        assert bound[name]["operations"] == counted.operations
        assert bound[name]["bytes_to_device"] == counted.to_device
        assert bound[name]["bytes_to_host"] == counted.to_host
        rate = result["rates"]["operations_per_second"]
        assert bound[name]["operation_seconds"] == counted.operations / rate
        assert bound[name]["seconds"] == max(bound[name]["operation_seconds"], bound[name]["byte_seconds"])
    assert bound["seconds"] == bound["forward"]["seconds"] + bound["backward"]["seconds"]
    assert len(result["rates"]["products"]) == len(counts.products)


@pytest.mark.simulation
def test_memory_and_overlap_of_each_flag(measured: dict[str, Any]) -> None:
    (result,) = measured["results"]
    parameters = sum(
        each.numel() * each.itemsize
        for part in runner.make_parts(SMALL, device="cpu")
        for each in part.parameters()
    )
    for flag in ("off", "on"):
        # Parameters and their gradients are part of it.
        assert result[flag]["peak_device_bytes"] > 2 * parameters
        assert result[flag]["peak_pinned_bytes"] > 0
        assert result[flag]["pinned_is_measured"] is False
        found = result[flag]["overlap"]
        assert found["modelled"]
        assert found["hidden_share"] == found["hidden"] / found["transfer"]
        assert (found["host_waits"], found["host_waits_at"]) == (0, [])
    moved = sum(part["bytes"] for part in result["on"]["overlap"]["by_direction"])
    counts = count(SMALL)
    assert moved == sum(each.to_device + each.to_host for each in (counts.forward, counts.backward))


@pytest.mark.simulation
def test_the_comparison_covers_every_parameter(measured: dict[str, Any]) -> None:
    (result,) = measured["results"]
    parts = runner.make_parts(SMALL, device="cpu")
    assert result["comparison"]["equal"] is True
    assert result["comparison"]["gradients"] == sum(len(list(part.parameters())) for part in parts)
    assert result["comparison"]["loss_off"] == result["comparison"]["loss_on"]


def _plant(monkeypatch: pytest.MonkeyPatch, *, factor: float) -> None:
    """A bug in the gradient: with the flag on, the last parameter's comes out times a factor."""
    right = LongContextGradientModel._run_backward

    def wrong(
        self: LongContextGradientModel, call: Call, grad_loss: Tensor, parameters: Sequence[nn.Parameter]
    ) -> list[Tensor | None]:
        *gradients, last = right(self, call, grad_loss, parameters)
        assert last is not None
        return [*gradients, last * factor if call.setup.args.async_cpu_transfer else last]

    monkeypatch.setattr(LongContextGradientModel, "_run_backward", wrong)


@simulated_only
def test_a_wrong_gradient_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _plant(monkeypatch, factor=1 + 2.0**-20)
    file = tmp_path / "bench.json"
    assert main(["bench", "cpu-small", "--repeats", "1", "--json", str(file)]) == 1
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["verdict"] == "different"
    comparison = document["results"][0]["comparison"]
    assert comparison["equal"] is False
    assert comparison["different"] == ["head_model.norm.weight"]
    assert comparison["not_finite"] == []
    # It was as fast as ever, which does not help.
    assert document["results"][0]["on"]["step_seconds"] > 0
    said = capsys.readouterr().out
    assert "WRONG: 1 of 30 gradients differ, first head_model.norm.weight" in said
    assert "DIFFERENT" in said


@simulated_only
def test_what_cannot_be_measured_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # One more token than the ids of the last column: the model refuses the batch.
    broken = replace(SMALL, num_targets=SMALL.sequence_length + 1)
    monkeypatch.setitem(CONFIGURATIONS, "cpu-small", broken)
    file = tmp_path / "bench.json"
    assert main(["bench", "cpu-small", "--json", str(file)]) == 3
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["verdict"] == "no verdict"
    assert "targets are longer than inputs" in document["errors"]["cpu-small"]
    assert "cpu-small could not be measured: ValueError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name what to measure: h200-a, h200-b, h200-c, cpu-small"),
        (["h200-z"], "there is no configuration 'h200-z'"),
        (["cpu-small", "--repeats", "0"], "repeats must be at least 1, got 0"),
        (["cpu-small", "--results", "x.json"], "--results measures nothing"),
        (["--results", "x.json"], "x.json: No such file"),
        (["cpu-small", "--page", "page.md"], "page.md: No such file"),
        pytest.param(
            ["cpu-small", "--json", "nowhere/x.json"],
            "there is no folder nowhere",
            marks=pytest.mark.simulation,
        ),
    ],
)
def test_wrong_use_measures_nothing(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.no_gpu
def test_without_a_gpu_the_large_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu-small", "h200-a"]) == 2
    assert "h200-a needs a CUDA device, and this machine has none" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_the_simulated_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu-small"]) == 2
    assert "cpu-small is measured in simulation" in capsys.readouterr().err


@pytest.mark.simulation
def test_results_are_shown_again_and_put_into_a_page(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "bench.json", tmp_path / "page.md"
    file.write_text(json.dumps(measured), encoding="utf-8")
    page.write_text(f"# Speed\n\n{BEGIN}\n{END}\n\nMore.\n", encoding="utf-8")
    assert main(["bench", "--results", str(file), "--page", str(page)]) == 0
    assert "off and on agree bit for bit" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Speed\n")
    assert text.endswith("More.\n")
    assert "| cpu-small | on |" in text


@pytest.mark.simulation
def test_results_that_were_wrong_stay_wrong(measured: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(measured | {"verdict": "different"}), encoding="utf-8")
    assert main(["bench", "--results", str(file)]) == 1


@pytest.mark.gpu
def test_a_small_one_on_a_real_device() -> None:
    result = runner.run(replace(SMALL, name="small", simulated=False, repeats=2))
    assert result.comparison.is_right, result.comparison.sentence()
    for flag in (result.off, result.on):
        assert flag.peaks.pinned_is_measured
        # What the model asks for is part of what the allocator gives out; ids add a little.
        assert flag.peaks.pinned > 0
        assert not flag.profile.overlap.modelled
        counts = count(SMALL)
        moved = sum(part.nbytes for part in flag.profile.overlap.by_direction)
        assert moved == sum(each.to_device + each.to_host for each in (counts.forward, counts.backward))
        # Looking for call sites would have slowed the host down.
        assert [part.name for part in flag.profile.overlap.by_site] == ["unknown place"]
    assert result.on.profile.overlap.blocked_by == ()
