"""``crosscurrent.proving``: findings that carry what they do to values."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crosscurrent
from crosscurrent.schedules import load, run_schedule
from crosscurrent.schedules.naming import tensors_of


def _cuda() -> Any:
    return nullcontext() if torch.cuda.is_available() else crosscurrent.simulate()


def _step(*, waits: bool) -> Tensor:
    lane = torch.cuda.Stream()
    host = torch.ones(8).pin_memory()
    with torch.cuda.stream(lane):
        inputs = host.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(lane)
        inputs.record_stream(torch.cuda.current_stream())
    return inputs * 2


def test_a_finding_carries_its_witness_and_a_schedule_that_repeats_it(tmp_path: Path) -> None:
    with _cuda(), crosscurrent.proving() as proof:
        doubled = _step(waits=False)
        proof.name({"doubled": doubled})
    findings = proof.findings
    first = findings[0]
    assert first.witness is not None
    assert first.witness.startswith("doubled: 8 of 8 elements changed")
    assert first.schedule is not None
    assert [finding.id for finding in findings] == [finding.id for finding in proof.watch.findings]
    assert proof.unfaithful() == ()
    proof.save(tmp_path / "step.ccp")
    again = run_schedule(load(tmp_path / "step.ccp"), first.schedule)
    assert [change.name for change in again.changes][:1] == ["doubled"]


def test_without_a_race_nothing_is_looked_for() -> None:
    with _cuda(), crosscurrent.proving() as proof:
        _step(waits=True)
    assert proof.findings == []
    assert proof.witnesses == {}


def test_what_cannot_be_run_again_leaves_the_finding_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from crosscurrent.schedules import proving

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with _cuda(), crosscurrent.proving() as proof:
        _step(waits=False)
    monkeypatch.setattr(proving.Prover, "prove", fail)
    for finding in proof.findings:
        assert finding.witness == "unproven: running it again failed: MemoryError: no room"
        assert finding.schedule is None


def test_it_has_to_be_entered() -> None:
    with pytest.raises(crosscurrent.WrongUseError, match="with crosscurrent"):
        crosscurrent.proving().name({})


def test_names_are_those_of_the_program() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    batches = [torch.ones(1), torch.zeros(1)]
    names = tensors_of(
        {"__hidden__": torch.ones(1), "model": model, "again": model.weight, "batches": batches,
         "state": {"step": torch.ones(1), 3: (torch.ones(1),)}, "number": 7}
    )  # fmt: skip
    assert list(names) == [
        "model.weight", "model.weight.grad", "model.bias", "model.bias.grad",
        "batches[0]", "batches[1]", "state['step']", "state[3][0]",
    ]  # fmt: skip


def test_containers_that_hold_themselves_and_modules_that_refuse_have_no_names() -> None:
    class Refuses(nn.Module):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("not now")

    endless: list[object] = []
    endless.append(endless)
    assert tensors_of({"endless": endless, "model": Refuses()}) == {}
