"""The cost model: bytes and operations over rates, in whole nanoseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from crosscurrent.report.costs import (
    Cost,
    CostModel,
    Direction,
    Rates,
    arithmetic,
    base_name,
    program_of,
    size,
)
from crosscurrent.report.makespan import Stop
from crosscurrent.trace.records import HOST, Access, Alloc, HostWait, Op, Region

RATES = Rates(
    operations_per_second=10**12,
    wide_operations_per_second=10**9,
    device_bytes_per_second=10**9,
    link_bytes_per_second=10**8,
    host_bytes_per_second=10**7,
    kernel_floor=5,
    copy_floor=3,
    issue=1,
)
"""One byte takes 1 ns on the device, 10 ns on the link, 100 ns on the host; one float32 operation 1 ns."""

MAIN = 1


def cost_of(trace: Any) -> Cost:
    model = CostModel(trace.info, RATES)
    for record in trace.records:
        if isinstance(record, Alloc):
            model.see(record)
    return model.cost(next(record for record in trace.records if isinstance(record, Op)))


@pytest.fixture
def trace(new_trace: Callable[[], Any]) -> Any:
    trace = new_trace()
    trace.alloc(1, MAIN, 400)
    trace.alloc(2, MAIN, 400)
    trace.alloc(9, HOST, 400, pinned=True)
    return trace


@pytest.mark.parametrize(
    ("name", "accesses", "expected"),
    [
        ("aten.copy_.default", [(9, "r"), (1, "w")], Cost(4000, Direction.HOST_TO_DEVICE, 400)),
        ("aten.copy_.default", [(1, "r"), (9, "w")], Cost(4000, Direction.DEVICE_TO_HOST, 400)),
        ("aten.copy_.default", [(1, "w")], Cost(4000, Direction.HOST_TO_DEVICE, 400, True)),
        ("aten._to_copy.default", [(1, "r")], Cost(4000, Direction.DEVICE_TO_HOST, 400, True)),
        ("aten.copy_.default", [(1, "r"), (2, "w")], Cost(800)),
        ("aten._local_scalar_dense.default", [(1, "r")], Cost(4000, Direction.DEVICE_TO_HOST, 400)),
        ("aten.relu.default", [(1, "r"), (2, "w")], Cost(800)),
        ("aten.mm.default", [(1, "r"), (1, "r"), (2, "w")], Cost(2000)),
    ],
)
def test_known_costs(trace: Any, name: str, accesses: list[tuple[int, str]], expected: Cost) -> None:
    trace.op(MAIN, name, *accesses, shape=(10, 10))
    assert cost_of(trace) == expected


def test_the_host_moves_its_own_bytes(trace: Any) -> None:
    trace.op(HOST, "aten.copy_.default", (9, "w"), shape=(10, 10))
    assert cost_of(trace) == Cost(40_000)


def test_small_work_takes_the_least_time(trace: Any) -> None:
    trace.op(MAIN, "aten.relu.default", (1, "w"), shape=(1,))
    assert cost_of(trace) == Cost(5)


def test_a_copy_between_devices_is_a_transfer(new_trace: Callable[[], Any]) -> None:
    trace = new_trace()
    trace.info.lanes[2] = trace.info.lanes[2]._replace(device=1)
    trace.alloc(1, MAIN, 400)
    trace.alloc(2, 2, 400)
    trace.op(MAIN, "aten.copy_.default", (1, "r"), (2, "w"), shape=(10, 10))
    assert cost_of(trace) == Cost(4000, Direction.PEER, 400)


def test_many_tensors_in_one_copy_move_all_their_bytes(trace: Any) -> None:
    accesses = [(9, "r"), (1, "w"), (9, "r"), (2, "w")]
    trace.op(MAIN, "aten._foreach_copy_.default", *accesses, shape=(10, 10))
    assert cost_of(trace).nbytes == 800


def access(shape: tuple[int, ...], write: bool = False) -> Access:
    return Access(0, Region(0, 4, 4), write, shape, "torch.float32")


@pytest.mark.parametrize(
    ("name", "reads", "writes", "expected"),
    [
        ("aten.mm.default", [(3, 5), (5, 7)], [(3, 7)], 2 * 3 * 5 * 7),
        ("aten.bmm.default", [(2, 3, 5), (2, 5, 7)], [(2, 3, 7)], 2 * 2 * 3 * 5 * 7),
        ("aten.addmm.default", [(7,), (3, 5), (5, 7)], [(3, 7)], 2 * 3 * 5 * 7),
        (
            "aten._scaled_dot_product_flash_attention.default",
            [(1, 2, 8, 4), (1, 2, 16, 4), (1, 2, 16, 4)],
            [(1, 2, 8, 4)],
            4 * 2 * 8 * 16 * 4,
        ),
        (
            "aten._scaled_dot_product_flash_attention_backward.default",
            [(1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 16, 4), (1, 2, 16, 4)],
            [(1, 2, 8, 4)],
            10 * 2 * 8 * 16 * 4,
        ),
        (
            "aten._flash_attention_forward.default",
            [(1, 8, 2, 4), (1, 16, 2, 4), (1, 16, 2, 4)],
            [(1, 8, 2, 4)],
            4 * 2 * 8 * 16 * 4,
        ),
        ("mine.attend.default", [(1, 2, 8, 4), (1, 1, 16, 4)], [(1, 2, 8, 4)], 4 * 2 * 8 * 16 * 4),
        ("aten.mm.default", [(5, 5)], [(5, 5)], 2 * 5 * 5 * 5),
        ("aten.mm.default", [], [(5, 5)], 0),
        ("aten.convolution.default", [(1, 3, 8, 8), (6, 3, 2, 2)], [(1, 6, 7, 7)], 2 * 6 * 49 * 12),
        ("aten.add.Tensor", [(3, 5), (3, 5)], [(3, 5)], 0),
    ],
)
def test_known_arithmetic(
    name: str, reads: list[tuple[int, ...]], writes: list[tuple[int, ...]], expected: int
) -> None:
    accesses = tuple([access(shape) for shape in reads] + [access(shape, True) for shape in writes])
    assert arithmetic(Op(0, MAIN, name, 0, accesses)) == expected


def test_a_strided_region_counts_its_bytes_and_not_its_span() -> None:
    assert size(Region(0, 104, 4, ((2, 80), (3, 10)))) == 24


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("aten.copy_.default", "copy_"),
        ("aten::copy_", "copy_"),
        ("mine.scale.default", "scale"),
        ("op", "op"),
    ],
)
def test_base_names(name: str, base: str) -> None:
    assert base_name(name) == base


def test_a_pageable_copy_to_a_device_holds_up_the_host(trace: Any) -> None:
    name = "aten.copy_.default"
    trace._add(lambda index, site: HostWait(index, "pageable copy", None, (), site, name))
    trace.op(MAIN, name, (1, "w"), shape=(10, 10))
    steps, _, _ = program_of(trace.records, trace.info, RATES)
    assert steps[0] == Stop(None, (), 40_000)


@pytest.mark.parametrize("name", ["operations_per_second", "link_bytes_per_second"])
def test_rates_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Rates(**{name: 0})
