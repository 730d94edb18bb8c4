"""Graphs, as the taps on a real GPU report them: a capture runs nothing, each replay does it all."""

from __future__ import annotations

from typing import Any

import torch

import crosscurrent
from crosscurrent.trace.records import Alloc, Free, Op


def captured_ops(machine: Any, wait: bool) -> crosscurrent.Watch:
    """``x.add_(1)`` and a temporary, captured once and replayed on a side stream and on the main one."""
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
            tracer.replayed(graph, 0)
        if wait:
            torch.cuda.current_stream().wait_stream(side)
        tracer.replayed(graph, 0)
        torch.empty(4, device="cuda").fill_(0)
    return watch


def test_replays_on_two_streams_race(machine: Any) -> None:
    watch = captured_ops(machine, wait=False)
    assert watch.findings
    assert {finding.first.op for finding in watch.findings} <= {"aten.add_.Tensor", "aten.mul.Tensor"}


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
