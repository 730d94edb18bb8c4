"""The Perfetto trace: what it holds, and that every flow is bound to slices."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.report import perfetto
from crosscurrent.report.document import Report, Verdict

HOST, MAIN, FETCH = 0, 1, 2


def events_of(report: Report) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(perfetto.render(report))["traceEvents"]
    return events


def bound(event: dict[str, Any], slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The slices of a flow event's thread that hold its moment, in whole nanoseconds."""
    moment = round(event["ts"] * 1000)
    return [
        piece
        for piece in slices
        if (piece["pid"], piece["tid"]) == (event["pid"], event["tid"])
        and round(piece["ts"] * 1000) <= moment <= round((piece["ts"] + piece["dur"]) * 1000)
    ]


def test_lanes_are_threads_of_their_device(racy: Any) -> None:
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events_of(racy.report())
        if event["name"] == "thread_name"
    }
    assert names == {(1, HOST): "host", (2, MAIN): "main", (2, FETCH): "fetch"}


def test_every_operation_is_a_slice(racy: Any) -> None:
    slices = [event for event in events_of(racy.report()) if event["ph"] == "X"]
    assert [piece["name"] for piece in slices if piece["tid"] == MAIN] == ["mm", "relu"] * 4
    assert [piece["name"] for piece in slices if piece["tid"] == FETCH] == ["copy_ (host to device)"] * 4
    assert [piece["name"] for piece in slices if piece["tid"] == HOST] == ["item"]
    assert slices[0]["args"]["reads"] == ["block 20 [0:4194304] float32[1024, 1024]"]
    assert slices[0]["args"]["where"].endswith("train.py:9")


def test_slices_of_a_thread_do_not_overlap(racy: Any) -> None:
    by_thread: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events_of(racy.report()):
        if event["ph"] == "X":
            span = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            by_thread.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in by_thread.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


@pytest.mark.parametrize("kind", ["racy", "ordered"])
def test_flows_are_bound_to_slices_in_order(kind: str, request: pytest.FixtureRequest) -> None:
    events = events_of(request.getfixturevalue(kind).report())
    slices = [event for event in events if event["ph"] == "X"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert starts
    for number, start in starts.items():
        (source,), (target,) = bound(start, slices)[:1], bound(ends[number], slices)[-1:]
        assert source["args"]["record"] < target["args"]["record"]
        if start["cat"] == "sync":
            assert start["ts"] <= ends[number]["ts"], "an edge never points back in time"


def test_the_racing_pair_is_joined_and_marked(racy: Any, ordered: Any) -> None:
    report = racy.report()
    finding = report.findings[0]
    events = events_of(report)
    slices = [event for event in events if event["ph"] == "X"]
    marked = [piece["args"]["record"] for piece in slices if finding.id in piece["args"].get("races", ())]
    assert marked == [finding.first.index, finding.second.index]
    races = [event for event in events if event.get("cat") == "race"]
    assert [event["ph"] for event in races] == ["s", "f"]
    assert [bound(event, slices)[0]["args"]["record"] for event in races][:1] == [finding.first.index]
    assert not [event for event in events_of(ordered.report()) if event.get("cat") == "race"]


def test_one_flow_for_each_edge_that_orders_something(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    trace.alloc(1, MAIN, 64)
    early = trace.record(FETCH)  # nothing was given to the lane yet
    trace.op(FETCH, "aten.relu.default", (1, "w"))
    late = trace.record(FETCH)
    trace.wait(MAIN, early)
    trace.wait(MAIN, late)
    trace.op(MAIN, "aten.relu.default", (1, "w"))
    trace.wait(MAIN, late)  # and nothing comes after this
    flows = [event for event in events_of(trace.report()) if event["ph"] == "s"]
    assert len(flows) == 1


def test_the_clock_is_called_a_model(racy: Any) -> None:
    assert json.loads(perfetto.render(racy.report()))["otherData"]["clock"].startswith("model: ")


def test_a_report_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trace=True"):
        perfetto.write(Report(title="x", verdict=Verdict.RACE_FREE), tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def test_a_file_is_written_whole(racy: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    perfetto.write(racy.report(), folder / "trace.json")
    assert [path.name for path in folder.iterdir()] == ["trace.json"]
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
