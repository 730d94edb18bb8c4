"""Edges are dropped and weakened from outside, and only those that were named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import crosscurrent
from crosscurrent.stress.edges import ChangedEdge, drop_edge, names, weaken_edge
from crosscurrent.trace.records import Site

pytestmark = pytest.mark.usefixtures("_cuda")


class Pipeline:
    """Two streams that hand a tensor back and forth, by every call that makes an edge."""

    def __init__(self) -> None:
        self.side = torch.cuda.Stream()
        self.other = torch.cuda.Stream()
        self.data = torch.zeros(8, device="cuda")
        torch.cuda.synchronize()

    def by_event(self) -> None:
        main = torch.cuda.current_stream()
        for _ in range(3):
            self.data.add_(1)
            written = self.record(main)
            self.wait(self.side, written)
            with torch.cuda.stream(self.side):
                self.data.mul_(2)
            self.wait(main, self.record(self.side))

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def by_stream(self) -> None:
        main = torch.cuda.current_stream()
        self.data.add_(1)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.data.mul_(2)
        main.wait_event(self.side.record_event())
        self.data.add_(1)

    def by_host(self) -> None:
        self.data.add_(1)
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(self.side):
            self.data.mul_(2)
        torch.cuda.synchronize()
        self.data.add_(1)


def num_races(step: Callable[[], None], change: AbstractContextManager[ChangedEdge] | None = None) -> int:
    torch.cuda.synchronize()
    with crosscurrent.watch() as seen:
        if change is None:
            step()
        else:
            with change:
                step()
    torch.cuda.synchronize()
    return sum(finding.count for finding in seen.findings)


@pytest.mark.parametrize("step", ["by_event", "by_stream", "by_host"])
def test_as_it_is_nothing_races(step: str) -> None:
    assert num_races(getattr(Pipeline(), step)) == 0


@pytest.mark.parametrize(
    ("step", "where", "call"),
    [
        ("by_event", "Pipeline.wait", "wait_event"),
        ("by_event", "Pipeline.record", "record"),
        ("by_event", "test_edges.py:Pipeline.record", None),
        ("by_stream", "Pipeline.by_stream", "wait_stream"),
        ("by_stream", "Pipeline.by_stream", "wait_event"),
        ("by_stream", "Pipeline.by_stream", "record_event"),
        ("by_host", "Pipeline.by_host", "synchronize"),
    ],
)
def test_a_dropped_edge_is_a_race(step: str, where: str, call: str | None) -> None:
    assert num_races(getattr(Pipeline(), step), drop_edge(where, call=call)) > 0


def test_one_occurrence_is_less_than_all() -> None:
    pipeline = Pipeline()
    everything = num_races(pipeline.by_event, drop_edge("Pipeline.wait"))
    one = num_races(pipeline.by_event, drop_edge("Pipeline.wait", occurrence=2))
    assert 0 < one < everything


def test_an_edge_can_be_dropped_at_times() -> None:
    pipeline = Pipeline()
    at_times: list[bool] = []

    def when() -> bool:
        at_times.append(True)
        return len(at_times) == 1

    with crosscurrent.watch() as seen, drop_edge("Pipeline.wait", when=when) as edge:
        pipeline.by_event()
    assert seen.findings
    assert (edge.calls, edge.changed) == (6, 1)


def test_the_wrong_stream_orders_nothing_that_matters() -> None:
    pipeline = Pipeline()
    for call in ("record", "wait_event"):
        where = "Pipeline.record" if call == "record" else "Pipeline.wait"
        assert num_races(pipeline.by_event, weaken_edge(where, call=call, stream=pipeline.other)) > 0


def test_the_wrong_stream_may_be_told_late() -> None:
    pipeline = Pipeline()
    change = weaken_edge("Pipeline.wait", occurrence=1, stream=lambda: pipeline.other)
    assert num_races(pipeline.by_event, change) > 0


@pytest.mark.parametrize("occurrence", range(6))
def test_a_recording_that_comes_too_early_is_a_race(occurrence: int) -> None:
    change = weaken_edge("Pipeline.record", occurrence=occurrence, earlier=1)
    # After the last recording nothing is issued that could race.
    assert (num_races(Pipeline().by_event, change) > 0) == (occurrence < 5)


def test_a_stale_recording_is_older_but_not_nothing() -> None:
    """The second stream reads what the recording before the last covers: that order stays."""
    pipeline = Pipeline()
    main = torch.cuda.current_stream()

    def step() -> None:
        pipeline.data.add_(1)
        pipeline.record(main)
        other = torch.ones(8, device="cuda")
        pipeline.wait(pipeline.side, pipeline.record(main))
        with torch.cuda.stream(pipeline.side):
            pipeline.data.mul_(2)
        pipeline.wait(main, pipeline.record(pipeline.side))
        del other

    assert num_races(step, weaken_edge("Pipeline.record", occurrence=1, earlier=1)) == 0
    assert num_races(step, weaken_edge("Pipeline.record", occurrence=1, earlier=2)) > 0


def test_a_recording_made_anew_is_what_it_is() -> None:
    """Only the recording that was changed is stale, not the event for good."""
    pipeline = Pipeline()
    event = torch.cuda.Event()
    main = torch.cuda.current_stream()

    def step() -> None:
        for _ in range(2):
            pipeline.data.add_(1)
            event.record(main)
        pipeline.side.wait_event(event)
        with torch.cuda.stream(pipeline.side):
            pipeline.data.mul_(2)
        main.wait_stream(pipeline.side)

    here = "test_a_recording_made_anew_is_what_it_is.<locals>.step"
    assert num_races(step, weaken_edge(here, call="record", occurrence=0, earlier=1)) == 0
    assert num_races(step, weaken_edge(here, call="record", occurrence=1, earlier=2)) > 0


def test_a_call_inside_of_another_is_a_part_of_it() -> None:
    pipeline = Pipeline()
    with drop_edge("Pipeline.by_stream", call="wait_stream") as edge:
        pipeline.by_stream()
    assert edge.calls == 1


def test_everything_is_put_back() -> None:
    before = {
        name: getattr(torch.cuda.Stream, name) for name in ("wait_event", "wait_stream", "record_event")
    }
    event = torch.cuda.Event.record
    with drop_edge("Pipeline.wait"), drop_edge("Pipeline.record"):
        assert torch.cuda.Stream.wait_event is not before["wait_event"]
        Pipeline().by_event()
    assert {name: getattr(torch.cuda.Stream, name) for name in before} == before
    assert torch.cuda.Event.record is event
    assert "record" in vars(torch.cuda.Event)


def test_an_edge_that_is_not_there_is_an_error() -> None:
    with pytest.raises(crosscurrent.WrongUseError, match=r"number 6 \(from 0\) was wanted"):
        num_races(Pipeline().by_event, drop_edge("Pipeline.wait", occurrence=6))
    with pytest.raises(crosscurrent.WrongUseError, match="when= never said True"):
        num_races(Pipeline().by_event, drop_edge("Pipeline.wait", when=lambda: False))
    with pytest.raises(crosscurrent.WrongUseError, match="run the program inside of the context"):
        num_races(lambda: None, drop_edge("Pipeline.wait"))


def test_the_nearest_calls_are_named_where_there_was_none() -> None:
    with pytest.raises(crosscurrent.WrongUseError) as caught:
        num_races(Pipeline().by_event, drop_edge("test_edges.py:Pipelin.wait", call="wait_event"))
    head, *lines = str(caught.value).splitlines()
    assert head.startswith(
        "nothing was changed: no call of wait_event was made at 'test_edges.py:Pipelin.wait'"
    )
    line = Pipeline.wait.__code__.co_firstlineno + 1
    assert lines[0] == f"  wait_event at test_edges.py:{line} (Pipeline.wait)"
    assert any("record at " in other for other in lines[1:])


def test_what_was_changed_is_told() -> None:
    with drop_edge("wait") as edge:
        Pipeline().by_event()
    line = Pipeline.wait.__code__.co_firstlineno + 1
    assert edge.matched == {f"test_edges.py:{line} (Pipeline.wait)": 6}


def test_a_name_of_two_functions_is_refused() -> None:
    class Other(Pipeline):
        def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
            stream.wait_event(event)

    def both() -> None:
        Pipeline().by_event()
        Other().by_event()

    with pytest.raises(
        crosscurrent.WrongUseError, match=r"2 functions, \S+:Pipeline.wait and \S+Other.wait;"
    ):
        num_races(both, drop_edge("test_edges.py:wait"))
    with drop_edge("Other.wait") as edge:
        both()
    assert edge.changed == 6


def test_an_error_of_the_program_comes_through() -> None:
    with pytest.raises(KeyError), drop_edge("nowhere.py:3"):
        raise KeyError


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="call must be one of"):
        ChangedEdge("here", call="wait_evnt")
    with pytest.raises(ValueError, match="numbered from 0"):
        ChangedEdge("here", occurrence=-1)
    with pytest.raises(ValueError, match="at least 1"):
        ChangedEdge("here", earlier=0)
    with pytest.raises(crosscurrent.WrongUseError, match="either stream= or earlier="), weaken_edge("here"):
        pass


@pytest.mark.parametrize("where", [None, 84, "", "loader.py:", b"loader.py:84"])
def test_what_names_no_place_is_refused(where: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"where must name a call site, .*, got "):
        ChangedEdge(where)


def test_places_are_named_by_line_or_function() -> None:
    site = Site("/home/me/loader.py", 84, "main.<locals>.Prefetcher.fill")
    for where in (
        "loader.py:84",
        "me/loader.py:84",
        "loader.py:Prefetcher.fill",
        "loader.py:fill",
        "Prefetcher.fill",
        "fill",
        "main.<locals>.Prefetcher.fill",
        "main.Prefetcher.fill",
    ):
        assert names(where, site), where
    for where in (
        "loader.py:85",
        "oader.py:84",
        "ill",
        "Fetcher.fill",
        "Prefetcher",
        "other.py:Prefetcher.fill",
    ):
        assert not names(where, site), where
