"""Graphs, as the taps on a real GPU report them: a capture runs nothing, each replay does it all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import crosscurrent
from crosscurrent.trace.records import Alloc, Free, Op


def captured_ops(machine: Any, wait: bool, again: bool = False) -> crosscurrent.Watch:
    """``x.add_(1)`` and a temporary, captured once and replayed on a side stream and on the main one.

    As two executable graphs, or (``again``) as two launches of one.
    """
    with machine(), crosscurrent.watch(trace=True) as watch:
        tracer = watch.tracer
        x = torch.zeros(4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        tracer.capture_started()
        x.add_(1)
        y = x * 2
        del y
        graph = tracer.capture_ended()
        with torch.cuda.stream(side):
            launched = tracer.replayed(graph, 0)
        if wait:
            torch.cuda.current_stream().wait_stream(side)
        tracer.replayed(graph, 0, launched if again else None)
        torch.empty(4, device="cuda").fill_(0)
    return watch


def test_replays_on_two_streams_race(machine: Any) -> None:
    watch = captured_ops(machine, wait=False)
    assert watch.findings
    assert {finding.first.op for finding in watch.findings} <= {"aten.add_.Tensor", "aten.mul.Tensor"}


def test_launches_of_one_graph_are_ordered(machine: Any) -> None:
    """CUDA starts an executable graph after its own earlier launches."""
    assert captured_ops(machine, wait=False, again=True).findings == []


def graphs_of_one_pool(share: bool, wait: bool) -> None:
    """Two graphs on two streams; what the first captured and freed may serve the second."""
    x, first, second = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        y = x * 2
    del y
    with torch.cuda.graph(second, pool=first.pool() if share else None):
        z = x * 3
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first.replay()
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    second.replay()
    torch.cuda.synchronize()
    del z


@pytest.mark.parametrize("runner", ["run", "run_by_callbacks"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("wait", [True, False])
def test_graphs_that_share_a_pool(request: Any, runner: str, share: bool, wait: bool) -> None:
    if runner == "run_by_callbacks" and torch.cuda.is_available():
        runner = "run"  # the callbacks are real there
    watch = request.getfixturevalue(runner)(graphs_of_one_pool, share, wait)
    assert len(watch.findings) == (share and not wait), watch.report()


def test_ordered_replays_do_not_race(machine: Any) -> None:
    assert captured_ops(machine, wait=True).findings == []


def test_trace_has_the_replays_and_not_the_capture(machine: Any) -> None:
    watch = captured_ops(machine, wait=True)
    records = watch.records
    assert [record.index for record in records] == list(range(len(records)))
    names = [record.name.split(".")[1] for record in records if isinstance(record, Op)]
    assert names == ["zeros", "add_", "mul", "add_", "mul", "fill_"]
    temporary = next(record for record in records if isinstance(record, Alloc) and not record.fresh)
    assert temporary.block not in {record.block for record in records if isinstance(record, Free)}
