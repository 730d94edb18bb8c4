"""The taps for a real GPU, on a simulation that fires PyTorch's GPU trace callbacks."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda import _gpu_trace

import crosscurrent
from crosscurrent.trace.cuda import CudaEnvironment
from crosscurrent.trace.patches import Patches
from crosscurrent.trace.records import NO_EVENT, HostWait, MemoryKind, Op, RecordEvent, UseStream, WaitEvent

pytestmark = pytest.mark.simulation


def of(watch: crosscurrent.Watch, kind: type) -> list[Any]:
    return [record for record in watch.records if isinstance(record, kind)]


def test_event_handle_that_is_used_again_is_another_event(run_by_callbacks: Any) -> None:
    def program() -> None:
        torch.ones(4, device="cuda")
        _gpu_trace.EventRecordCallbacks.fire_callbacks(77, 0)
        _gpu_trace.EventWaitCallbacks.fire_callbacks(77, 0)
        _gpu_trace.EventDeletionCallbacks.fire_callbacks(77)
        _gpu_trace.EventCreationCallbacks.fire_callbacks(77)
        _gpu_trace.EventWaitCallbacks.fire_callbacks(77, 0)
        _gpu_trace.EventRecordCallbacks.fire_callbacks(77, 0)
        _gpu_trace.EventWaitCallbacks.fire_callbacks(77, 0)

    watch = run_by_callbacks(program)
    first, second = (record.event for record in of(watch, RecordEvent))
    assert [record.event for record in of(watch, WaitEvent)] == [first, NO_EVENT, second]


def test_synchronization_inside_of_an_op_counts_once(run_by_callbacks: Any) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda")
        x[0].item()
        x.nonzero()

    watch = run_by_callbacks(program)
    assert [wait.kind for wait in watch.host_waits] == ["item", "data-dependent shape"]


def test_what_an_op_did_before_it_failed_is_seen(run_by_callbacks: Any) -> None:
    """Its wait is one: what reads behind it does not race."""
    with torch.library._scoped_library("crosscurrent_fails", "DEF") as library:
        library.define("wait(Tensor x) -> Tensor")

        def wait(x: torch.Tensor) -> torch.Tensor:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            raise ValueError("after the wait")

        library.impl("wait", wait, "CompositeExplicitAutograd")

        def program() -> None:
            x = torch.ones(4, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                with pytest.raises(ValueError, match="after the wait"):
                    torch.ops.crosscurrent_fails.wait(torch.empty(0, device="cuda"))
                x.sum()

        watch = run_by_callbacks(program)
    assert of(watch, WaitEvent)
    assert not watch.findings


def test_synchronization_inside_of_any_other_op_is_an_edge_before_it(run_by_callbacks: Any) -> None:
    with torch.library._scoped_library("crosscurrent_sync", "DEF") as library:
        library.define("peek(Tensor x) -> Tensor")

        def peek(x: torch.Tensor) -> torch.Tensor:
            _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(0)
            return x.clone()

        library.impl("peek", peek, "CompositeExplicitAutograd")
        watch = run_by_callbacks(lambda: torch.ops.crosscurrent_sync.peek(torch.ones(4, device="cuda")))
    kinds = [type(record).__name__ for record in watch.records if isinstance(record, (Op, HostWait))]
    assert kinds == ["Op", "HostWait", "Op"]
    assert [wait.kind for wait in watch.host_waits] == ["synchronize"]


def test_waits_are_named_after_the_call(run_by_callbacks: Any) -> None:
    def program() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        side.wait_event(torch.cuda.current_stream().record_event())

    watch = run_by_callbacks(program)
    assert [record.via for record in of(watch, WaitEvent)][1] == "wait_event"
    assert {wait.site.file for wait in watch.host_waits} <= {__file__}


def test_memory_is_told_apart(machine: Any) -> None:
    environment = CudaEnvironment()
    with machine():
        assert environment.classify(torch.ones(2, device="cuda")) == (MemoryKind.DEVICE, 0)
        assert environment.classify(torch.ones(2, pin_memory=True)) == (MemoryKind.PINNED, -1)
        assert environment.classify(torch.ones(2)) is None
        assert environment.classify(torch.nn.Parameter(torch.ones(2, device="cuda"))) is not None
        names = [environment.stream_name(0, handle) for handle in (0, 9, 5, 9)]
    assert names == ["cuda:0 default", "cuda:0 stream 1", "cuda:0 stream 2", "cuda:0 stream 1"]


def test_fake_tensors_have_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(4, device="cpu")
    assert CudaEnvironment().classify(fake) is None


def test_everything_is_put_back(run_by_callbacks: Any) -> None:
    def state() -> list[Any]:
        registries = [value for name, value in vars(_gpu_trace).items() if name.endswith("Callbacks")]
        return [
            vars(torch.cuda.Event).get("query"),
            vars(torch.cuda.Stream).get("query"),
            vars(torch.Tensor).get("numpy"),
            vars(torch.UntypedStorage).get("resize_"),
            vars(threading.Thread)["start"],
            *(list(registry.callback_list) for registry in registries),
            torch._C._len_torch_dispatch_stack(),
        ]

    before = state()
    run_by_callbacks(lambda: torch.ones(4, device="cuda"))
    assert state() == before

    def raises() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_by_callbacks(raises)
    assert state() == before


def test_patches_are_undone_in_reverse_order() -> None:
    class Base:
        def name(self) -> str:
            return "base"

    class Derived(Base):
        pass

    patches = Patches()
    patches.replace(Derived, "name", lambda before: lambda self: before(self) + " once")
    patches.replace(Derived, "name", lambda before: lambda self: before(self) + " twice")
    assert Derived().name() == "base once twice"
    patches.close()
    assert Derived().name() == "base"
    assert "name" not in vars(Derived)


def test_thread_that_outlives_the_watch_is_not_followed(run_by_callbacks: Any) -> None:
    go, done = threading.Event(), threading.Event()
    thread: list[threading.Thread] = []

    def work() -> None:
        go.wait()
        torch.ones(4).add_(1)
        done.set()

    def program() -> None:
        torch.ones(4, device="cuda")
        thread.append(threading.Thread(target=work))
        thread[0].start()

    watch = run_by_callbacks(program)
    num = len(watch.records)
    go.set()
    thread[0].join()
    assert done.is_set()
    assert len(watch.records) == num


def test_backward_is_told_to_work_that_no_user_code_called(run_by_callbacks: Any) -> None:
    """Autograd runs device work on threads of its own: it belongs to the line that waits for it."""
    sites: list[list[int]] = []

    def program() -> None:
        x = torch.ones(4, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: sites.append(list(watches[-1].tracer.sites.waiting)))
        y.sum().backward()

    watches: list[crosscurrent.Watch] = []
    run_by_callbacks(program, entered=watches.append)
    ((site,),) = sites
    assert watches[0].info.sites[site].line == program.__code__.co_firstlineno + 4
    assert watches[0].tracer.sites.waiting == []


def graph_program(wait: bool) -> None:
    x = torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.replay()
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    x.mul(2)


def test_graph_replay_is_an_access_of_its_stream(run_by_callbacks: Any) -> None:
    (finding,) = run_by_callbacks(graph_program, False).findings
    assert (finding.first.op, finding.second.op) == ("aten.add_.Tensor", "aten.mul.Tensor")
    assert run_by_callbacks(graph_program, True).findings == []


def test_record_stream_is_seen(run_by_callbacks: Any) -> None:
    def program() -> None:
        torch.ones(4, device="cuda").record_stream(torch.cuda.Stream())

    assert len(of(run_by_callbacks(program), UseStream)) == 1


class LaunchHooks:
    """Triton's hooks, as `triton.knobs.runtime.launch_enter_hook` has them; `launch` is a kernel's launch."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def add(self, hook: Any) -> None:
        self._hooks.append(hook)

    def remove(self, hook: Any) -> None:
        self._hooks.remove(hook)

    def launch(self, name: str) -> None:
        for hook in self._hooks:
            hook(SimpleNamespace(get=lambda: {"name": name}))


def test_triton_launches_are_unknown_unless_an_operator_speaks_for_them(
    run_by_callbacks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = LaunchHooks()
    knobs = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=hooks))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    with torch.library._scoped_library("crosscurrent_triton", "DEF") as library:
        library.define("scale_(Tensor(a!) x) -> ()")

        def scale_(x: torch.Tensor) -> None:
            hooks.launch("inside")
            x.mul_(2)

        library.impl("scale_", scale_, "CompositeExplicitAutograd")

        def program() -> None:
            torch.ops.crosscurrent_triton.scale_(torch.ones(4, device="cuda"))
            hooks.launch("outside")

        watch = run_by_callbacks(program)
    assert [unknown.op for unknown in watch.unknown] == ["triton outside"]
    assert "crosscurrent_triton.scale_.default" in [record.name for record in of(watch, Op)]


MEMORY = (_gpu_trace.MemoryAllocationCallbacks, _gpu_trace.MemoryDeallocationCallbacks)


@pytest.mark.parametrize("registry", MEMORY, ids=lambda registry: registry.name)
def test_who_listens_to_allocations_before_or_during_a_watch_hears_of_them(
    run_by_callbacks: Any, registry: Any
) -> None:
    early: list[int] = []
    late: list[int] = []

    def program() -> None:
        registry.fire_callbacks(1)
        registry.add_callback(late.append)
        registry.fire_callbacks(2)

    before = list(registry.callback_list)
    try:
        registry.add_callback(early.append)
        run_by_callbacks(program)
        assert (early, late) == ([1, 2], [2])
        registry.callback_list[:] = before
        run_by_callbacks(program)
        assert (early, late) == ([1, 2], [2, 2])
        registry.fire_callbacks(3)
        assert late == [2, 2, 3], "the watch is over"
    finally:
        registry.callback_list[:] = before


@pytest.mark.parametrize("registry", MEMORY, ids=lambda registry: registry.name)
def test_allocations_that_nobody_listens_to_run_no_python(run_by_callbacks: Any, registry: Any) -> None:
    code = type(registry).fire_callbacks.__code__

    def calls() -> int:
        seen: list[Any] = []
        sys.setprofile(lambda frame, event, _: seen.append(frame.f_code) if event == "call" else None)
        try:
            registry.fire_callbacks(1)
        finally:
            sys.setprofile(None)
        return seen.count(code)

    watched: list[int] = []
    run_by_callbacks(lambda: watched.append(calls()))
    assert watched == [0]
    assert calls() == 1, "put back"
