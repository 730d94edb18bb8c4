"""Training state on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from crosscurrent.train import checkpoint as checkpoints
from crosscurrent.train.checkpoint import Checkpoint, CheckpointError, load, require_same_run, save

CPU = torch.device("cpu")


def _example(step: int = 3) -> Checkpoint:
    tensors = {"scalar": torch.tensor(float(step)), "transposed": torch.arange(6.0).view(2, 3).t()}
    return Checkpoint(step=step, run={"seed": "1"}, tensors=tensors)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.safetensors"
    save(path, _example())
    found = load(path)
    assert (found.step, found.run) == (3, {"seed": "1"})
    assert found.tensors.keys() == _example().tensors.keys()
    for name, tensor in _example().tensors.items():
        assert torch.equal(found.tensors[name], tensor)
    assert [file.name for file in path.parent.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("where", ["save_file", "_flush"])
def test_an_interrupted_save_leaves_the_old_state(
    where: str, interrupt: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.safetensors"
    save(path, _example(step=3))

    def fail(*_: object) -> None:
        raise interrupt

    monkeypatch.setattr(checkpoints, where, fail)
    with pytest.raises(interrupt):
        save(path, _example(step=4))
    assert load(path).step == 3
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a checkpoint at all")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    truncated = tmp_path / "truncated"
    save(truncated, _example())
    truncated.write_bytes(truncated.read_bytes()[:-4])
    for name in ("missing", "text", "other.safetensors", "truncated"):
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path / name)


def test_another_run_is_refused_naming_every_setting_that_differs() -> None:
    path = Path("run")
    require_same_run(path, {"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    with pytest.raises(CheckpointError, match=r"a was 1, is 3; c was not set, is 4"):
        require_same_run(path, {"a": "1", "b": "2"}, {"a": "3", "b": "2", "c": "4"})


class _Tied(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.scale = nn.Parameter(torch.randn(8))


def _train(modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        x = modules["embedding"](torch.randint(0, 16, (4,))) + torch.randn(4, 8)
        ((x * modules["head"].scale) @ modules["head"].weight.T).square().mean().backward()
        optimizer.step()


def _build() -> tuple[dict[str, nn.Module], torch.optim.Optimizer]:
    embedding = nn.Embedding(16, 8)
    modules: dict[str, nn.Module] = {"embedding": embedding, "head": _Tied(embedding)}
    return modules, torch.optim.AdamW([embedding.weight, modules["head"].scale], lr=0.1)


def test_restored_state_takes_the_same_steps_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(5)
    modules, optimizer = _build()
    _train(modules, optimizer, steps=2)
    save(tmp_path / "run", Checkpoint(step=2, run={}, tensors=checkpoints.collect(modules, optimizer, CPU)))
    _train(modules, optimizer, steps=3)

    torch.manual_seed(6)
    others, other_optimizer = _build()
    checkpoints.restore(load(tmp_path / "run").tensors, others, other_optimizer, CPU)
    assert others["head"].weight is others["embedding"].weight
    _train(others, other_optimizer, steps=3)
    expected = checkpoints.collect(modules, optimizer, CPU)
    found = checkpoints.collect(others, other_optimizer, CPU)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_checkpoint_without_some_of_its_tensors_is_refused(tmp_path: Path) -> None:
    """One without the optimizer's state, say, would go on from a fresh optimizer."""
    path = tmp_path / "run"
    save(path, _example())
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({"scalar": torch.zeros(())}, path, metadata)
    with pytest.raises(CheckpointError, match="has 1 tensors, expected the 2 that were written"):
        load(path)
