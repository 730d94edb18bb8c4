"""What the host does to pinned memory through NumPy arrays."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import crosscurrent
from crosscurrent.trace.memory import region_of_loops
from crosscurrent.trace.records import Op, Region

ROWS, COLUMNS = 4, 6
ROW = COLUMNS * 4
WHOLE = (0, ROWS * ROW)

READ, WRITE = "r", "w"


def touched(machine: Any, act: Callable[[Any], Any]) -> list[tuple[str, int, int]]:
    """What ``act`` does to an array, as ``(read or write, first byte, last byte + 1)``."""
    with machine(), crosscurrent.watch(trace=True) as watch:
        array = torch.ones(ROWS, COLUMNS, pin_memory=True).numpy()
        start = len(watch.records)
        act(array)
        return [
            (WRITE if access.write else READ, access.region.start, access.region.stop)
            for record in watch.records[start:]
            if isinstance(record, Op)
            for access in record.accesses
        ]


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda a: a[1, 2], [(READ, ROW + 8, ROW + 12)]),
        (lambda a: a[-1, -1], [(READ, 4 * ROW - 4, 4 * ROW)]),
        (lambda a: float(a[0, 0]), [(READ, 0, 4)]),
        (lambda a: a[1].sum(), [(READ, ROW, 2 * ROW)]),
        (lambda a: a + 1, [(READ, *WHOLE)]),
        (lambda a: a[::-1][0].max(), [(READ, 3 * ROW, 4 * ROW)]),
        (lambda a: a[a > 0], [(READ, *WHOLE)] * 2),
        (lambda a: a[[0, 2]], [(READ, *WHOLE)]),
        (lambda a: a.copy(), [(READ, *WHOLE)]),
        (lambda a: a[0].tolist(), [(READ, 0, ROW)]),
        (lambda a: np.concatenate([a, a]), [(READ, *WHOLE)] * 2),
        (lambda a: np.mean(a[2]), [(READ, 2 * ROW, 3 * ROW)]),
        (lambda a: pickle.loads(pickle.dumps(a)), [(READ, *WHOLE)]),
        (lambda a: sum(row.sum() for row in a), [(READ, i * ROW, (i + 1) * ROW) for i in range(ROWS)]),
        (lambda a: a.__setitem__((0, 1), 5.0), [(WRITE, 4, 8)]),
        (lambda a: a.__setitem__(slice(1, 3), 0.0), [(WRITE, ROW, 3 * ROW)]),
        (lambda a: a[0].__setitem__(slice(None), a[1]), [(READ, ROW, 2 * ROW), (WRITE, 0, ROW)]),
        (lambda a: a.__setitem__(a > 0, 0.0), [(READ, *WHOLE), (WRITE, *WHOLE)]),
        (lambda a: a[3].fill(2.0), [(WRITE, 3 * ROW, 4 * ROW)]),
        (lambda a: a.__iadd__(1), [(READ, *WHOLE), (WRITE, *WHOLE)]),
        (lambda a: np.add(np.ones(COLUMNS), 1, out=a[0], casting="unsafe"), [(WRITE, 0, ROW)]),
        (lambda a: np.copyto(a[1], 3.0), [(WRITE, ROW, 2 * ROW)]),
        (lambda a: np.add.at(a[0], [0], 1.0), [(READ, 0, ROW), (WRITE, 0, ROW)]),
        (lambda a: a.sum(axis=0, out=a[0]), [(READ, *WHOLE), (WRITE, 0, ROW)]),
        (lambda a: a[0].sort(), [(WRITE, 0, ROW)]),
    ],
)
def test_access(machine: Any, act: Callable[[Any], Any], expected: list[Any]) -> None:
    assert touched(machine, act) == expected


@pytest.mark.parametrize(
    "act",
    [
        lambda a: (a.shape, a.dtype, len(a), a.nbytes),
        lambda a: a[1:3, ::2],
        lambda a: a.reshape(-1, 2).T[:, :0].sum(),
        lambda a: np.transpose(a)[1:].squeeze(),
        lambda a: a.ravel()[3:],
        lambda a: a[None, ..., 0],
        lambda a: a.copy().sum() and None if a.size == 0 else None,
    ],
)
def test_views_touch_nothing(machine: Any, act: Callable[[Any], Any]) -> None:
    assert touched(machine, act) == []


def test_views_stay_watched_and_copies_are_ordinary(machine: Any) -> None:
    kinds: list[type] = []

    def act(array: Any) -> None:
        views = [array.T, array[1:], np.reshape(array, -1), array.ravel(), np.split(array, 2)[1]]
        copies = [array.copy(), array + 1, array[[0]], array.T.ravel(), np.stack([array]), array.astype(int)]
        kinds.extend(type(view) for view in views)
        assert all(type(copy) is np.ndarray for copy in copies)

    touched(machine, act)
    assert len(set(kinds)) == 1
    assert kinds[0] is not np.ndarray


def test_pageable_tensors_give_ordinary_arrays(machine: Any) -> None:
    with machine(), crosscurrent.watch():
        assert type(torch.ones(3).numpy()) is np.ndarray
        assert type(torch.ones(3, device="cuda").cpu().numpy()) is np.ndarray


def test_values_are_the_tensors(machine: Any) -> None:
    with machine(), crosscurrent.watch():
        tensor = torch.arange(6.0).view(2, 3).pin_memory()
        array = tensor.numpy()
        array[0] += 10
        array[:, 2] = -1
        np.multiply(array, 2, out=array)
    expected = torch.tensor([[20.0, 22.0, -2.0], [6.0, 8.0, -2.0]])
    assert torch.equal(torch.from_numpy(array.copy()), expected)
    assert tensor.tolist() == expected.tolist()


def refill(wait: bool) -> None:
    stage = torch.zeros(4, pin_memory=True)
    array = stage.numpy()
    device = torch.zeros(4, device="cuda")
    for step in range(2):
        if wait:
            torch.cuda.synchronize()
        array[:] = step
        device.copy_(stage, non_blocking=True)


def test_refilling_a_staging_buffer_through_its_array_is_a_race(run: Any) -> None:
    (finding,) = run(refill, False).findings
    assert finding.kind.value == "write-after-read"
    assert (finding.first.op, finding.second.op) == ("aten.copy_.default", "numpy.setitem")


def test_refilling_after_a_wait_is_none(run: Any) -> None:
    assert run(refill, True).findings == []


def test_negative_strides_are_turned_round() -> None:
    assert region_of_loops(12, [(4, -4)], 4) == Region(0, 16, 16)
    assert region_of_loops(24, [(4, -8)], 4) == Region(0, 28, 4, ((4, 8),))


def test_array_outlives_the_watch(machine: Any) -> None:
    with machine():
        with crosscurrent.watch(trace=True) as watch:
            array = torch.ones(3, pin_memory=True).numpy()
        num = len(watch.records)
        array[:] = 2
        assert array.sum() == 6
    assert len(watch.records) == num
    assert array.tolist() == [2, 2, 2]


def _through(make: Callable[[torch.Tensor], Any], use: Callable[[Any], Any], *, wait: bool) -> Any:
    """A copy to the host, whose memory is then read under the name that ``make`` gave it before."""

    def program() -> None:
        host, x = torch.zeros(8, pin_memory=True), torch.ones(8, device="cuda")
        alias = make(host)
        host.copy_(x, non_blocking=True)
        if wait:
            torch.cuda.synchronize()
        use(alias)

    return program


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda host: torch.from_numpy(host.numpy()[2:]), lambda alias: alias.sum()),
        (lambda host: torch.from_numpy(np.asarray(host)), lambda alias: alias.sum()),
        (lambda host: torch.as_tensor(host.numpy()), lambda alias: alias + 1),
        (lambda host: torch.asarray(host.numpy()), lambda alias: alias + 1),
        (
            lambda host: torch.frombuffer(memoryview(host.numpy()), dtype=torch.float32),
            lambda alias: alias.sum(),
        ),
        (lambda host: torch.from_dlpack(host), lambda alias: alias.sum()),
        (lambda host: torch.from_numpy(host.numpy()), lambda alias: alias.fill_(3)),
        (lambda host: host.numpy(), lambda alias: torch.tensor(alias)),
        (lambda host: host.numpy(), lambda alias: torch.as_tensor(alias, dtype=torch.float64)),
        (lambda host: host.numpy(), lambda alias: np.array(alias)),
        (lambda host: host.numpy(), lambda alias: np.asarray(alias, dtype=np.float64)),
        (lambda host: np.asarray(host), lambda alias: alias.sum()),
        (lambda host: np.asarray(host.numpy()), lambda alias: alias[0]),
        (lambda host: np.frombuffer(host.numpy(), np.int32), lambda alias: alias.sum()),
        (lambda host: np.frombuffer(memoryview(host.numpy()), np.uint8, 4, 8), lambda alias: alias + 1),
        (lambda host: np.ascontiguousarray(host.numpy()), lambda alias: alias.fill(1)),
        (lambda host: host.numpy(), copy.deepcopy),
    ],
)
def test_memory_is_known_under_its_other_names(
    run: Any, make: Callable[[torch.Tensor], Any], use: Callable[[Any], Any], wait: bool
) -> None:
    watch = run(_through(make, use, wait=wait))
    assert len(watch.findings) == (not wait), watch.report()
    assert not watch.unknown, watch.report()


def test_a_tensor_made_of_an_array_is_pinned(machine: Any) -> None:
    with machine(), crosscurrent.watch():
        host = torch.arange(8.0).pin_memory()
        alias = torch.from_numpy(host.numpy()[1::2])
        assert alias.is_pinned()
        assert alias.tolist() == [1.0, 3.0, 5.0, 7.0]
        alias.zero_()
        assert host.sum() == 12.0


def test_what_numpy_takes_through_dlpack_is_listed(run: Any) -> None:
    watch = run(_through(np.from_dlpack, lambda alias: alias.sum(), wait=False))
    assert [each.op for each in watch.unknown] == ["Tensor.__dlpack__"]
