"""Programs recorded under simulated CUDA: program order gives the recorded bits, whatever the ops are."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import crosscurrent
from crosscurrent.races.findings import Finding
from crosscurrent.schedules.contents import Contents
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.recording import keep_values
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.storage import load, save
from crosscurrent.schedules.witness import prove
from crosscurrent.trace.records import Op

pytestmark = pytest.mark.simulation

Body = Callable[[], dict[str, Tensor]]


def record(body: Body) -> tuple[Program, list[Finding]]:
    """Run a program under simulated CUDA and keep its values."""
    with crosscurrent.simulate():
        torch.manual_seed(3)
        with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
            keeper.name(body())
        return keeper.program(), seen.findings


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda")


def elementwise() -> dict[str, Tensor]:
    x = rand(3, 4)
    y = (x * 2 - 1).relu_().addcmul(x, x, value=0.5)
    y.clamp_(max=0.7).add_(x.t().contiguous().t(), alpha=3)
    return {"y": y, "where": torch.where(y > 0.5, y, -y), "cat": torch.cat([x, y[:, ::2]], dim=1)}


def matrices() -> dict[str, Tensor]:
    x, w, b = rand(5, 8), rand(16, 8), rand(16)
    y = torch.nn.functional.linear(x, w, b)
    z = torch.baddbmm(rand(2, 5, 5), rand(2, 5, 3), rand(2, 3, 5), beta=0.5)
    return {"y": y, "z": z, "softmax": z.softmax(-1), "norm": torch.nn.functional.layer_norm(y, (16,))}


def several_results() -> dict[str, Tensor]:
    x = rand(4, 6)
    values, indices = x.topk(2, dim=1)
    ordered, order = x.sort(dim=1, stable=True)
    return {"values": values, "indices": indices, "ordered": ordered, "order": order, "max": x.max(0)[0]}


def indexing() -> dict[str, Tensor]:
    x = rand(6, 4)
    i = torch.tensor([1, 3], device="cuda")
    x[i] = x[i + 1] * 2
    x.index_add_(0, i, x[:2] + 1)
    x.scatter_(1, torch.zeros(6, 1, dtype=torch.int64, device="cuda"), 9.0)
    x[x > 0.8] = 0
    return {
        "x": x,
        "picked": x[x[:, 0] > 0.1],
        "gather": x.gather(1, torch.ones(6, 2, dtype=torch.int64, device="cuda")),
    }


def lists() -> dict[str, Tensor]:
    many = [rand(3) for _ in range(4)]
    torch._foreach_mul_(many, 2.0)
    more = torch._foreach_add(many, many, alpha=0.5)
    torch._foreach_copy_(many, more)
    return {f"many{i}": one for i, one in enumerate(many)} | {f"more{i}": one for i, one in enumerate(more)}


def random_numbers() -> dict[str, Tensor]:
    x = rand(40)
    y = torch.nn.functional.dropout(x, 0.5)
    z = torch.empty(40, device="cuda").normal_(mean=1.0)
    picked = torch.multinomial(x, 3)
    return {
        "y": y,
        "z": z,
        "bernoulli": torch.bernoulli(x),
        "picked": picked,
        "perm": torch.randperm(9, device="cuda"),
    }


def generators() -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    return {"x": torch.randn(5, device="cuda", generator=generator), "y": rand(5)}


def backward() -> dict[str, Tensor]:
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    )
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(rand(7, 6)), torch.arange(7, device="cuda") % 3)
        loss.backward()
        optimizer.step()
    return {
        "loss": loss.detach(),
        **dict(model.state_dict()),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


def convolution() -> dict[str, Tensor]:
    x = rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    y = torch.nn.functional.conv2d(x, rand(4, 3, 3, 3), padding=1)
    return {"y": y, "pool": torch.nn.functional.max_pool2d(y, 2), "mean": y.mean((2, 3))}


def attention() -> dict[str, Tensor]:
    q, k, v = rand(1, 2, 6, 8), rand(1, 2, 6, 8), rand(1, 2, 6, 8)
    return {"out": torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)}


def types() -> dict[str, Tensor]:
    x = rand(3, 5)
    half, brain = x.half(), x.bfloat16()
    whole = (x * 100).to(torch.int32)
    return {
        "half": half * 2,
        "brain": brain + 1,
        "whole": whole // 3,
        "complex": torch.complex(x, x) * 1j,
        "truth": whole > 50,
    }


def lazily_conjugate() -> dict[str, Tensor]:
    z = torch.complex(rand(3), rand(3))
    return {
        "product": z.conj() * z,
        "copy": z.conj().resolve_conj(),
        "imag": z.conj().imag + 1,
        "conj": z.conj(),
    }


def recurrent() -> dict[str, Tensor]:
    model = torch.nn.LSTM(4, 5).to("cuda")
    out, _ = model(rand(3, 2, 4))
    out.sum().backward()
    grad = model.weight_ih_l0.grad
    assert grad is not None
    return {"out": out.detach(), "grad": grad}


def custom_op() -> dict[str, Tensor]:
    x, y = rand(3), rand(3)
    return {"z": torch.ops.crosscurrent_test.double_and_add(x, y), "x": x}


@torch.library.custom_op("crosscurrent_test::double_and_add", mutates_args={"x"})
def double_and_add(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x + y


def higher_order() -> dict[str, Tensor]:
    q = rand(1, 2, 16, 8)
    return {
        "scan": torch.func.vmap(lambda t: t * 2 + t.sum())(q),
        "grad": torch.func.grad(lambda t: (t**3).sum())(q),
    }


def copies() -> dict[str, Tensor]:
    stream = torch.cuda.Stream()
    x = rand(4, 6)
    stream.wait_stream(torch.cuda.current_stream())
    pinned = torch.zeros(4, 6, pin_memory=True)
    strided = torch.zeros(6, 4, pin_memory=True).t()
    with torch.cuda.stream(stream):
        pinned.copy_(x, non_blocking=True)
        strided.copy_(x, non_blocking=True)
    stream.synchronize()
    pinned[0] += 1
    back = pinned.to("cuda", non_blocking=True)
    from_strided = torch.zeros(4, 6, device="cuda").copy_(strided, non_blocking=True)
    pageable = torch.arange(24.0).reshape(4, 6)
    from_pageable = torch.empty(4, 6, device="cuda").copy_(pageable, non_blocking=True)
    pageable.fill_(0)
    half = torch.zeros(4, 6, dtype=torch.float16, pin_memory=True).copy_(x)
    return {
        "back": back,
        "from_strided": from_strided,
        "from_pageable": from_pageable,
        "half": half,
        "pinned": pinned,
    }


def host_reads() -> dict[str, Tensor]:
    x = rand(5)
    total = x.sum().item()
    many = x.tolist()
    return {"y": x * total + many[0], "found": (x > 0.5).nonzero(), "z": x.cpu().cuda()}


def through_numpy() -> dict[str, Tensor]:
    pinned = torch.zeros(4, pin_memory=True)
    array = pinned.numpy()
    array[:] = 3
    x = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    array[1] = 5  # nobody sees this
    y = pinned.to("cuda", non_blocking=True)
    return {"x": x, "y": y}


def declared() -> dict[str, Tensor]:
    x, y = rand(4), torch.zeros(4, device="cuda")
    crosscurrent.access(reads=[x], writes=[y])
    with torch.utils._python_dispatch._disable_current_modes():
        y.copy_(x * 2)  # a kernel that nobody sees
    return {"z": y + 1}


def memory_that_nobody_wrote() -> dict[str, Tensor]:
    x = torch.empty(6, device="cuda")
    x[:3] = 1
    y = torch.empty_like(x, dtype=torch.int32)
    y[0] = 1
    return {"x": x, "y": y, "sum": x[3:].sum()}


def resizing() -> dict[str, Tensor]:
    x = rand(4)
    x.resize_(9)
    y = rand(3)
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(12)
    y.fill_(2)
    out = torch.empty(0, device="cuda")
    torch.mul(x[:2], 2.0, out=out)
    return {"x": x[:4], "y": y, "out": out}


def graphs() -> dict[str, Tensor]:
    x = rand(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    x.fill_(3)
    graph.replay()
    seen = y.clone()
    x.fill_(4)
    graph.replay()
    return {"seen": seen, "y": y}


def graphs_of_one_pool() -> dict[str, Tensor]:
    x, pool = rand(4), torch.cuda.graph_pool_handle()
    doubled, squared = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(doubled, pool=pool):
        y = x * 2
    with torch.cuda.graph(squared, pool=pool):
        z = y * y
    doubled.replay()
    squared.replay()
    return {"y": y, "z": z}


BODIES: list[Body] = [
    elementwise,
    matrices,
    several_results,
    indexing,
    lists,
    random_numbers,
    generators,
    backward,
    convolution,
    attention,
    types,
    lazily_conjugate,
    recurrent,
    custom_op,
    higher_order,
    copies,
    host_reads,
    through_numpy,
    declared,
    memory_that_nobody_wrote,
    resizing,
    graphs,
    graphs_of_one_pool,
]


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_program_order_gives_the_recorded_bits(body: Body, tmp_path: Path) -> None:
    program, findings = record(body)
    assert not findings
    operations = [record for record in program.records if isinstance(record, Op) and record.accesses]
    assert operations
    assert program.recorded
    replayer = Replayer(program)
    assert replayer.unfaithful() == ()
    save(program, tmp_path / "program")
    again = load(tmp_path / "program")
    assert again.fingerprint == program.fingerprint
    assert Replayer(again).unfaithful() == ()


def test_values_that_are_not_what_was_recorded_are_named() -> None:
    program, _ = record(elementwise)
    program.recorded["y"][0, 0] += 1  # type: ignore[index]
    assert Replayer(program).unfaithful() == ("y",)


def test_the_same_program_has_the_same_fingerprint_and_another_has_not() -> None:
    assert record(backward)[0].fingerprint == record(backward)[0].fingerprint
    assert record(backward)[0].fingerprint != record(matrices)[0].fingerprint


def test_keeping_values_changes_no_trace() -> None:
    with crosscurrent.simulate():
        torch.manual_seed(3)
        with crosscurrent.watch(trace=True) as seen:
            _ = backward()
    plain = [type(r).__name__ for r in seen.records]
    assert [type(r).__name__ for r in record(backward)[0].records][: len(plain)] == plain


def test_a_keeper_that_comes_too_late_is_refused() -> None:
    with crosscurrent.simulate(), crosscurrent.watch(trace=True) as seen:
        torch.ones(2, device="cuda")
        with pytest.raises(crosscurrent.WrongUseError, match="before the watched program"):
            keep_values(seen)


def test_a_watch_that_keeps_no_trace_is_refused() -> None:
    with (
        crosscurrent.simulate(),
        crosscurrent.watch() as seen,
        pytest.raises(crosscurrent.WrongUseError, match="trace=True"),
    ):
        keep_values(seen)


@pytest.mark.gpu
def test_program_order_gives_the_bits_of_a_real_gpu() -> None:
    def body() -> dict[str, Tensor]:
        stream, host = torch.cuda.Stream(), torch.zeros(64, pin_memory=True)
        x = torch.rand(64, device="cuda")
        y = torch.nn.functional.dropout(x, 0.5) @ rand(64, 8)
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)  # a race: it has to be found although values are kept
        torch.cuda.synchronize()
        return {"y": y, "host": host, "sum": y.sum()}

    with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
        keeper.name(body())
    assert len(seen.findings) == 1
    program = keeper.program()
    assert program.device == "cuda"
    replayer = Replayer(program)
    assert replayer.unfaithful() == ()
    (finding,) = prove(program, seen.findings)
    assert finding.witness is not None
    assert "host: 64 of 64 elements changed" in finding.witness


def test_the_handle_of_a_collective_is_no_value() -> None:
    """It is an object of C++ code: trying to keep it must not fail the program."""

    def body() -> dict[str, Tensor]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            x = torch.ones(4, device="cuda")
            dist.all_reduce(x)
        finally:
            dist.destroy_process_group()
        return {"x": x}

    program, findings = record(body)
    assert not findings
    assert [op.name for op in program.records if isinstance(op, Op)] == [
        "aten.ones.default",
        "c10d.allreduce_.default",
    ]


def test_while_a_call_is_looked_at_nobody_else_makes_records(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def other() -> None:
        while (lock := asked.get()) is not None:
            is_free = lock.acquire(blocking=False)
            if is_free:
                lock.release()
            told.put(is_free)

    look = Contents.block_of
    free = []

    def block_of(contents: Contents, tensor: Tensor) -> Any:
        asked.put(contents._tracer.lock)
        free.append(told.get(timeout=60))
        return look(contents, tensor)

    thread = threading.Thread(target=other)
    thread.start()
    monkeypatch.setattr(Contents, "block_of", block_of)
    try:
        record(lambda: {"x": torch.ones(4, device="cuda").add_(1)})
    finally:
        asked.put(None)
        thread.join()
    assert free
    assert not any(free)
