"""Lanes, moments and double buffers, on simulated CUDA or a real GPU."""

from __future__ import annotations

import pytest
import torch

from crosscurrent.gradient.transfer import HostBuffer, Lane, Lanes, make_incoming, make_outgoing


def lane() -> Lane:
    return Lane(torch.cuda.Stream())


def test_a_lane_is_behind_what_it_never_waited_for(cuda: torch.device) -> None:
    a, b = lane(), lane()
    moment = a.record()
    assert b.behind(moment) is moment.event


def test_a_lane_is_behind_once(cuda: torch.device) -> None:
    a, b = lane(), lane()
    moment = a.record()
    assert b.behind(moment)
    assert b.behind(moment) is None


def test_a_later_moment_covers_an_earlier_one_but_not_the_other_way_round(cuda: torch.device) -> None:
    a, b, c = lane(), lane(), lane()
    early, late = a.record(), a.record()
    assert b.behind(late)
    assert b.behind(early) is None
    assert c.behind(early)
    assert c.behind(late)


def test_order_carries_over_a_third_lane(cuda: torch.device) -> None:
    a, b, c = lane(), lane(), lane()
    early = a.record()
    assert b.behind(early)
    through_b = b.record()
    late = a.record()
    assert c.behind(through_b)
    assert c.behind(early) is None
    assert c.behind(late)


def test_a_moment_knows_nothing_of_what_its_lane_learned_later(cuda: torch.device) -> None:
    a, b, c = lane(), lane(), lane()
    before = b.record()
    moment = a.record()
    assert b.behind(moment)
    assert c.behind(before)
    assert c.behind(moment)


def test_a_lane_is_never_behind_itself(cuda: torch.device) -> None:
    a = lane()
    assert a.behind(a.record()) is None


def test_one_lane_makes_no_events() -> None:
    lanes = Lanes(asynchronous=False, device=torch.device("cpu"))
    lanes.open()
    assert lanes.main is lanes.host_to_device is lanes.device_to_host
    assert lanes.main.record() is None
    assert lanes.main.behind(None) is None
    lanes.close()


def test_another_stream_of_the_caller_is_another_lane(cuda: torch.device) -> None:
    lanes = Lanes(asynchronous=True, device=torch.device("cuda", 0))
    lanes.open()
    first = lanes.main
    lanes.open()
    assert lanes.main is first
    with torch.cuda.stream(torch.cuda.Stream()):
        lanes.open()
    assert lanes.main is not first


def test_a_host_buffer_grows_and_never_shrinks() -> None:
    buffer = HostBuffer(pinned=False)
    buffer.reserve(100)
    first = buffer.bytes
    buffer.reserve(60)
    assert buffer.bytes is first
    buffer.reserve(101)
    assert buffer.bytes.numel() == 101


@pytest.mark.parametrize("asynchronous", [False, True])
def test_bytes_go_out_and_come_in_again_in_order(cuda: torch.device, asynchronous: bool) -> None:
    """Five cells through two slots each way, the next one fetched while one is read, as in a pass."""
    lanes = Lanes(asynchronous=asynchronous, device=torch.device("cuda", 0))
    lanes.open()
    (incoming,), (outgoing,) = make_incoming(lanes, [(16, 2)]), make_outgoing(lanes, [16])
    hosts = [HostBuffer(pinned=True) for _ in range(5)]
    for value, host in enumerate(hosts):
        host.reserve(16)
        outgoing.acquire().fill_(value)
        outgoing.send(host, 12)
    received = []
    incoming.fetch(hosts[0], 12)
    for host in [*hosts[1:], None]:
        if host is not None:
            incoming.fetch(host, 12)
        received.append(incoming.receive()[:12].clone())
        incoming.release()
    lanes.close()
    assert [set(part.tolist()) for part in received] == [{0}, {1}, {2}, {3}, {4}]
