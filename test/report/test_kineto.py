"""Profiles written by hand, in the format that ``torch.profiler`` exports."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.report import kineto
from crosscurrent.report.bounds import bounds
from crosscurrent.report.costs import Direction
from crosscurrent.report.overlap import analyse
from crosscurrent.trace.records import Site

COMPUTE, FETCH = 7, 13
SITE = Site("/home/me/train.py", 12, "Loader.step.<locals>.load")
NOTE = f"{kineto.SITE_PREFIX}{SITE.file}:{SITE.line}:{SITE.function}"


class Profile:
    """Writes events; times in microseconds, from a late start as real ones have."""

    ZERO = 5_236_812_341_000.0

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            {"ph": "i", "name": "Iteration Start: PyTorch Profiler", "ts": 0.0},
        ]
        self._correlation = 0

    def host(self, category: str, name: str, ts: float, dur: float, thread: int = 1, **details: Any) -> None:
        self._add(category, name, ts, dur, pid=1, tid=thread, args=details)

    def kernel(self, *, at: float, ts: float, dur: float) -> None:
        """A call of 1 us at ``at``, and the kernel that it launches at ``ts``."""
        details = self._call("cudaLaunchKernel", at, COMPUTE)
        self._add("kernel", "gemm", ts, dur, pid=0, tid=COMPUTE, args=details)

    def copy(self, kind: str, *, at: float, ts: float, dur: float) -> None:
        """The same for a copy of 4096 bytes."""
        details = {**self._call("cudaMemcpyAsync", at, FETCH), "bytes": 4096}
        self._add("gpu_memcpy", f"Memcpy {kind}", ts, dur, pid=0, tid=FETCH, args=details)

    def record_and_wait(self, at: float, source: int, target: int) -> None:
        recorded, waited = self._next(), self._next()
        self.host("cuda_runtime", "cudaEventRecord", at, 0.5, correlation=recorded)
        self.host("cuda_runtime", "cudaStreamWaitEvent", at + 0.5, 0.5, correlation=waited)
        self._add(
            "cuda_sync",
            "Stream Wait Event",
            at + 0.5,
            0.1,
            pid=0,
            tid=target,
            args={
                "device": 0,
                "stream": target,
                "correlation": waited,
                "wait_on_stream": source,
                "wait_on_cuda_event_record_corr_id": recorded,
            },
        )

    def synchronize(self, at: float, dur: float, stream: int) -> None:
        correlation = self._next()
        self.host("cuda_runtime", "cudaStreamSynchronize", at, dur, correlation=correlation)
        details = {"device": 0, "stream": stream, "correlation": correlation}
        self._add("cuda_sync", "Stream Sync", at, dur, pid=0, tid=stream, args=details)

    def _call(self, name: str, at: float, stream: int) -> dict[str, Any]:
        correlation = self._next()
        self.host("cuda_runtime", name, at, 1.0, correlation=correlation)
        return {"device": 0, "stream": stream, "correlation": correlation}

    def _add(self, category: str, name: str, ts: float, dur: float, **more: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": self.ZERO + ts, "dur": dur}
        self.events.append({**event, **more})

    def _next(self) -> int:
        self._correlation += 1
        return self._correlation


def test_what_ran_on_the_device() -> None:
    profile = Profile()
    profile.host("cpu_op", "aten::mm", 0.0, 5.0)
    profile.kernel(at=1, ts=10, dur=100)
    profile.copy("HtoD (Pinned -> Device)", at=3, ts=20, dur=40.5)
    profile.copy("DtoH (Device -> Pageable)", at=5, ts=100, dur=30)
    profile.copy("DtoD (Device -> Device)", at=7, ts=140, dur=10)
    kernel, incoming, outgoing, inner = kineto.timeline_of_events(profile.events).activities
    assert (kernel.start, kernel.stop, kernel.direction, kernel.stream) == (
        10_000,
        110_000,
        None,
        "GPU 0 stream 7",
    )
    assert (incoming.start, incoming.stop, incoming.nbytes) == (20_000, 60_500, 4096)
    assert (incoming.direction, incoming.pageable) == (Direction.HOST_TO_DEVICE, False)
    assert (outgoing.direction, outgoing.pageable) == (Direction.DEVICE_TO_HOST, True)
    assert inner.direction is None, "a copy within a device is work of the device"


def test_the_analysis_of_a_profile() -> None:
    profile = Profile()
    profile.kernel(at=1, ts=10, dur=100)
    profile.copy("HtoD (Pinned -> Device)", at=3, ts=90, dur=40)
    found = analyse(kineto.timeline_of_events(profile.events))
    assert (found.transfer, found.hidden, found.exposed) == (40_000, 20_000, 20_000)
    assert not found.modelled
    assert found.bounds is None, "without sync events there are no makespans"


def test_the_call_site_is_that_of_the_annotation_around_the_call() -> None:
    profile = Profile()
    profile.host("cpu_op", NOTE, 2.5, 3.0)
    profile.copy("HtoD (Pinned -> Device)", at=3, ts=20, dur=40)
    profile.copy("HtoD (Pinned -> Device)", at=6, ts=60, dur=40)
    inside, outside = kineto.timeline_of_events(profile.events).activities
    assert (inside.site, outside.site) == (SITE, None)


def test_an_annotation_of_another_thread_is_not_around_it() -> None:
    profile = Profile()
    profile.host("cpu_op", NOTE, 2.5, 3.0, thread=2)
    profile.copy("HtoD (Pinned -> Device)", at=3, ts=20, dur=40)
    assert kineto.timeline_of_events(profile.events).activities[0].site is None


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten::_local_scalar_dense", "item"),
        ("aten::nonzero", "data-dependent shape"),
        ("aten::copy_", "blocking copy"),
        ("aten::mm", "stream synchronize"),
        (None, "stream synchronize"),
    ],
)
def test_a_wait_is_named_by_the_op_around_it(op: str | None, kind: str) -> None:
    profile = Profile()
    if op is not None:
        profile.host("cpu_op", op, 0.0, 60.0)
    profile.synchronize(at=5, dur=50, stream=COMPUTE)
    (blocked,) = kineto.timeline_of_events(profile.events).blocked
    assert (blocked.call, blocked.stop - blocked.start) == (kind, 50_000)


@pytest.mark.parametrize(
    ("call", "kind"),
    [("cudaHostAlloc", "allocation of pinned memory"), ("cudaMalloc", "allocation of device memory")],
)
def test_allocations_block(call: str, kind: str) -> None:
    profile = Profile()
    profile.host("cuda_runtime", call, 5.0, 50.0)
    assert [blocked.call for blocked in kineto.timeline_of_events(profile.events).blocked] == [kind]


def test_launches_and_pinned_copies_do_not_block() -> None:
    profile = Profile()
    profile.kernel(at=1, ts=10, dur=100)
    profile.copy("HtoD (Pinned -> Device)", at=3, ts=90, dur=40)
    assert not kineto.timeline_of_events(profile.events).blocked


def test_a_pageable_copy_blocks() -> None:
    profile = Profile()
    profile.copy("HtoD (Pageable -> Device)", at=3, ts=90, dur=40)
    assert [blocked.call for blocked in kineto.timeline_of_events(profile.events).blocked] == [
        "pageable copy"
    ]


def test_the_copy_of_an_item_is_no_pageable_copy() -> None:
    profile = Profile()
    profile.host("cpu_op", "aten::_local_scalar_dense", 0.0, 60.0)
    profile.copy("DtoH (Device -> Pageable)", at=3, ts=10, dur=2)
    profile.synchronize(at=5, dur=50, stream=FETCH)
    timeline = kineto.timeline_of_events(profile.events)
    assert [blocked.call for blocked in timeline.blocked] == ["item"]
    assert analyse(timeline).num_pageable == 0


def test_all_that_a_graph_launches_at_once_is_work() -> None:
    profile = Profile()
    profile.kernel(at=1, ts=10, dur=100)
    second = {**profile.events[-1], "ts": Profile.ZERO + 110, "dur": 50}
    profile.events.append(second)
    profile.record_and_wait(5, COMPUTE, FETCH)
    timeline = kineto.timeline_of_events(profile.events)
    assert timeline.program is not None
    assert bounds(timeline.program, timeline.waits).edges == 150_000


def test_what_two_calls_share_is_launched_once() -> None:
    profile = Profile()
    profile.kernel(at=1, ts=10, dur=100)
    profile.host("cuda_driver", "cuLaunchKernel", 1.2, 0.5, correlation=1)
    profile.record_and_wait(5, COMPUTE, FETCH)
    timeline = kineto.timeline_of_events(profile.events)
    assert timeline.program is not None
    assert bounds(timeline.program, timeline.waits).edges == 100_000


def test_waits_outside_of_the_run_do_not_count() -> None:
    profile = Profile()
    profile.host("user_annotation", kineto.RUN, 10.0, 100.0)
    profile.synchronize(at=1, dur=2, stream=COMPUTE)
    profile.synchronize(at=20, dur=2, stream=COMPUTE)
    profile.synchronize(at=200, dur=2, stream=COMPUTE)
    assert len(kineto.timeline_of_events(profile.events).blocked) == 1


def ordered(*, waits: bool, stops: bool = False) -> list[dict[str, Any]]:
    """Two copies of 40 and two kernels of 100; each kernel waits for its copy, or the host does."""
    profile = Profile()
    for at in (0.0, 10.0):
        profile.copy("HtoD (Pinned -> Device)", at=at, ts=50 + 10 * at, dur=40)
        if waits:
            profile.record_and_wait(at + 2, FETCH, COMPUTE)
        if stops:
            profile.synchronize(at + 4, 1, FETCH)
        profile.kernel(at=at + 6, ts=200 + 20 * at, dur=100)
    if not waits and not stops:
        profile.record_and_wait(18, COMPUTE, FETCH)  # covers nothing that comes later
    return profile.events


def test_the_makespan_that_the_sync_edges_of_a_profile_allow() -> None:
    timeline = kineto.timeline_of_events(ordered(waits=True))
    assert timeline.program is not None
    found = bounds(timeline.program, timeline.waits)
    assert (found.edges, found.busiest, found.busiest_name) == (240_000, 200_000, "kernels")
    assert [obstacle.call for obstacle in found.obstacles] == ["wait_event"]


def test_without_the_edges_the_lanes_are_free() -> None:
    timeline = kineto.timeline_of_events(ordered(waits=False))
    assert timeline.program is not None
    assert bounds(timeline.program, timeline.waits).edges == 200_000


def test_a_host_wait_of_a_profile_holds_up_what_comes_later() -> None:
    timeline = kineto.timeline_of_events(ordered(waits=False, stops=True))
    assert timeline.program is not None
    found = bounds(timeline.program, timeline.waits)
    # Copy 0..40; the host waits; kernel 40..140 beside copy 40..80; the host waits; kernel 140..240.
    assert (found.edges, found.device_edges) == (240_000, 200_000)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_is_read(tmp_path: Path, compressed: bool) -> None:
    profile = Profile()
    profile.kernel(at=1, ts=10, dur=100)
    raw = json.dumps({"traceEvents": profile.events}).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(raw) if compressed else raw)
    assert len(kineto.read(path).activities) == 1


@pytest.mark.parametrize("text", ["no json", "[]", '{"events": []}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="export_chrome_trace"):
        kineto.read(path)
