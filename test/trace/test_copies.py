"""Each way of copying between memories: which lane touches what, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import crosscurrent
from crosscurrent.trace.records import HostWait, Op, RecordEvent, WaitEvent

ROWS, COLUMNS = 4, 6
STREAM = "cuda:0 default"


def device(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(ROWS, COLUMNS, device="cuda", dtype=dtype)


def pinned(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(ROWS, COLUMNS, pin_memory=True, dtype=dtype)


def pageable(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(ROWS, COLUMNS, dtype=dtype)


def same(x: Tensor) -> Tensor:
    return x


def strided(x: Tensor) -> Tensor:
    return x[:, :2]


def transposed(x: Tensor) -> Tensor:
    return x.t()


def rows(x: Tensor) -> Tensor:
    return x[1:3]


ASYNCHRONOUS = [(STREAM, "rw")]
HOST_READS = [("host", "r"), "strided copy", (STREAM, "w")]
HOST_WRITES = [(STREAM, "r"), ("strided copy", STREAM), ("host", "w")]
BLOCKING = ("blocking copy", STREAM)

CASES: list[tuple[str, Callable[[], tuple[Tensor, Tensor]], bool, list[Any]]] = [
    # to the device
    ("pinned in", lambda: (device(), pinned()), True, ASYNCHRONOUS),
    ("pinned rows in", lambda: (rows(device()), rows(pinned())), True, ASYNCHRONOUS),
    ("both transposed", lambda: (transposed(device()), transposed(pinned())), True, ASYNCHRONOUS),
    ("target transposed", lambda: (device().t(), pinned().view(COLUMNS, ROWS)), True, ASYNCHRONOUS),
    ("target strided", lambda: (strided(device()), pinned().view(-1)[:8].view(4, 2)), True, ASYNCHRONOUS),
    ("converted in", lambda: (device(torch.float64), pinned()), True, ASYNCHRONOUS),
    ("strided in", lambda: (torch.zeros(4, 2, device="cuda"), strided(pinned())), True, HOST_READS),
    ("source transposed", lambda: (device().view(COLUMNS, ROWS), pinned().t()), True, HOST_READS),
    ("expanded in", lambda: (device(), pinned()[0].expand(ROWS, COLUMNS)), True, HOST_READS),
    ("broadcast in", lambda: (device(), pinned()[0]), True, HOST_READS),
    ("pageable in", lambda: (device(), pageable()), True, ["pageable copy", (STREAM, "w")]),
    ("blocking pinned in", lambda: (device(), pinned()), False, [(STREAM, "rw"), BLOCKING]),
    (
        "blocking strided in",
        lambda: (torch.zeros(4, 2, device="cuda"), strided(pinned())),
        False,
        [("host", "r"), (STREAM, "w"), BLOCKING],
    ),
    (
        "blocking converted in",
        lambda: (device(torch.float64), pinned()),
        False,
        [("host", "r"), (STREAM, "w"), BLOCKING],
    ),
    (
        "blocking into a strided target",  # the last step runs on the stream, after the wait
        lambda: (strided(device()), pageable()[:, :2].contiguous()),
        False,
        [BLOCKING, (STREAM, "w")],
    ),
    ("blocking pageable in", lambda: (device(), pageable()), False, [(STREAM, "w"), BLOCKING]),
    # to the host
    ("pinned out", lambda: (pinned(), device()), True, ASYNCHRONOUS),
    (
        "strided source out",
        lambda: (torch.zeros(4, 2, pin_memory=True), strided(device())),
        True,
        ASYNCHRONOUS,
    ),
    ("converted out", lambda: (pinned(torch.float64), device()), True, ASYNCHRONOUS),
    ("strided out", lambda: (strided(pinned()), torch.zeros(4, 2, device="cuda")), True, HOST_WRITES),
    ("pageable out", lambda: (pageable(), device()), True, [(STREAM, "r"), ("pageable copy", STREAM)]),
    ("blocking pinned out", lambda: (pinned(), device()), False, [(STREAM, "rw"), BLOCKING]),
    (
        "blocking converted out",
        lambda: (pinned(torch.float64), device()),
        False,
        [(STREAM, "r"), BLOCKING, ("host", "w")],
    ),
    ("blocking pageable out", lambda: (pageable(), device()), False, [(STREAM, "r"), BLOCKING]),
    # on one side
    ("within the device", lambda: (device(), device().t().contiguous().t()), False, [(STREAM, "rw")]),
    ("from pinned to pinned", lambda: (pinned(), pinned()), True, [("host", "rw")]),
    ("from pinned to pageable", lambda: (pageable(), pinned()), True, [("host", "r")]),
    ("nothing", lambda: (device()[:0], pageable()[:0]), False, []),
]


def told(watch: Any, start: int) -> list[Any]:
    """The ops and waits from record ``start`` on, as the table above writes them."""
    lines: list[Any] = []
    for record in watch.records[start:]:
        if isinstance(record, Op):
            uses = "".join("w" if access.write else "r" for access in record.accesses)
            lines.append((watch.lanes[record.lane].name, uses))
        elif isinstance(record, HostWait):
            names = [watch.lanes[lane].name for lane in record.lanes]
            lines.append((record.kind, *names) if names else record.kind)
    return lines


@pytest.mark.parametrize(("make", "non_blocking", "expected"), [pytest.param(*c[1:], id=c[0]) for c in CASES])
def test_copy(machine: Any, make: Any, non_blocking: bool, expected: list[Any]) -> None:
    with machine(), crosscurrent.watch(trace=True) as watch:
        target, source = make()
        start = len(watch.records)
        target.copy_(source, non_blocking=non_blocking)
    assert told(watch, start) == expected


@pytest.mark.parametrize("non_blocking", [False, True])
def test_to_makes_memory_and_copies(run: Any, non_blocking: bool) -> None:
    def program() -> None:
        pinned().to("cuda", non_blocking=non_blocking)

    watch = run(program)
    expected = [(STREAM, "rw")] + ([] if non_blocking else [BLOCKING])
    assert told(watch, 0)[2:] == expected  # after the pinned allocation and its fill


def test_asynchronous_copy_keeps_its_pinned_side(run: Any) -> None:
    watch = run(lambda: device().copy_(pinned(), non_blocking=True))
    copy = next(r for r in watch.records if isinstance(r, Op) and r.name.startswith("aten.copy_"))
    assert [access.kept for access in copy.accesses] == [True, False]
    watch = run(lambda: device().copy_(device()))
    copy = next(r for r in watch.records if isinstance(r, Op) and r.name.startswith("aten.copy_"))
    assert [access.kept for access in copy.accesses] == [False, False]


@pytest.mark.two_gpus
def test_copy_between_devices_joins_before_and_after(run: Any) -> None:
    def program() -> None:
        x, y = torch.ones(4, device="cuda:0"), torch.zeros(4, device="cuda:1")
        y.copy_(x)

    watch = run(program, devices=2)
    tail = [r for r in watch.records if isinstance(r, (RecordEvent, WaitEvent, Op))][2:]
    assert [(type(r).__name__, watch.lanes[r.lane].name) for r in tail] == [
        ("RecordEvent", "cuda:1 default"),
        ("WaitEvent", "cuda:0 default"),
        ("Op", "cuda:0 default"),
        ("RecordEvent", "cuda:0 default"),
        ("WaitEvent", "cuda:1 default"),
    ]


def test_pinning_is_done_by_the_host(run: Any) -> None:
    watch = run(lambda: torch.ones(4).pin_memory())
    assert told(watch, 0) == ["allocation", ("host", "w")]
