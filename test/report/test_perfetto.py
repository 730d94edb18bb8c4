"""The Perfetto trace: what it holds, and that every flow is bound to slices."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.report import perfetto
from crosscurrent.report.costs import Rates
from crosscurrent.report.document import Report, Verdict
from crosscurrent.report.slices import slices_of

HOST, MAIN, FETCH = 0, 1, 2
THREAD = perfetto.FIRST_THREAD


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
    assert names == {
        (1, THREAD + HOST): "host",
        (2, THREAD + MAIN): "main",
        (2, THREAD + FETCH): "fetch",
    }


def test_every_operation_is_a_slice(racy: Any) -> None:
    slices = [event for event in events_of(racy.report()) if event["ph"] == "X"]
    assert [piece["name"] for piece in slices if piece["tid"] == THREAD + MAIN] == ["mm", "relu"] * 4
    assert [piece["name"] for piece in slices if piece["tid"] == THREAD + FETCH] == [
        "copy_ (host to device)"
    ] * 4
    assert [piece["name"] for piece in slices if piece["tid"] == THREAD + HOST] == ["item"]
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


def records_of(flow: Any) -> tuple[int, int]:
    source, target, _ = flow
    return source["args"]["record"], target["args"]["record"]


def require_importable(report: Report, import_trace: Callable[[dict[str, Any]], Any]) -> Any:
    """Nothing is dropped, and exactly the arrows and races of the drawing come out."""
    imported = import_trace(json.loads(perfetto.render(report)))
    assert imported.dropped == []
    drawing = slices_of(report.records, report.info, report.rates, report.findings)
    assert len(imported.slices) == len(drawing.slices)
    record = [piece.record for piece in drawing.slices]
    by_kind: dict[str, list[tuple[int, int]]] = {"sync": [], "race": []}
    for flow in imported.flows:
        by_kind[flow[2]["cat"]].append(records_of(flow))
    assert sorted(by_kind["sync"]) == sorted((record[a.source], record[a.target]) for a in drawing.arrows)
    assert sorted(map(sorted, by_kind["race"])) == sorted(
        sorted((record[race.first], record[race.second])) for race in drawing.races
    )
    return imported


@pytest.mark.parametrize("kind", ["racy", "ordered"])
def test_perfetto_drops_nothing(kind: str, request: pytest.FixtureRequest, import_trace: Any) -> None:
    assert require_importable(request.getfixturevalue(kind).report(), import_trace).flows


@pytest.mark.parametrize("seed", range(20))
def test_perfetto_drops_nothing_of_any_trace(
    seed: int, new_trace: Callable[[], Any], import_trace: Any
) -> None:
    """Odd times, whose thousandths no float holds, and operations that take no time at all."""
    choose = random.Random(seed)
    trace = new_trace()
    events = [trace.record(MAIN)]
    for _ in range(120):
        lane = choose.choice((MAIN, FETCH))
        match choose.randrange(5):
            case 0:
                events.append(trace.record(lane))
            case 1:
                trace.wait(lane, choose.choice(events))
            case 2:
                trace.host_wait("event", event=choose.choice(events))
            case _:
                shape = (choose.choice((0, 1, 777, 12345)),)
                accesses = [(choose.randrange(4), choose.choice("rw"))]
                trace.op(lane, "aten.relu.default", *accesses, shape=shape)
    rates = choose.choice(
        (Rates(), Rates(kernel_floor=0, copy_floor=0, issue=0), Rates(kernel_floor=7, copy_floor=3, issue=1))
    )
    require_importable(trace.report(rates=rates), import_trace)


def test_a_race_that_the_model_runs_the_other_way_round_is_drawn(
    new_trace: Callable[[], Any], import_trace: Any
) -> None:
    trace = new_trace()
    trace.alloc(1, MAIN, 4 * 2**26)
    trace.op(MAIN, "aten.relu.default", (2, "w"), shape=(2**26,))  # keeps the lane busy
    trace.op(MAIN, "aten.relu.default", (1, "w"), shape=(2**26,))
    trace.op(FETCH, "aten.relu.default", (1, "r"), shape=(2**26,))
    report = trace.report()
    assert len(report.findings) == 1
    (flow,) = require_importable(report, import_trace).flows
    finding = report.findings[0]
    assert records_of(flow) == (finding.second.index, finding.first.index), "the second one came first"


@pytest.mark.parametrize(
    ("breaks", "complaint"),
    [
        (lambda event: event.update(id="edge 1"), "flow_invalid_id"),
        (lambda event: event.update(id=10**6), "flow_end_without_start"),
        (lambda event: event.update(ts=0.0), "flow_no_enclosing_slice|flow_end_without_start"),
        (lambda event: event.update(tid=5), "without a name"),
        (lambda event: event.pop("bp"), "ends at the next slice"),
    ],
)
def test_the_importer_sees_what_a_bad_flow_is(
    breaks: Callable[[dict[str, Any]], Any], complaint: str, racy: Any, import_trace: Any
) -> None:
    document = json.loads(perfetto.render(racy.report()))
    breaks(next(event for event in document["traceEvents"] if event["ph"] == "f"))
    assert re.search(complaint, "\n".join(import_trace(document).dropped))


def test_the_importer_sees_slices_that_overlap(racy: Any, import_trace: Any) -> None:
    document = json.loads(perfetto.render(racy.report()))
    main = [
        event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == THREAD + MAIN
    ]
    main[0]["dur"] = main[1]["ts"] + main[1]["dur"] / 2 - main[0]["ts"]
    assert any("overlapping" in line for line in import_trace(document).dropped)


def test_times_survive_being_cut_off() -> None:
    for nanoseconds in (*range(50_000), 123_456_789_123, 10**15 + 1):  # 10**15 ns are eleven days
        assert int(json.loads(json.dumps(perfetto._microseconds(nanoseconds))) * 1000) == nanoseconds
