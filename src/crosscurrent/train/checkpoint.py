"""Training state on disk: one safetensors file, written whole or not at all.

A checkpoint holds everything that the next step depends on: parameters, the optimizer's state, the
state of PyTorch's random generators, and the number of steps done. The learning rate and the data
follow from the number of the step. A run that stops after any step and is resumed takes the same
steps, to the last bit, as one that never stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from crosscurrent.files import in_one_act

FORMAT = "crosscurrent training state"
VERSION = "1"


class CheckpointError(ValueError):
    """A file that is no checkpoint, or the checkpoint of another run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state after ``step`` steps."""

    step: int
    run: Mapping[str, str]
    """What the run is: it has to be the same when it goes on. Names to values, both readable."""
    tensors: Mapping[str, Tensor] = field(repr=False)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file so that, whatever interrupts it, ``path`` holds the old state or the new one."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "step": str(checkpoint.step),
        "tensors": str(len(checkpoint.tensors)),
        "run": json.dumps(dict(checkpoint.run), sort_keys=True),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with in_one_act(path) as partial:
        save_file(
            {name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}, partial, metadata
        )
        _flush(partial)
    _flush(path.parent)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: there is no such file, or it is not one that ``save`` wrote.
    """
    require_there(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
                raise CheckpointError(
                    f"{path} is a safetensors file, but no training state of version {VERSION}; "
                    "name a file that this command wrote"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("tensors") != str(len(tensors)):
                raise CheckpointError(
                    f"{path} has {len(tensors)} tensors, expected the {metadata.get('tensors')} that were "
                    "written; name a file as this command wrote it"
                )
            return Checkpoint(step=int(metadata["step"]), run=json.loads(metadata["run"]), tensors=tensors)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is no checkpoint ({error}); name a file that this command wrote"
        ) from error


def require_there(path: Path) -> None:
    """Refuse to go on from nothing.

    Raises:
        CheckpointError: there is no such file.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}; leave out --resume to start a new run")


def require_same_run(path: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuse to go on with other settings than the run was started with.

    Raises:
        CheckpointError: naming every setting that differs.
    """
    differing = [
        f"{name} was {saved.get(name, 'not set')}, is {wanted.get(name, 'not set')}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{path} is of another run: {'; '.join(differing)}; use its settings, or start anew"
        )


def collect(
    modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Tensor]:
    """Everything that the next step depends on, by name."""
    tensors = dict(_module_tensors(modules))
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            tensors[f"optimizer/{index}/{name}"] = torch.as_tensor(value)
    tensors["random/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def restore(
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Put back what ``collect`` took."""
    with torch.no_grad():
        for name, tensor in _module_tensors(modules).items():
            tensor.copy_(tensors[name])
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            _, index, key = name.split("/")
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["random/cpu"])
    if device.type == "cuda" and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"], device)


def _module_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers; one that several modules share comes once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}/{name}"] = tensor
    return found


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
