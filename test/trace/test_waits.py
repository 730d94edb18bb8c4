"""Calls that make the host wait, and those that only look as if they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import crosscurrent
from crosscurrent.trace.records import HostWait, Op

# PyTorch copies a list of numbers to a real device below the dispatcher, where only the wait itself is seen.
OF_A_LIST = "synchronize" if torch.cuda.is_available() else "blocking copy"

WAITS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "item": ("item", lambda x: x[0].item()),
    "bool": ("item", lambda x: bool(x[0] > 0)),
    "equal": ("item", lambda x: torch.equal(x, x)),
    "allclose": ("item", lambda x: torch.allclose(x, x)),
    "index_by_tensor_number": ("item", lambda x: [1, 2][torch.ones((), dtype=torch.long, device=x.device)]),
    "slice_by_tensor": ("item", lambda x: x[torch.ones((), dtype=torch.long, device=x.device) :]),
    "masked_fill_by_tensor": ("item", lambda x: x.masked_fill(x > 0, x[0])),
    "inverse": ("item", lambda x: torch.linalg.inv(x.expand(4, 4) + torch.eye(4, device=x.device))),
    "normal_with_tensor_deviation": ("item", lambda x: torch.normal(0.0, x)),
    "nonzero": ("data-dependent shape", lambda x: x.nonzero()),
    "where": ("data-dependent shape", lambda x: torch.where(x > 0)),
    "argwhere": ("data-dependent shape", lambda x: torch.argwhere(x)),
    "boolean_index": ("data-dependent shape", lambda x: x[x > 0]),
    "boolean_assignment_of_a_tensor": ("data-dependent shape", lambda x: x.__setitem__(x > 0, x + 1)),
    "masked_select": ("data-dependent shape", lambda x: x.masked_select(x > 0)),
    "unique": ("data-dependent shape", lambda x: x.unique()),
    "unique_consecutive": ("data-dependent shape", lambda x: x.unique_consecutive()),
    "bincount": ("data-dependent shape", lambda x: torch.bincount(x.long())),
    "repeat_interleave": ("data-dependent shape", lambda x: x.repeat_interleave(x.long())),
    "cpu": ("blocking copy", lambda x: x.cpu()),
    "to_cpu": ("blocking copy", lambda x: x.to("cpu")),
    "tolist": ("blocking copy", lambda x: x.tolist()),
    "numpy": ("blocking copy", lambda x: x.cpu().numpy()),
    "to_device": ("blocking copy", lambda x: torch.ones(4).to(x.device)),
    "index_on_the_host": ("blocking copy", lambda x: x[torch.tensor([0, 1])]),
    "list_index": (OF_A_LIST, lambda x: x[[0, 1]]),
    "number_stored_by_index": (
        "blocking copy",
        lambda x: x.__setitem__(torch.zeros(1, dtype=torch.long, device=x.device), 1.0),
    ),
    "pageable_out": ("pageable copy", lambda x: torch.empty(4).copy_(x, non_blocking=True)),
    "pageable_in": ("pageable copy", lambda x: x.copy_(torch.empty(4), non_blocking=True)),
    "pinned_memory": ("allocation", lambda x: torch.empty(1000, pin_memory=True)),
    "device_synchronize": ("synchronize", lambda x: torch.cuda.synchronize()),
    "stream_synchronize": ("synchronize", lambda x: torch.cuda.current_stream().synchronize()),
    "event_synchronize": ("event", lambda x: torch.cuda.current_stream().record_event().synchronize()),
}

RUNS_ON: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2).sum(),
    "number_stored_in_a_slice": lambda x: x[:2].fill_(1.0),
    "boolean_assignment_of_a_number": lambda x: x.__setitem__(x > 0, 1.0),
    "masked_fill": lambda x: x.masked_fill_(x > 0, 1.0),
    "where_with_values": lambda x: torch.where(x > 0, x, 0.0),
    "index_on_the_device": lambda x: x[torch.zeros(2, dtype=torch.long, device=x.device)],
    "repeat_interleave_of_known_size": lambda x: torch.repeat_interleave(x, x.long(), output_size=4),
    "nonzero_static": lambda x: torch.nonzero_static(x, size=4),
    "event": lambda x: torch.cuda.current_stream().wait_event(torch.cuda.current_stream().record_event()),
    "wait_stream": lambda x: torch.cuda.current_stream().wait_stream(torch.cuda.Stream()),
    "query": lambda x: torch.cuda.current_stream().query(),
    "shape": lambda x: (x.shape, x.numel(), x.stride(), x.is_contiguous(), x.data_ptr()),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits(machine: Any, name: str) -> None:
    kind, call = WAITS[name]
    with machine():
        x = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        with crosscurrent.watch() as watch:
            call(x)
    assert kind in {wait.kind for wait in watch.host_waits}, watch.report()
    assert all(wait.site.file == __file__ for wait in watch.host_waits)


@pytest.mark.parametrize("name", RUNS_ON)
def test_the_host_runs_on(machine: Any, name: str) -> None:
    with machine():
        x = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        with crosscurrent.watch() as watch:
            RUNS_ON[name](x)
    assert watch.host_waits == []


def test_what_an_op_does_after_its_wait_is_not_waited_for(run: Any) -> None:
    records = run(lambda: torch.ones(4, device="cuda").nonzero()).records
    tail = [(type(r).__name__, [a.write for a in getattr(r, "accesses", ())]) for r in records[3:-2]]
    assert tail == [("Op", [False]), ("HostWait", []), ("Op", [False, True])]


def test_each_wait_is_listed_once_for_each_time(run: Any) -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda")
        for _ in range(3):
            x[0].item()

    watch = run(program)
    assert [wait.kind for wait in watch.host_waits] == ["item"] * 3
    assert len(set(watch.host_waits)) == 1
    assert watch.host_waits[0].streams == ("cuda:0 default",)
    assert "3 times" in watch.report()


def test_query_is_an_edge_but_no_wait(run: Any) -> None:
    def program() -> None:
        event = torch.cuda.current_stream().record_event()
        while not event.query():
            pass

    watch = run(program)
    assert watch.host_waits == []
    assert [r.kind for r in watch.records if isinstance(r, HostWait)] == ["query"]


def test_allocation_orders_nothing(run: Any) -> None:
    records = run(lambda: torch.empty(1000, pin_memory=True)).records
    waits = [(r.event, r.lanes) for r in records if isinstance(r, HostWait)]
    assert waits == [(None, ())]


def test_item_of_pinned_memory_is_a_read_of_the_host(run: Any) -> None:
    watch = run(lambda: torch.ones(4, pin_memory=True)[1].item())
    last = [r for r in watch.records if isinstance(r, Op)][-1]
    assert (last.lane, last.accesses[0].region[:2]) == (0, (4, 8))
    assert [wait.kind for wait in watch.host_waits] == ["allocation"]
