"""``crosscurrent train``: learning, interruptions, resuming to the bit, wrong use."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.cli import main
from crosscurrent.train.checkpoint import load

SMALL = (
    "--model.num_layers=2",
    "--model.embed_size=16",
    "--model.num_heads=2",
    "--model.num_groups=1",
    "--batch_size=2",
    "--sequence_length=72",
    "--kv_cache.cache_length=24",
    "--kv_cache.grace_period=2",
    "--grad.chunk_size=8",
)
"""A run whose steps take milliseconds, over sequences of three caches."""

simulated_only = pytest.mark.simulation


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _train(*options: str) -> int:
    return main(["train", "--device", "cpu", *SMALL, *options])


def _start(*options: str) -> subprocess.Popen[str]:
    """The same in a process of its own, to be sent signals."""
    command = "import sys; from crosscurrent.cli import main; sys.exit(main())"
    arguments = [sys.executable, "-u", "-c", command, "train", "--device", "cpu", *SMALL, *options]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(rf"step +{step}/", line):
            return
    raise AssertionError(f"the run ended before step {step}")


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+)", output, flags=re.MULTILINE)]


def _assert_same_state(one: str, other: str) -> None:
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_training_lowers_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert _train("--steps", "30", "--optimizer.learning_rate", "0.01") == 0
    losses = _losses(capsys.readouterr().out)
    assert len(losses) == 30
    # It starts at guessing among 256 bytes, and has at least to learn which of them text is made of.
    assert losses[0] == pytest.approx(5.545, abs=0.05)  # log(256)
    assert sum(losses[-5:]) / 5 < 4.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_train_and_resume(dtype: torch.dtype) -> None:
    options = ["--dtype", str(dtype).removeprefix("torch.")]
    assert _train("--steps", "3", "--checkpoint.file", "whole", *options) == 0
    assert _train("--steps", "2", "--checkpoint.file", "run", *options) == 0
    assert _train("--steps", "3", "--checkpoint.file", "run", "--resume", *options) == 0
    _assert_same_state("run", "whole")
    assert load_file("run")["model/head_model.weight"].dtype is dtype


def test_documents_and_a_configuration_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.txt").write_text("abcd" * 100, encoding="utf-8")
    Path("two.txt").write_text("efgh" * 50, encoding="utf-8")
    Path("run.yaml").write_text(
        "steps: 2\noptimizer:\n  name: sgd\nkv_cache:\n  name: lastrec-torch-quantized8\n  grace_period: 0\n",
        encoding="utf-8",
    )
    assert _train("--text", "one.txt", "two.txt", "--config", "run.yaml") == 0
    output = capsys.readouterr().out
    assert "600 bytes in 2 document(s)" in output
    assert "cache lastrec-torch-quantized8 of 24" in output
    assert len(_losses(output)) == 2


def test_lora_trains_only_its_updates() -> None:
    run = ["--lora.rank", "2", "--seed", "3"]
    assert _train("--steps", "1", "--checkpoint.file", "one", *run) == 0
    assert _train("--steps", "3", "--checkpoint.file", "three", *run) == 0
    before, after = load_file("one"), load_file("three")
    changed = {n for n in before if n.startswith("model/") and not torch.equal(before[n], after[n])}
    assert changed
    assert all("lora_" in name for name in changed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_and_resumed_run_goes_on_to_the_bit(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with _start("--steps", "100000", "--checkpoint.file", "run") as process:
        _wait_for_step(process, 3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    found = re.search(r"interrupted after step (\d+); the same command with --resume goes on", errors)
    assert found is not None, errors
    steps = str(int(found[1]) + 3)

    assert _train("--steps", steps, "--checkpoint.file", "run", "--resume") == 0
    resumed = _losses(capsys.readouterr().out)
    assert _train("--steps", steps, "--checkpoint.file", "whole") == 0
    assert resumed == _losses(capsys.readouterr().out)[-3:]
    _assert_same_state("run", "whole")


def test_a_killed_run_goes_on_from_its_last_checkpoint() -> None:
    options = ["--checkpoint.file", "run", "--checkpoint.every", "1"]
    with _start("--steps", "100000", *options) as process:
        _wait_for_step(process, 3)
        process.kill()
        process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    done = load(Path("run")).step
    assert done >= 2  # the third step is shown before it is saved
    steps = str(done + 2)
    assert _train("--steps", steps, *options, "--resume") == 0
    assert _train("--steps", steps, "--checkpoint.file", "whole") == 0
    _assert_same_state("run", "whole")


def test_interrupting_without_a_checkpoint_says_how_to_have_one() -> None:
    with _start("--steps", "100000") as process:
        _wait_for_step(process, 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "--checkpoint.file FILE makes a run resumable" in errors
    assert os.listdir() == []


def test_a_finished_run_resumed_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "2", "--checkpoint.file", "run"]
    assert _train(*options) == 0
    assert _train(*options, "--resume") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_run_is_never_overwritten_nor_mixed_with_another(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "2", "--checkpoint.file", "run"]
    assert _train(*options) == 0
    content = Path("run").read_bytes()
    assert _train(*options) == 2
    assert "--resume" in capsys.readouterr().err
    assert _train(*options, "--resume", "--seed", "8", "--optimizer.learning_rate", "0.5") == 2
    assert "optimizer.learning_rate was 0.003, is 0.5; run.seed was 0, is 8" in capsys.readouterr().err
    Path("other.txt").write_text("another text", encoding="utf-8")
    assert _train(*options, "--resume", "--text", "other.txt") == 2
    assert "text was" in capsys.readouterr().err
    assert Path("run").read_bytes() == content


def test_what_a_run_would_take_is_told_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert _train("--dry_run", "--checkpoint.file", "run") == 0
    output = capsys.readouterr().out
    assert "parameters" in output
    sizes = {
        name: int(size.replace(",", ""))
        for name, size in re.findall(r"^  (\S.*\S) +([\d,]+) bytes$", output, flags=re.MULTILINE)
    }
    # Inputs of both layers and of the head, 2 x 72 tokens of 16 floats each; h2o's log comes on top.
    assert sizes["layer inputs and replay log"] >= 3 * 2 * 72 * 16 * 4
    assert sizes["total"] == sum(
        sizes[name] for name in ("layer inputs and replay log", "head gradients", "KV checkpoints")
    )
    assert os.listdir() == []


class _MakesTensors(TorchDispatchMode):
    """The bytes of the largest tensor that was made in memory."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type != "meta":
            self.largest = max(self.largest, made.nbytes)
        return made


@simulated_only
@pytest.mark.parametrize("size", ["tiny", "xlarge"])
def test_a_dry_run_tells_of_pinned_memory_and_takes_none(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from crosscurrent import simulate

    with simulate(), _MakesTensors() as made:
        assert main(["train", "--dry_run", "--device", "cuda", "--model.size", size]) == 0
    assert made.largest < 1 << 16
    (total,) = re.findall(r"^  total +([\d,]+) bytes$", output := capsys.readouterr().out, re.MULTILINE)
    (pinned,) = re.findall(r"^  pinned memory reserved +([\d,]+) bytes$", output, re.MULTILINE)
    total, pinned = (int(number.replace(",", "")) for number in (total, pinned))
    assert total < pinned < 2 * total


@pytest.mark.parametrize(
    ("guard", "said"),
    [("False", "lower --optimizer.learning_rate"), ("True", "NaN or infinity in gpt_model.embedding.weight")],
)
def test_a_run_that_diverges_stops_and_keeps_the_state_before(
    guard: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--steps", "50", "--checkpoint.file", "run", "--optimizer.name", "sgd"]
    options += ["--optimizer.learning_rate", "1e38", "--optimizer.warmup_steps", "0"]
    assert _train(*options, "--grad.nan_guard", guard) == 1
    assert said in capsys.readouterr().err
    assert all(tensor.isfinite().all() for tensor in load_file("run").values())


@simulated_only
def test_asynchronous_transfers_change_no_bit_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    from crosscurrent import simulate

    for flag, file in (("True", "on"), ("False", "off")):
        with simulate():
            options = ["--device", "cuda", "--grad.async_cpu_transfer", flag, "--checkpoint.file", file]
            assert main(["train", *SMALL, "--steps", "2", *options]) == 0
    output = capsys.readouterr().out
    assert "on cuda" in output
    assert re.search(r"device \d+ MiB  pinned \d+ MiB", output)
    _assert_same_state("on", "off")


@simulated_only
def test_a_run_goes_on_to_the_bit_with_other_ways_to_issue_and_move() -> None:
    from crosscurrent import simulate

    options = ["train", *SMALL, "--device", "cuda", "--checkpoint.file"]
    other = ["--grad.cuda_graphs", "True", "--grad.async_cpu_transfer", "True", "--grad.nan_guard", "True"]
    with simulate():
        assert main([*options, "whole", "--steps", "4"]) == 0
        assert main([*options, "run", "--steps", "1"]) == 0
        assert main([*options, "run", "--steps", "4", "--resume", *other]) == 0
    _assert_same_state("run", "whole")


@simulated_only
def test_a_run_goes_on_on_the_device_that_it_was_on(capsys: pytest.CaptureFixture[str]) -> None:
    from crosscurrent import simulate

    options = ["train", *SMALL, "--checkpoint.file", "run", "--steps"]
    with simulate():
        assert main([*options, "1", "--device", "cpu"]) == 0
        assert main([*options, "2", "--device", "cuda", "--resume"]) == 2
    assert "device was cpu, is cuda" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--kv_cache.name", "h3o"], "known are dense, lastrec, h2o"),
        (["--grad.chunk_size", "25"], "grad.chunk_size is 25"),
        (["--kv_cache.name", "dense", "--kv_cache.grace_period", "0"], "dense cache keeps every token"),
        (["--grad.async_cpu_transfer", "True", "--grad.layercp_pin_memory", "False"], "async_cpu_transfer"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--resume"], "--checkpoint.file"),
        (["--resume", "--checkpoint.file", "missing"], "there is no checkpoint missing"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--checkpoint.every", "0"], "--checkpoint.every must be at least 1"),
        (["--batch_size", "0"], "batch_size must be at least 1"),
        (["--optimizer.learning_rate", "-1"], "learning_rate must be above 0"),
        (["--model.num_heads", "3"], "num_heads"),
        (["--lora.rank", "2", "--lora.dropout", "0.5"], "lora.dropout"),
        (["--grad.layercp_qname", "zip"], "choose one of"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--checkpoint.file", "/dev/null/run"], "/dev/null/run cannot be saved: Not a directory"),
        (["--checkpoint.file", "a" * 250], "cannot be saved: File name too long"),
        (["--dry_run", "--resume", "--checkpoint.file", "missing"], "there is no checkpoint missing"),
        (["--checkpoint.file", ""], "--checkpoint.file names a file, got ''"),
        (["--checkpoint.file", "."], "--checkpoint.file names a file, got '.'"),
        (["--num_threads", "1025"], "num_threads must be at most 1024, got 1025"),
        (["--seed", str(1 << 64)], "seed must be 0 or more, and below 2 to the 64th"),
    ],
)
def test_wrong_use_is_one_line_that_says_what_to_do(
    options: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(*options) == 2
    error = capsys.readouterr().err
    assert advice in error
    assert error.count("\n") == 1


@simulated_only
def test_a_device_that_is_not_there_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
