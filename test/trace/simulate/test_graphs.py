"""CUDA graphs: capture without effect, replay at the captured addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from crosscurrent.trace.simulate import Simulation

pytestmark = pytest.mark.simulation


def test_capture_has_no_effect_and_replay_has(simulation: Simulation) -> None:
    static, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = static * 2
        total.add_(doubled)
    assert total.tolist() == [0.0, 0.0, 0.0]
    assert doubled.isnan().all()
    graph.replay()
    assert doubled.tolist() == [2.0, 2.0, 2.0]
    static.fill_(5.0)
    graph.replay()
    assert doubled.tolist() == [10.0, 10.0, 10.0]
    assert total.tolist() == [12.0, 12.0, 12.0]


def test_tracers_hear_of_replays_on_the_replaying_stream(simulation: Simulation, listener: Any) -> None:
    static = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    listener.heard.clear()
    with torch.cuda.graph(graph):
        (static * 2).sin_()
    assert listener.ops() == []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.replay()
    assert listener.ops() == [("mul", stream.stream_id), ("sin_", stream.stream_id)]
    graph.replay()
    assert listener.ops()[2:] == [("mul", 0), ("sin_", 0)]
    # A graph that is launched again starts after its launch before.
    assert (stream.stream_id, 0) in listener.orders()


def test_a_graph_keeps_no_node_of_autograd_alive(simulation: Simulation) -> None:
    """It would run on the stream of the capture, long after that is over."""
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    leaf.grad = torch.zeros_like(leaf)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = leaf * 2
        get_gradient_edge(leaf).node.metadata["captured"] = True
        doubled.sum().backward()
    assert "captured" in get_gradient_edge(leaf).node.metadata
    del doubled
    assert "captured" not in get_gradient_edge(leaf).node.metadata
    graph.replay()
    assert leaf.grad.tolist() == [2.0] * 3


def test_branches_have_lanes_of_their_own(simulation: Simulation, listener: Any) -> None:
    static = torch.ones(3, device="cuda")
    graph, branch = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(branch):
            one = static + 1
        two = static + 2
        torch.cuda.current_stream().wait_stream(branch)
        both = one + two
    listener.heard.clear()
    graph.replay()
    assert both.tolist() == [5.0, 5.0, 5.0]
    lanes = [stream for _, stream in listener.ops()]
    assert lanes[1] == lanes[2] == 0
    assert lanes[0] not in (0, branch.stream_id)
    assert listener.orders() == [(0, lanes[0]), (lanes[0], 0)]


def test_unjoined_work_is_an_error(simulation: Simulation) -> None:
    static = torch.ones(3, device="cuda")
    branch = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(branch):
            static + 1
        with pytest.raises(RuntimeError, match="unjoined work"):
            graph.capture_end()
    assert (static + 1).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "illegal",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().query(),
        lambda x: torch.cuda.current_stream().record_event().synchronize(),
    ],
)
def test_what_cannot_be_captured(simulation: Simulation, illegal: Any) -> None:
    tensor = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            illegal(tensor)
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_copies_from_pinned_memory_can_be_captured(simulation: Simulation) -> None:
    pinned, target = torch.full((3,), 4.0, pin_memory=True), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(pinned, non_blocking=True)
    assert target.tolist() == [0.0, 0.0, 0.0]
    graph.replay()
    assert target.tolist() == [4.0, 4.0, 4.0]


def test_events_do_not_cross_the_border_of_a_capture(simulation: Simulation) -> None:
    outside = torch.cuda.Event()
    outside.record()
    inside = torch.cuda.Event()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="uncaptured work"):
            torch.cuda.current_stream().wait_event(outside)
        inside.record()
        with pytest.raises(RuntimeError, match="previous error"):
            graph.capture_end()
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        torch.cuda.current_stream().wait_event(inside)
    inside.record()
    torch.cuda.current_stream().wait_event(inside)


def test_the_default_stream_cannot_be_captured(simulation: Simulation) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_capture_is_visible(simulation: Simulation) -> None:
    assert not torch.cuda.is_current_stream_capturing()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert torch.cuda.is_current_stream_capturing()
        assert torch.accelerator.current_stream().is_capturing()
    assert not torch.cuda.is_current_stream_capturing()


def test_a_training_step(simulation: Simulation) -> None:
    """The captured step moves the weights as the same steps without a graph do."""
    torch.manual_seed(0)
    weights = []
    for captured in (False, True):
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        static = torch.randn(5, 3, device="cuda")

        def step(module: Any = module, optimizer: Any = optimizer, static: Any = static) -> None:
            optimizer.zero_grad(set_to_none=True)
            module(static).square().mean().backward()
            optimizer.step()

        with torch.cuda.stream(torch.cuda.Stream()):
            step()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        for _ in range(3):
            graph.replay() if captured else step()
        weights.append(torch.cat([p.detach().flatten().cpu() for p in module.parameters()]))
    assert torch.equal(weights[0], weights[1])


def test_replays_draw_new_random_numbers(simulation: Simulation) -> None:
    graph = torch.cuda.CUDAGraph()
    state = torch.cuda.get_rng_state()
    with torch.cuda.graph(graph):
        noise = torch.rand(4, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    graph.replay()
    first = noise.clone()
    graph.replay()
    assert not torch.equal(first, noise)
    torch.cuda.set_rng_state(state)
    graph.replay()
    assert torch.equal(first, noise)


def test_helpers_of_composite_ops_are_captured(simulation: Simulation) -> None:
    """C++ code makes helpers without a word on the device, as this call of the dispatcher does."""
    static = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        helper = torch.ops.aten.zeros.default([3], device=torch.device("cpu"))
        helper.add_(static)
    for _ in range(2):
        graph.replay()
        assert helper.tolist() == [1.0, 1.0, 1.0]
        assert helper.is_cuda


def test_replays_take_no_memory(simulation: Simulation) -> None:
    static = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static * 2 + 1
    graph.replay()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        graph.replay()
    assert torch.cuda.max_memory_allocated() == before
    assert out[0].item() == 3.0


def test_graphed_callables(simulation: Simulation) -> None:
    module = torch.nn.Linear(3, 2).cuda()
    graphed = torch.cuda.make_graphed_callables(module, (torch.randn(4, 3, device="cuda"),))
    batch = torch.randn(4, 3, device="cuda")
    out = graphed(batch)
    assert torch.equal(out, torch.nn.functional.linear(batch, module.weight, module.bias))
    out.sum().backward()
    assert module.weight.grad is not None
    # The same sums in the same order, in a graph or not.
    assert torch.equal(module.weight.grad, batch.sum(0).expand(2, 3))


def test_a_graph_is_captured_once(simulation: Simulation) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(2, device="cuda")
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        pytest.raises(RuntimeError, match="already owns a captured graph"),
    ):
        graph.capture_begin()
    graph.reset()
    with torch.cuda.graph(graph):
        out = torch.ones(2, device="cuda")
    graph.replay()
    assert out.tolist() == [1.0, 1.0]
