"""``overlap`` as people call it: in simulation, on a real GPU, and where there is neither."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import crosscurrent
from crosscurrent.errors import WrongUseError
from crosscurrent.report import kineto
from crosscurrent.report.costs import Rates
from crosscurrent.report.profile import annotated_call_sites
from crosscurrent.trace.records import Site

BATCHES = 4


def load_and_multiply(*, ahead: bool, size: int) -> None:
    """Batches go to the device and are multiplied; ``ahead``: on a stream of their own."""
    compute = torch.cuda.current_stream()
    fetch = torch.cuda.Stream() if ahead else compute
    hosts = [torch.ones(size, size).pin_memory() for _ in range(BATCHES)]
    weight = torch.ones(size, size, device="cuda")
    slots = [torch.empty(size, size, device="cuda") for _ in range(BATCHES)]
    fetch.wait_stream(compute)
    for host, slot in zip(hosts, slots, strict=True):
        with torch.cuda.stream(fetch):
            slot.copy_(host, non_blocking=True)
        compute.wait_stream(fetch)
        for _ in range(3):
            slot @ weight


COPY_LINE = next(
    inspect.getsourcelines(load_and_multiply)[1] + i
    for i, line in enumerate(inspect.getsourcelines(load_and_multiply)[0])
    if "slot.copy_" in line
)


@pytest.mark.simulation
def test_copies_on_a_stream_of_their_own_are_hidden_in_the_model() -> None:
    with crosscurrent.simulate(), crosscurrent.overlap(rates=Rates(issue=0)) as run:
        load_and_multiply(ahead=True, size=256)
    found = run.result
    assert found.modelled
    assert found.num_copies == BATCHES
    # All but the first batch is copied while the batch before it is multiplied.
    assert found.hidden_share == pytest.approx((BATCHES - 1) / BATCHES)
    assert [part.name.rpartition(":")[2] for part in found.by_site] == [str(COPY_LINE)]


@pytest.mark.simulation
def test_copies_on_the_stream_of_the_kernels_are_exposed_in_the_model() -> None:
    with crosscurrent.simulate(), crosscurrent.overlap(rates=Rates(issue=0)) as run:
        load_and_multiply(ahead=False, size=256)
    found = run.result
    assert (found.hidden, found.exposed) == (0, found.transfer)
    assert found.transfer > 0


@pytest.mark.simulation
def test_an_item_in_the_loop_blocks_the_host_in_the_model() -> None:
    with crosscurrent.simulate(), crosscurrent.overlap() as run:
        total = torch.ones(4, device="cuda").sum()
        total.item()
    assert [part.call for part in run.result.blocked_by] == ["item"]


def test_without_device_and_simulation_it_says_what_to_do() -> None:
    if torch.cuda.is_available():  # then there is a device, and this is no wrong use
        with crosscurrent.overlap() as run:
            pass
        assert run.result.num_copies == 0
        return
    with pytest.raises(WrongUseError, match="simulate"), crosscurrent.overlap():
        pass


@pytest.mark.simulation
def test_a_result_before_the_end_is_refused() -> None:
    with (
        crosscurrent.simulate(),
        crosscurrent.overlap() as run,
        pytest.raises(WrongUseError, match="has ended"),
    ):
        _ = run.result
    assert run.result.num_copies == 0


@pytest.mark.simulation
def test_a_run_is_used_once() -> None:
    with crosscurrent.simulate():
        with crosscurrent.overlap() as run:
            pass
        with pytest.raises(WrongUseError, match="make a new one"), run:
            pass


class Recorded:
    """What a profiler of a GPU saw, as it would give it: once, and when it was stopped."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = events
        self._state = "not started"

    def __enter__(self) -> Recorded:
        self._state = "started"
        return self

    def __exit__(self, *error: object) -> None:
        self._state = "stopped"

    def export_chrome_trace(self, path: str) -> None:
        assert self._state == "stopped"
        Path(path).write_text(json.dumps({"traceEvents": self._events}))
        self._state = "given"


def activity(category: str, name: str, ts: float, dur: float, **details: Any) -> dict[str, Any]:
    """An event of a profile, times in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1} | {
        "args": {"device": 0, "stream": 7, **details}
    }


LAUNCHED = [
    activity("user_annotation", kineto.RUN, 0, 100),
    activity("cuda_runtime", "cudaMemcpyAsync", 1, 1, correlation=1),
    activity("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 4, 40, correlation=1, bytes=4096),
    activity("cuda_runtime", "cudaLaunchKernel", 3, 1, correlation=2),
    activity("kernel", "gemm", 50, 30, correlation=2),
]
WAITED = [
    activity("cuda_runtime", "cudaStreamSynchronize", 5, 76, correlation=3),
    activity("cuda_sync", "Stream Sync", 5, 76, correlation=3),
]
_PROGRAMS = {"nothing": [], "no sync events": LAUNCHED, "a host wait": LAUNCHED + WAITED}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_how_far_the_analysis_of_a_profile_has_come(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("crosscurrent.report.profile.profile", lambda **_: Recorded(_PROGRAMS[name]))
    told: list[tuple[int, int]] = []
    with crosscurrent.overlap() as run:
        torch.ones(2).add_(1)
        run.conclude(told=lambda taken, most: told.append((taken, most)))
        concluded = run.result
    assert run.result is concluded, "it is not asked for a second time"
    bounds = [most for _, most in told]
    assert told[0][0] == 0
    assert bounds == sorted(bounds, reverse=True)
    assert told[-1][0] == told[-1][1] > 0
    assert [taken for taken, _ in told] == sorted(taken for taken, _ in told)
    assert not concluded.modelled
    assert concluded.num_copies == (0 if name == "nothing" else 1)
    assert (concluded.bounds is not None) is (name == "a host wait")
    assert [part.call for part in concluded.blocked_by] == ["stream synchronize"] * (name == "a host wait")


def copy_rows(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
    target.add_(1)


def test_call_sites_are_annotated_in_a_real_profile(tmp_path: Path) -> None:
    source, target = torch.ones(4), torch.zeros(4)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, annotated_call_sites():
        copy_rows(source, target)
    path = tmp_path / "profile.json"
    profiler.export_chrome_trace(str(path))
    notes = [
        event["name"]
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") == "cpu_op" and event["name"].startswith(kineto.SITE_PREFIX)
    ]
    first = inspect.getsourcelines(copy_rows)[1]
    assert notes == [f"{kineto.SITE_PREFIX}{__file__}:{first + i}:copy_rows" for i in (1, 2)]


@pytest.mark.parametrize(
    "file", ['/a "b"/c\\d\n:1:f.py', "/J\xfcrgen/\u4e2d.py", "/100%25/x.py", "/\udcff.py"]
)
def test_call_sites_of_files_with_any_name_are_annotated(file: str, tmp_path: Path) -> None:
    code = compile("torch.ones(2)", file, "exec")
    with profile(activities=[ProfilerActivity.CPU]) as profiler, annotated_call_sites():
        exec(code, {"torch": torch})
    path = tmp_path / "profile.json"
    profiler.export_chrome_trace(str(path))
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert [kineto.site_of(name) for name in names if name.startswith(kineto.SITE_PREFIX)] == [
        Site(file, 1, "<module>")
    ]


def test_annotations_leave_torch_as_it_was() -> None:
    before = torch.cuda.synchronize, torch.cuda.Stream.wait_stream, torch.cuda.Event.wait
    with annotated_call_sites():
        assert torch.cuda.synchronize is not before[0]
    assert (torch.cuda.synchronize, torch.cuda.Stream.wait_stream, torch.cuda.Event.wait) == before


@pytest.mark.gpu
def test_copies_on_a_stream_of_their_own_are_hidden_on_a_device() -> None:
    load_and_multiply(ahead=True, size=4096)  # memory and kernels are there before the run
    torch.cuda.synchronize()
    with crosscurrent.overlap() as run:
        load_and_multiply(ahead=True, size=4096)
    found = run.result
    assert not found.modelled
    assert found.num_copies == BATCHES
    assert [part.name for part in found.by_direction] == ["host to device"]
    assert found.by_direction[0].nbytes == BATCHES * 4096 * 4096 * 4
    assert [part.name.rpartition(":")[2] for part in found.by_site] == [str(COPY_LINE)]
    assert found.bounds is not None
    assert found.bounds.busiest <= found.bounds.edges
    assert found.hidden > 0


@pytest.mark.gpu
def test_copies_on_the_stream_of_the_kernels_are_exposed_on_a_device() -> None:
    with crosscurrent.overlap() as run:
        load_and_multiply(ahead=False, size=4096)
    assert run.result.hidden == 0
    assert run.result.exposed > 0


@pytest.mark.gpu
def test_host_waits_are_named_on_a_device() -> None:
    values = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with crosscurrent.overlap() as run:
        values.sum().item()
        values.cpu()
        torch.cuda.synchronize()
    calls = {part.call for part in run.result.blocked_by}
    assert {"item", "device synchronize"} <= calls
    assert calls & {"blocking copy", "pageable copy"}
    assert all(part.site is not None and part.site.file == __file__ for part in run.result.blocked_by)
