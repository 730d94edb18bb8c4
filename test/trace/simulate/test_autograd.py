"""Backward passes: on which stream each op runs, and what waits for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from crosscurrent.trace.simulate import Simulation

pytestmark = pytest.mark.simulation


def test_one_stream_needs_no_edges(simulation: Simulation, listener: Any) -> None:
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    (leaf * leaf).sum().backward()
    assert listener.orders() == []
    assert {stream for _, stream in listener.ops()} == {0}
    assert leaf.grad is not None
    assert leaf.grad.is_cuda


def test_a_backward_op_runs_on_the_stream_of_its_forward_op(simulation: Simulation, listener: Any) -> None:
    side = torch.cuda.Stream()
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    doubled = leaf * 2
    with torch.cuda.stream(side):
        sine = doubled.sin()
    total = sine.sum()
    listener.heard.clear()
    total.backward()
    assert listener.ops() == [
        ("ones_like", 0),
        ("cos", side.stream_id),
        ("mul", side.stream_id),
        ("mul", 0),
    ]
    # sum -> sin, sin -> mul; the leaf's stream is the caller's, so nothing is left to join.
    assert listener.orders() == [(0, side.stream_id), (side.stream_id, 0)]
    assert torch.cuda.current_stream().stream_id == 0


def test_roots_and_leaves_join_the_stream_around_backward(simulation: Simulation, listener: Any) -> None:
    side, around = torch.cuda.Stream(), torch.cuda.Stream()
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        total = (leaf * 2).sum()
    listener.heard.clear()
    with torch.cuda.stream(around):
        total.backward()
        assert torch.cuda.current_stream() == around
    assert [stream for name, stream in listener.ops() if name == "mul"] == [side.stream_id]
    assert listener.orders() == [(around.stream_id, side.stream_id), (side.stream_id, around.stream_id)]


def test_streams_of_other_nodes_are_not_joined(simulation: Simulation, listener: Any) -> None:
    """Two branches on two streams: each waits for the root, neither for the other."""
    left, right = torch.cuda.Stream(), torch.cuda.Stream()
    leaves = [torch.ones(3, device="cuda", requires_grad=True) for _ in range(2)]
    with torch.cuda.stream(left):
        one = leaves[0].sin()
    with torch.cuda.stream(right):
        other = leaves[1].sin()
    total = (one + other).sum()
    listener.heard.clear()
    total.backward()
    pairs = set(listener.orders())
    assert pairs == {(0, left.stream_id), (0, right.stream_id), (left.stream_id, 0), (right.stream_id, 0)}


def test_gradients_are_summed_on_the_consumer_stream(simulation: Simulation, listener: Any) -> None:
    side = torch.cuda.Stream()
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        shared = leaf * 2
    total = (shared.sin() + shared.cos()).sum()
    listener.heard.clear()
    total.backward()
    sums = [stream for name, stream in listener.ops() if name in ("add", "add_")]
    assert sums == [side.stream_id]
    # Both producers are joined, each at the point where it was done.
    assert listener.orders()[:2] == [(0, side.stream_id), (0, side.stream_id)]
    assert ("used", (3,), 0, side.stream_id) in listener.heard
    # d/dx (sin 2x + cos 2x) at 1
    expected = 2 * (torch.tensor(2.0).cos() - torch.tensor(2.0).sin())
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad.cpu(), expected)


class _Asks(torch.autograd.Function):
    """Asks for the current stream in backward, before it does anything."""

    seen: int = -1

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        _Asks.seen = torch.cuda.current_stream().stream_id
        inner = torch.cuda.Stream()
        inner.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(inner):
            doubled = grad * 2
        torch.cuda.current_stream().wait_stream(inner)
        return doubled * 1


def test_custom_functions_see_their_stream(simulation: Simulation, listener: Any) -> None:
    side = torch.cuda.Stream()
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        out = _Asks.apply(leaf)
    out.sum().backward()
    assert _Asks.seen == side.stream_id
    assert listener.ops()[-2][1] not in (0, side.stream_id)
    assert listener.ops()[-1] == ("mul", side.stream_id)
    assert torch.cuda.current_stream().stream_id == 0


def test_hooks_run_on_the_stream_of_their_node(simulation: Simulation, listener: Any) -> None:
    side = torch.cuda.Stream()
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        out = leaf * 2
    out.register_hook(lambda grad: grad.neg())
    out.sum().backward()
    assert ("neg", side.stream_id) in listener.ops()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_on_the_right_stream(
    simulation: Simulation, listener: Any, reentrant: bool
) -> None:
    side = torch.cuda.Stream()
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = checkpoint(lambda x: x.sin().exp(), leaf, use_reentrant=reentrant)
    torch.cuda.current_stream().wait_stream(side)
    listener.heard.clear()
    out.sum().backward()
    recomputed = [stream for name, stream in listener.ops() if name in ("sin", "exp")]
    assert recomputed
    assert set(recomputed) == {side.stream_id}
    assert leaf.grad is not None
    one = torch.tensor(1.0)
    assert torch.allclose(leaf.grad.cpu(), one.sin().exp() * one.cos())


def test_saved_tensor_hooks(simulation: Simulation) -> None:
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = leaf * leaf
    out.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]
    assert leaf.grad.is_cuda


def test_only_what_was_asked_for_is_joined(simulation: Simulation, listener: Any) -> None:
    side = torch.cuda.Stream()
    wanted, other = (torch.ones(3, device="cuda", requires_grad=True) for _ in range(2))
    doubled = wanted * 2
    with torch.cuda.stream(side):
        unwanted = other.sin()
    total = (doubled + unwanted).sum()
    listener.heard.clear()
    (grad,) = torch.autograd.grad(total, wanted)
    assert grad.tolist() == [2.0, 2.0, 2.0]
    assert listener.orders() == []


def test_a_graph_of_another_stream_is_joined_for_grad(simulation: Simulation, listener: Any) -> None:
    side = torch.cuda.Stream()
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        total = (leaf * 3).sum()
    listener.heard.clear()
    torch.autograd.grad(total, leaf)
    assert listener.orders() == [(0, side.stream_id), (side.stream_id, 0)]


def test_backward_that_raises_restores_the_stream(simulation: Simulation) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            torch.cuda.current_stream()
            raise ValueError("no gradient")

    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        total = Fails.apply(leaf).sum()
    with pytest.raises(ValueError, match="no gradient"):
        total.backward()
    assert torch.cuda.current_stream().stream_id == 0
    (leaf * 2).sum().backward()
    assert leaf.grad is not None


def test_second_backward_of_a_kept_graph(simulation: Simulation, listener: Any) -> None:
    side = torch.cuda.Stream()
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        total = (leaf * 2).sum()
    total.backward(retain_graph=True)
    first = listener.ops()
    listener.heard.clear()
    total.backward()
    assert [op for op in listener.ops() if op[0] == "mul"] == [op for op in first if op[0] == "mul"][1:]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0, 4.0, 4.0]


def test_double_backward_runs_where_the_first_one_ran(simulation: Simulation, listener: Any) -> None:
    side = torch.cuda.Stream()
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        cube = leaf**3
    (grad,) = torch.autograd.grad(cube.sum(), leaf, create_graph=True)
    listener.heard.clear()
    grad.sum().backward()
    assert {stream for name, stream in listener.ops() if name in ("pow", "mul")} == {side.stream_id}
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [6.0, 6.0, 6.0]


def test_gradients_across_devices(two_devices: Simulation) -> None:
    weight = torch.ones(3, device="cuda:0", requires_grad=True)
    with torch.cuda.stream(torch.cuda.Stream(1)):
        out = (weight * 2).to("cuda:1") * 3
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad.device.index == 0
    assert weight.grad.tolist() == [6.0, 6.0, 6.0]
    assert torch.cuda.current_device() == 0


class _Two(torch.autograd.Function):
    """Two results, of which a caller may use one."""

    devices: tuple[str, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        _Two.devices = str(one.device), str(other.device)
        return one * 2 + other * 3


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1", "cpu"])
def test_missing_gradients_are_zeros_on_the_right_device(two_devices: Simulation, device: str) -> None:
    leaf = torch.ones(3, device=device, requires_grad=True)
    _Two.apply(leaf)[0].sum().backward()
    assert _Two.devices == (device, device)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]


def test_watching_the_nodes_changes_no_op(simulation: Simulation, listener: Any) -> None:
    """Held gradients would be copied where the engine can take them as they are."""
    names = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        leaf = torch.ones(3, device="cuda", requires_grad=True)
        with torch.cuda.stream(stream):
            shared = leaf * 2
            out = (shared.sin() + shared.cos() + shared.exp()).sum()
        listener.heard.clear()
        out.backward()
        names.append([name for name, _ in listener.ops()])
    assert names[0] == names[1]
    assert "clone" not in names[0]


def test_both_inputs_of_one_op(simulation: Simulation, listener: Any) -> None:
    side = torch.cuda.Stream()
    leaf = torch.full((3,), 3.0, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        square = leaf * leaf
    square.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [6.0, 6.0, 6.0]
    assert {stream for name, stream in listener.ops() if name in ("add", "add_", "mul")} == {side.stream_id}
