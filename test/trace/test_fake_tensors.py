"""Tensors that belong to a mode of PyTorch's own: fake and functional ones, and what makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import crosscurrent
from crosscurrent.stress import DelayConfig, How, delays
from crosscurrent.trace.records import Op


@pytest.fixture(params=["run", "run_by_callbacks", "delayed"])
def under(request: pytest.FixtureRequest, machine: Any) -> Callable[..., list[str]]:
    """Run a program under one of the dispatch modes; gives the names of its ops, as far as it knows them."""

    def delayed(program: Callable[[], None]) -> list[str]:
        with machine(), delays(DelayConfig(how=How.RANDOM, seed=1)):
            program()
        return []

    def watched(program: Callable[[], None]) -> list[str]:
        watch: crosscurrent.Watch = request.getfixturevalue(request.param)(program)
        assert not watch.unknown
        return [record.name.split(".")[1] for record in watch.records if isinstance(record, Op)]

    return delayed if request.param == "delayed" else watched


def test_fake_tensors_run_and_touch_nothing(under: Any) -> None:
    def program() -> None:
        with FakeTensorMode():
            x = torch.empty(4, device="cuda")
            y = (x + x).to("cuda") * torch.ones(4, device="cuda")
            assert y.shape == (4,)
        assert (y + 1).shape == (4,)  # its mode is entered for the op

    assert under(program) == []


def test_a_model_of_fake_tensors_has_gradients(under: Any) -> None:
    def program() -> None:
        with FakeTensorMode():
            layer = nn.Linear(4, 2, device="cuda")
            layer(torch.ones(3, 4, device="cuda")).sum().backward()
            assert layer.weight.grad is not None
            assert layer.weight.grad.shape == (2, 4)

    assert under(program) == []


def test_fakes_of_real_tensors_go_with_those_that_are_made(under: Any) -> None:
    def program() -> None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        real = torch.ones(4, device="cuda")
        fake = mode.from_tensor(real)
        with mode:
            assert (fake * torch.ones(4, device="cuda") + real).shape == (4,)

    assert "mul" not in under(program)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_what_is_traced_runs_on_the_device(under: Any, tracing_mode: str) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda")
        traced = make_fx(lambda x: torch.relu(x + 1).sum(), tracing_mode=tracing_mode)(x)  # type: ignore[no-untyped-call]
        assert [node.op for node in traced.graph.nodes].count("call_function") == 3
        total = traced(x)
        assert total.is_cuda
        assert total.item() == 8

    ops = under(program)
    if ops:
        assert ops.count("relu") == (2 if tracing_mode == "real" else 1)


def test_functional_tensors_show_what_they_do(under: Any) -> None:
    def program() -> None:
        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return y.add_(1)

        result = dispatch_functionalize(step)(torch.ones(4, device="cuda"))  # type: ignore[no-untyped-call]
        assert result.is_cuda
        assert result.tolist() == [3.0] * 4

    ops = under(program)
    if ops:
        assert {"mul", "add"} <= set(ops), "without the change in place"


@pytest.fixture
def ranks() -> Iterator[None]:
    """Two ranks, of which this is the first; the other one is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("ranks")
def test_distributed_tensors(under: Any) -> None:
    def program() -> None:
        mesh = dist.device_mesh.init_device_mesh("cuda", (2,))
        sharded = DTensor.from_local(torch.ones(4, device="cuda"), mesh, [Shard(0)], run_check=False)
        local = (sharded * 2).to_local()
        assert local.is_cuda
        assert local.tolist() == [2.0] * 4

    ops = under(program)
    if ops:
        assert ops.count("mul") == 1


@pytest.mark.usefixtures("ranks")
def test_fully_sharded_training(machine: Any) -> None:
    with machine(1):
        mesh = dist.device_mesh.init_device_mesh("cuda", (2,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        with crosscurrent.watch() as watch:
            model(torch.ones(2, 4, device="cuda")).sum().backward()
    assert watch.findings == []
    assert {each.op.split(".")[0] for each in watch.unknown} == {"c10d"}
