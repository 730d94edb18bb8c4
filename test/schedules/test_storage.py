"""Programs as files: what is written comes back, and what is wrong with a file is said."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from crosscurrent.schedules import storage
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


def test_tensors_of_every_kind_are_those_of_the_file(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "step.ccp"
    numbers = torch.complex(torch.arange(6.0), torch.arange(6.0)).reshape(2, 3)
    values = {
        "odd": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(7.0, dtype=torch.float64),
        "half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "transposed": torch.arange(6).reshape(2, 3).T,
        "expanded": torch.tensor([3], dtype=torch.int16).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    save(dataclasses.replace(program, recorded=values), path)
    recorded = load(path).recorded
    assert recorded.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(recorded[name], value), name
        assert recorded[name].dtype == value.dtype
        assert recorded[name].data_ptr() % value.itemsize == 0, "not aligned"
    assert len(load_file(path)) > len(values), "other readers of safetensors take it, too"


def test_saving_and_loading_tell_how_far_they_are(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_PIECE", 16)
    monkeypatch.setattr(storage, "_BATCH", 3)
    path = tmp_path / "step.ccp"
    saving: list[tuple[int, int]] = []
    save(program, path, told=lambda done, most: saving.append((done, most)))
    nbytes = sum(tensor.nbytes for tensor in load_file(path).values())
    assert nbytes > 16
    most = saving[0][1]
    assert {each for _, each in saving} == {most}
    assert (saving[0][0], saving[-1][0]) == (0, most)
    steps = [after - before for (before, _), (after, _) in pairwise(saving)]
    records, buffers, actions = (
        -(-len(each) // 3) for each in (program.records, program.buffers, program.actions)
    )
    described = steps[: records + buffers + actions]
    assert min(records, buffers, actions) > 1
    record, action = max(described[:records]), max(described[-actions:])
    assert 16 < record < action, "by the time that they take"
    assert sum(described) == (
        record * (len(program.records) + len(program.buffers)) / 3 + action * len(program.actions) / 3
    )
    assert sum(steps[len(described) :]) == 2 * nbytes
    assert 0 < min(steps[len(described) :]) <= max(steps[len(described) :]) == 16

    loading: list[tuple[int, int]] = []
    load(path, told=lambda done, most: loading.append((done, most)))
    most = loading[0][1]
    assert {each for _, each in loading} == {most}
    assert (loading[0][0], loading[-1][0]) == (0, most)
    *steps, parse, build = (after - before for (before, _), (after, _) in pairwise(loading))
    assert sum(steps) == nbytes
    assert 0 < min(steps) <= max(steps) == 16
    assert parse == build > 0


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


def test_types_that_the_file_cannot_hold_are_named(program: Program, tmp_path: Path) -> None:
    program = dataclasses.replace(program, recorded={"x": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(NotReplayableError, match="complex128"):
        save(program, tmp_path / "step.ccp")
    assert not (tmp_path / "step.ccp").exists()


def test_a_program_that_nobody_could_read_again_is_not_saved(program: Program, tmp_path: Path) -> None:
    name = "x" * 99_980_000
    path = tmp_path / "step.ccp"
    save(dataclasses.replace(program, recorded={name: torch.ones(2)}), path)
    assert name in load(path).recorded
    path.unlink()
    with pytest.raises(NotReplayableError, match="100,000,000; watch fewer steps"):
        save(dataclasses.replace(program, recorded={name + "x" * 20_000: torch.ones(2)}), path)
    assert not path.exists()


def test_what_lives_in_this_process_only_cannot_be_saved(program: Program, tmp_path: Path) -> None:
    index, actions = next(iter(program.actions.items()))
    changed = {**program.actions, index: (actions[0]._replace(func=torch.mul),)}
    program = dataclasses.replace(program, actions=changed)
    with pytest.raises(NotReplayableError, match="this process"):
        save(program, tmp_path / "step.ccp")
