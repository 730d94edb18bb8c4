"""What usual ops read and write, when the same memory is seen in one layout after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import crosscurrent
from crosscurrent.trace.records import HOST, Op

Seen = list[tuple[str, int, int, str]]
"""``r`` or ``w``, the first byte, one past the last, and the type."""


@pytest.fixture
def seen(run: Any) -> Callable[[Callable[[], Any]], list[Seen]]:
    """The accesses of each op of a program but the first, which makes its memory."""

    def seen(program: Callable[[], Any]) -> list[Seen]:
        ops = [record for record in run(program).records if isinstance(record, Op)]
        return [
            [
                ("w" if write else "r", region.start, region.stop, dtype)
                for _, region, write, _, dtype, _ in op.accesses
            ]
            for op in ops[1:]
        ]

    return seen


def updated(start: int, stop: int, dtype: str = "float32") -> Seen:
    return [("r", start, stop, dtype), ("w", start, stop, dtype)]


def test_each_layout_of_a_block_is_its_own(seen: Any) -> None:
    def program() -> None:
        x = torch.zeros(4, 4, device="cuda")
        x.add_(1)
        x[0].add_(1)
        x[1].add_(1)  # another offset
        x[0, ::3].add_(1)  # another stride
        x[0, :2].add_(1)  # another shape
        x[0, :2].view(torch.int32).add_(1)  # another type
        x.add_(1)

    assert seen(program) == [
        updated(0, 64),
        updated(0, 16),
        updated(16, 32),
        updated(0, 16),
        updated(0, 8),
        updated(0, 8, "int32"),
        updated(0, 64),
    ]


def test_a_tensor_that_changes_its_own_layout_is_seen_in_the_new_one(seen: Any) -> None:
    def program() -> None:
        base = torch.zeros(4, 4, device="cuda")
        x = base[0]
        x.add_(1)
        x.data = base[2]  # the same object, memory, shape and strides
        x.add_(1)
        x.set_(base[1])
        x.add_(1)
        x.resize_(2)
        x.add_(1)

    assert seen(program) == [updated(0, 16), updated(32, 48), updated(16, 32), updated(16, 24)]


def test_memory_that_is_handed_on_is_another_block(run: Any) -> None:
    def program() -> None:
        for _ in range(3):
            x = torch.zeros(4, device="cuda")
            x.add_(1)
            del x

    ops = [record for record in run(program).records if isinstance(record, Op)]
    assert [len({access.block for access in op.accesses}) for op in ops] == [1] * 6
    assert len({op.accesses[0].block for op in ops}) == 3


def test_every_new_result_is_written(seen: Any) -> None:
    def program() -> None:
        torch.zeros(4, 4, device="cuda").max(dim=0)

    ((read, *written),) = seen(program)
    assert read == ("r", 0, 64, "float32")
    assert written == [("w", 0, 16, "float32"), ("w", 0, 32, "int64")]


def test_numbers_and_numbers_of_the_host_are_no_accesses(seen: Any) -> None:
    def program() -> None:
        x = torch.zeros(4, device="cuda")
        x.mul_(2.0)
        x.mul_(torch.tensor(2.0))

    assert seen(program) == [updated(0, 16), updated(0, 16)]


@pytest.mark.parametrize("pinned", [True, False])
def test_an_op_of_the_host_alone_is_on_no_stream(run: Any, pinned: bool) -> None:
    def program() -> None:
        host = torch.empty(4, pin_memory=pinned)
        host.fill_(1)
        host.add_(1)

    watch: crosscurrent.Watch = run(program)
    ops = [record for record in watch.records if isinstance(record, Op)]
    assert [op.lane for op in ops] == ([HOST, HOST] if pinned else [])
