"""Graphs, as the taps on a real GPU report them: a capture runs nothing, each replay does it all."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
    watch = request.getfixturevalue(runner)(graphs_of_one_pool, share, wait)
    assert len(watch.findings) == (share and not wait), watch.report()


def capture_in(pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph whose work keeps nothing."""
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool)
        x.mul_(2)
        graph.capture_end()
    return graph


@pytest.mark.simulation
def test_a_pool_goes_with_the_last_of_its_graphs(machine: Any) -> None:
    """A GPU says the same. But there the generator then stays in the capture that could not begin, and
    whatever draws random numbers later in the process fails."""
    with machine():
        first = capture_in()
        pool = first.pool()
        second = capture_in(pool)
        assert second.pool() == pool
        del first
        third = capture_in(pool)
        third.reset()
        del second
        with pytest.raises(RuntimeError, match=r"use_count > 0 INTERNAL ASSERT FAILED"):
            capture_in(pool)


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


def in_a_thread(do: Callable[[], Any]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def while_capturing(do: Callable[[], Any]) -> None:
    """Capture a graph, and let another thread ``do`` something in the middle of it."""
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        x.add_(1)
        in_a_thread(do)
        x.mul_(2)
        graph.capture_end()


def op_of_another_thread(fixed: bool) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()

    def change() -> None:
        with torch.cuda.stream(side):
            x.add_(1)

    while_capturing(change)
    if fixed:
        torch.cuda.current_stream().wait_stream(side)
    x.add_(1)
    torch.cuda.synchronize()


def result_of_another_thread(fixed: bool) -> None:
    side, made = torch.cuda.Stream(), []

    def make() -> None:
        with torch.cuda.stream(side):
            made.append(torch.zeros(4, device="cuda"))

    while_capturing(make)
    if fixed:
        torch.cuda.current_stream().wait_stream(side)
    made[0].add_(1)
    torch.cuda.synchronize()


def event_of_another_thread(fixed: bool) -> None:
    x, side, event = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()

    def change() -> None:
        with torch.cuda.stream(side):
            if not fixed:
                event.record()
            x.add_(1)
            if fixed:
                event.record()

    while_capturing(change)
    torch.cuda.current_stream().wait_event(event)
    x.add_(1)
    torch.cuda.synchronize()


def free_of_another_thread(fixed: bool) -> None:
    """What is given back meanwhile may be handed out as soon as the capture is over, and is no graph's."""
    box, side = [torch.ones(4, device="cuda")], torch.cuda.Stream()
    torch.cuda.synchronize()

    def read() -> None:
        with torch.cuda.stream(side):
            box[0].sum()
        if fixed:
            box[0].record_stream(side)
        box.clear()

    while_capturing(read)
    torch.zeros(4, device="cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("runner", ["run", "run_by_callbacks"])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    "program",
    [op_of_another_thread, result_of_another_thread, event_of_another_thread, free_of_another_thread],
)
def test_other_streams_go_on_during_a_capture(
    request: Any, runner: str, program: Callable[[bool], None], fixed: bool
) -> None:
    watch = request.getfixturevalue(runner)(program, fixed)
    assert len(watch.findings) == (not fixed), watch.report()
    assert [record.index for record in watch.records] == list(range(len(watch.records)))


def test_streams_that_wait_for_a_capture_take_part_in_it(machine: Any) -> None:
    with machine(), crosscurrent.watch(trace=True) as watch:
        tracer = watch.tracer
        x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        main, side, other = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        tracer.capture_started()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.add_(1)
        with torch.cuda.stream(other):
            y.mul_(2)
        main.wait_stream(side)
        graph = tracer.capture_ended()
    assert [op.name.split(".")[1] for op in graph] == ["add_"]
    names = [record.name.split(".")[1] for record in watch.records if isinstance(record, Op)]
    assert names == ["zeros", "zeros", "mul_"]


class Observer:
    """Notes the calls that it is shown."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.after: list[str] = []

    def before_call(self, func: Any, args: Any, kwargs: Any) -> None:
        self.before.append(func.__name__)

    def after_call(self, records: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.after.append(func.__name__)


@pytest.mark.simulation  # on a GPU the callbacks are real
@pytest.mark.parametrize("fixed", [False, True])
def test_replays_race_although_there_are_observers(run_by_callbacks: Any, fixed: bool) -> None:
    def program() -> None:
        x, graph, side = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            x.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.replay()
        if fixed:
            torch.cuda.current_stream().wait_stream(side)
        x.mul_(2)
        torch.cuda.synchronize()

    observer = Observer()
    watch = run_by_callbacks(program, entered=lambda watch: watch.tracer.observers.append(observer))
    assert observer.before == observer.after == ["ones.default", "mul_.Tensor"]
    assert len(watch.findings) == (not fixed), watch.report()


def test_memory_older_than_the_watch_is_no_memory_of_the_graph(machine: Any) -> None:
    with machine():
        x = torch.zeros(4, device="cuda")
        with crosscurrent.watch(trace=True) as watch:
            watch.tracer.capture_started()
            x.add_(1)
            watch.tracer.capture_ended()
            del x
            torch.empty(4, device="cuda")
    assert [type(record) for record in watch.records] == [Alloc, Free, Alloc, Free]


def test_end_of_a_capture_that_began_before_the_watch(machine: Any) -> None:
    with machine(), crosscurrent.watch(trace=True) as watch:
        torch.zeros(4, device="cuda")
        assert watch.tracer.capture_ended() is None
        torch.zeros(4, device="cuda")
    assert [record.index for record in watch.records] == list(range(len(watch.records)))
