"""Programs as files: what is written comes back, and what is wrong with a file is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from crosscurrent.schedules.errors import DamagedError, NotReplayableError, VersionError
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.storage import load, save
from crosscurrent.schedules.strategies import LatestAndEarliest

if TYPE_CHECKING:
    from .conftest import Hand

MAIN, SIDE = 1, 2


@pytest.fixture
def program(hand: Hand) -> Program:
    x = hand.full(MAIN, torch.arange(6, dtype=torch.float64))
    y = hand.empty(MAIN, 6)
    constant = torch.tensor([float("nan"), 1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    hand.call(MAIN, "aten::mul.Tensor", x, constant, out=y)
    hand.call(MAIN, "aten::clamp_", y, float("-inf"), 12.5, inplace=True)
    hand.edge(MAIN, SIDE)
    hand.synchronize(MAIN, SIDE)
    z = hand.empty(SIDE, 2, 6)
    hand.call(SIDE, "aten::stack", [y, x], out=z)
    hand.give(SIDE, {x: torch.arange(6, dtype=torch.float64)}, {y: torch.ones(6, dtype=torch.float64)})
    hand.use(x.block, SIDE)
    hand.read(SIDE, z, "seen")
    hand.free(x.block)
    w = hand.empty(MAIN, 6, dtype=torch.float32, pinned=True)
    hand.call(MAIN, "aten::_to_copy", y, dtype=torch.float32, device=torch.device("cuda"), out=w)
    return hand.program(z=z, w=w)


def test_a_program_comes_back_as_it_was(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "step.ccp"
    save(program, path)
    again = load(path)
    assert again.records == program.records
    assert again.fingerprint == program.fingerprint
    assert again.info == program.info
    assert (again.names, again.host_reads, again.device) == (program.names, program.host_reads, "cpu")
    one, other = Replayer(program), Replayer(again)
    linear = one.order.program
    assert one.run(linear).same
    assert other.run(linear).same
    for name in program.names:
        assert torch.equal(
            one.final(program.names[name]).nan_to_num(9), other.final(again.names[name]).nan_to_num(9)
        )
    early = next(p.linear for p in LatestAndEarliest().proposals(one.space) if p.linear != linear)
    assert one.run(early) == other.run(early)


def test_any_damaged_byte_is_noticed(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "step.ccp"
    save(program, path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 53):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        with pytest.raises((DamagedError, VersionError)):
            load(path)
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError):
            load(path)


def test_another_version_is_named(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "step.ccp"
    save(program, path)
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, str(path), metadata={**metadata, "version": "7"})
    with pytest.raises(VersionError, match=r"'7'.*'1'"):
        load(path)


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(2)}, str(path))
    with pytest.raises(DamagedError, match="no program"):
        load(path)
    path.write_text("hello")
    with pytest.raises(DamagedError):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")


def test_what_lives_in_this_process_only_cannot_be_saved(program: Program, tmp_path: Path) -> None:
    index, actions = next(iter(program.actions.items()))
    changed = {**program.actions, index: (actions[0]._replace(func=torch.mul),)}
    program = dataclasses.replace(program, actions=changed)
    with pytest.raises(NotReplayableError, match="this process"):
        save(program, tmp_path / "step.ccp")
