"""Streams, events and the model clock."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.cuda import Event as EarlyEvent
from torch.cuda import Stream as EarlyStream
from torch.cuda import current_stream as early_current_stream

from crosscurrent.trace.simulate import Simulation

pytestmark = pytest.mark.simulation


@pytest.mark.usefixtures("simulation")
class TestStreams:
    def test_names_imported_before_the_simulation_work(self) -> None:
        stream = EarlyStream()
        with torch.cuda.stream(stream):
            assert early_current_stream() == stream
            event = EarlyEvent()
            event.record()
        assert isinstance(stream, torch.cuda.Stream)
        assert isinstance(stream, torch.Stream)
        assert isinstance(event, torch.Event)

    def test_streams_come_from_a_pool_of_32(self) -> None:
        streams = [torch.cuda.Stream() for _ in range(33)]
        assert len({stream.stream_id for stream in streams}) == 32
        assert streams[32] == streams[0]
        assert hash(streams[32]) == hash(streams[0])
        assert streams[1] != streams[0]

    def test_each_priority_has_its_pool(self) -> None:
        low, high = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        assert low != high
        assert (low.priority, high.priority) == (0, -1)
        assert torch.cuda.Stream(priority=-9).priority == torch.cuda.Stream.priority_range()[1]

    def test_a_stream_by_its_id(self) -> None:
        stream = torch.cuda.Stream()
        same = torch.cuda.Stream(stream_id=stream.stream_id, device_index=0, device_type=stream.device_type)
        assert same == stream
        with pytest.raises(RuntimeError, match="no stream 2 "):
            torch.cuda.Stream(stream_id=2, device_index=0, device_type=1)

    def test_the_default_stream(self) -> None:
        default = torch.cuda.default_stream()
        assert torch.cuda.current_stream() == default
        assert default.cuda_stream == 0
        with torch.cuda.stream(torch.cuda.Stream()):
            assert torch.cuda.current_stream() != default
        assert torch.cuda.current_stream() == default
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == default

    def test_with_a_stream_itself(self) -> None:
        for stream in (torch.cuda.Stream(), torch.Stream(device="cuda"), torch.Stream()):
            with stream:
                assert torch.cuda.current_stream().stream_id == stream.stream_id
                with stream, torch.cuda.stream(torch.cuda.default_stream()):
                    assert torch.cuda.current_stream().stream_id == 0
                assert torch.accelerator.current_stream() == stream
            assert torch.cuda.current_stream().stream_id == 0

    def test_set_stream(self) -> None:
        stream = torch.cuda.Stream()
        torch.cuda.set_stream(stream)
        assert torch.cuda.current_stream() == stream
        torch.accelerator.set_stream(torch.cuda.default_stream())
        assert torch.cuda.current_stream() == torch.cuda.default_stream()

    def test_external_streams_are_refused(self) -> None:
        with pytest.raises(NotImplementedError, match="ExternalStream"):
            torch.cuda.ExternalStream(1234)

    def test_threads_begin_on_the_default_stream(self) -> None:
        seen: list[Any] = []

        def work() -> None:
            seen.append(torch.cuda.current_stream().stream_id)
            torch.cuda.set_stream(torch.cuda.Stream())
            seen.append((torch.ones(2, device="cuda") * 2).is_cuda)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert torch.cuda.current_stream() == stream
        assert seen == [0, True]


class TestDevices:
    def test_the_current_device(self, two_devices: Simulation) -> None:
        assert torch.cuda.is_available()
        assert torch.cuda.is_initialized()
        assert torch.cuda.device_count() == 2
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
            assert torch.ones(1, device="cuda").device.index == 1
            assert torch.cuda.Stream().device.index == 1
        assert torch.cuda.current_device() == 0
        torch.cuda.set_device(1)
        assert torch.accelerator.current_device_index() == 1
        torch.accelerator.set_device_index(0)
        assert torch.cuda.current_device() == 0
        with torch.cuda.device_of(torch.ones(1, device="cuda:1")):
            assert torch.cuda.current_device() == 1

    def test_a_stream_context_switches_the_device(self, two_devices: Simulation) -> None:
        stream = torch.cuda.Stream(device=1)
        for context in (torch.cuda.stream(stream), stream):
            with context:
                assert torch.cuda.current_device() == 1
                assert torch.cuda.current_stream() == stream
                assert torch.cuda.current_stream(0).stream_id == 0
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream(1).stream_id == 0

    def test_properties(self, two_devices: Simulation) -> None:
        properties = torch.cuda.get_device_properties(1)
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability(1)
        assert torch.cuda.get_device_name(0) == "Simulated CUDA device 0"
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.can_device_access_peer(0, 1)
        with pytest.raises(AssertionError, match="Invalid device id"):
            torch.cuda.get_device_properties(2)

    def test_the_accelerator(self, two_devices: Simulation) -> None:
        assert torch.accelerator.is_available()
        assert torch.accelerator.device_count() == 2
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        torch.accelerator.synchronize()


def test_what_tracers_hear_of_events(simulation: Simulation, listener: Any) -> None:
    stream = torch.cuda.Stream()
    event = torch.cuda.Event()
    stream.wait_event(event)
    event.record(stream)
    torch.cuda.current_stream().wait_event(event)
    event.synchronize()
    stream.synchronize()
    torch.cuda.synchronize()
    key = listener.heard[0][1]
    assert listener.heard == [
        ("waited", key, 0, stream.stream_id, "wait_event"),
        ("recorded", key, 0, stream.stream_id, "record"),
        ("waited", key, 0, 0, "wait_event"),
        ("event synchronized", key),
        ("stream synchronized", 0, stream.stream_id),
        ("device synchronized", 0),
    ]


def test_waiting_for_a_stream_is_a_record_and_a_wait(simulation: Simulation, listener: Any) -> None:
    for stream in (torch.cuda.Stream(), torch.Stream(device="cuda")):
        listener.heard.clear()
        stream.wait_stream(torch.cuda.current_stream())
        key = listener.heard[0][1]
        assert listener.heard == [
            ("recorded", key, 0, 0, "wait_stream"),
            ("waited", key, 0, stream.stream_id, "wait_stream"),
        ]


def test_a_query_tells_only_when_it_is_true(simulation: Simulation, listener: Any) -> None:
    torch.cuda._sleep(10_000_000)
    event = torch.cuda.current_stream().record_event()
    listener.heard.clear()
    assert not event.query()
    assert not torch.cuda.current_stream().query()
    assert listener.heard == []
    tries = 0
    while not event.query():
        tries += 1
    # Each failed query in a row takes twice as long: sleeping 6.7 ms takes no more than 13.
    assert 0 < tries < 14
    assert torch.cuda.current_stream().query()
    assert [what[0] for what in listener.heard] == ["event done", "stream done"]


def test_unrecorded_events(simulation: Simulation, listener: Any) -> None:
    event = torch.cuda.Event()
    assert event.query()
    event.synchronize()
    assert listener.heard == []


def test_the_clock_measures_sleep(simulation: Simulation) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    torch.cuda._sleep(3_000_000)
    end.record()
    with pytest.raises(ValueError, match="completed"):
        start.elapsed_time(end)
    end.synchronize()
    # The model runs at 1.5 GHz.
    assert start.elapsed_time(end) == 2.0
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(torch.cuda.Event())


def test_streams_overlap_on_the_clock(simulation: Simulation) -> None:
    stream = torch.cuda.Stream()
    start = torch.cuda.Event(enable_timing=True)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    start.record()
    torch.cuda._sleep(3_000_000)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(3_000_000)
        ends[0].record()
        stream.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(1_500_000)
        ends[1].record()
    torch.cuda.synchronize()
    assert [start.elapsed_time(end) for end in ends] == [2.0, 3.0]


def test_an_event_belongs_to_the_device_of_its_first_record(two_devices: Simulation) -> None:
    event = torch.cuda.Event()
    event.record()
    assert event.device == torch.device("cuda", 0)
    torch.cuda.current_stream(1).wait_event(event)
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(torch.cuda.current_stream(1))


def test_record_stream(simulation: Simulation, listener: Any) -> None:
    stream = torch.cuda.Stream()
    torch.ones(3, device="cuda").record_stream(stream)
    assert listener.heard[-1] == ("used", (3,), 0, stream.stream_id)
    with pytest.raises(NotImplementedError, match="record_stream"):
        torch.ones(3).record_stream(stream)


def test_sync_debug_mode(simulation: Simulation) -> None:
    tensor = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    for wait in (lambda: tensor.sum().item(), lambda: tensor.cpu(), lambda: tensor.nonzero()):
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            wait()
    torch.cuda.set_sync_debug_mode("default")
    assert tensor.sum().item() == 3.0


def test_pinned_arrays_are_accesses_of_the_host(simulation: Simulation, listener: Any) -> None:
    pinned = torch.ones(3, pin_memory=True)
    pinned.numpy()
    pinned.tolist()
    assert [what for what in listener.heard if what[0] == "host"] == [
        ("host", "numpy", False),
        ("host", "tolist", False),
    ]
    torch.ones(3).numpy()
    assert len([what for what in listener.heard if what[0] == "host"]) == 2


def test_values_read_by_torch_tensor_are_seen(simulation: Simulation, listener: Any) -> None:
    """PyTorch reads them below every dispatch mode."""
    scalars = [torch.tensor(1.0, device="cuda"), torch.tensor(2.0, device="cuda")]
    pinned = torch.ones(3, pin_memory=True)
    listener.heard.clear()
    torch.tensor(scalars)
    assert [name for name, _ in listener.ops() if name == "_to_copy"] == ["_to_copy", "_to_copy"]
    torch.tensor(pinned)
    assert ("clone", 0) in listener.ops()


def test_streams_are_left_in_reverse_order(simulation: Simulation) -> None:
    outer, inner = torch.cuda.Stream(), torch.cuda.Stream()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="left before a stream that was entered later"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="or twice"):
        outer.__exit__(None, None, None)
    assert torch.cuda.current_stream().stream_id == 0


def test_one_stream_object_entered_in_two_threads(simulation: Simulation) -> None:
    stream, inside, leave = torch.cuda.Stream(), threading.Event(), threading.Event()
    after: list[int] = []

    def work() -> None:
        torch.cuda.set_stream(other)
        with stream:
            inside.set()
            leave.wait()
        after.append(torch.cuda.current_stream().stream_id)

    other = torch.cuda.Stream()
    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    with stream:
        leave.set()
        thread.join()
    assert torch.cuda.current_stream().stream_id == 0
    assert after == [other.stream_id]


def test_a_copy_between_devices_joins_both_on_the_clock(two_devices: Simulation) -> None:
    source = torch.ones(3, device="cuda:0")
    torch.cuda.synchronize()
    torch.cuda._sleep(1_500_000)
    source.to("cuda:1", non_blocking=True)
    other = torch.cuda.current_stream(1)
    event = other.record_event()
    assert not event.query()
    # Sleeping takes 1 ms of the model clock.
    torch.cuda.synchronize(0)
    assert event.query()


class _Named(EarlyStream):
    def name(self) -> str:
        return f"stream {self.stream_id}"


class _Kept(torch.cuda.Event):
    pass


def test_subclasses_of_the_classes_of_torch_cuda(simulation: Simulation) -> None:
    """They are C++ below in a build with CUDA, and nothing in a CPU build."""
    stream, event = _Named(priority=-1), _Kept(enable_timing=True)
    assert isinstance(stream, (torch.cuda.Stream, torch.Stream))
    assert isinstance(event, (torch.cuda.Event, torch.Event))
    assert (stream.name(), stream.priority) == (f"stream {stream.stream_id}", -1)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        event.record()
    assert event.cuda_event
    assert stream.record_event(event) is event


def test_graphs_say_what_they_are(simulation: Simulation) -> None:
    graph = torch.cuda.CUDAGraph()
    assert isinstance(graph, torch.cuda.CUDAGraph)
    assert not hasattr(graph, "no_such_method")
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
