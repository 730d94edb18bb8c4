"""A small language for traces (integers, no tensor) and for programs that are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscurrent.schedules.order import PartialOrder
from crosscurrent.schedules.program import Action, Buffer, Call, Given, HostRead, Program, View, poison_of
from crosscurrent.trace.memory import region_of
from crosscurrent.trace.records import (
    HOST,
    Access,
    Alloc,
    Free,
    HostWait,
    Lane,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    Region,
    Site,
    TraceInfo,
    UseStream,
    WaitEvent,
)


class Script:
    """Writes a trace, one call a record."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._events = 0

    def op(self, lane: int, *accesses: tuple[int, str], name: str = "op") -> int:
        """An operation; accesses are ``(block, "r" or "w")``, of 64 bytes. Returns its record number."""
        touched = tuple(Access(block, Region(0, 64, 64), "w" in how) for block, how in accesses)
        return self._add(lambda index: Op(index, lane, name, 0, touched))

    def alloc(
        self, block: int, lane: int, nbytes: int = 512, *, pinned: bool = False, fresh: bool = True
    ) -> None:
        memory = MemoryKind.PINNED if pinned else MemoryKind.DEVICE
        self._add(lambda index: Alloc(index, block, lane, nbytes, memory, 0, fresh))

    def free(self, block: int) -> None:
        self._add(lambda index: Free(index, block, 0))

    def use(self, block: int, lane: int) -> None:
        self._add(lambda index: UseStream(index, block, lane, 0))

    def record(self, lane: int) -> int:
        self._events += 1
        event = self._events
        self._add(lambda index: RecordEvent(index, lane, event, 0, "record"))
        return event

    def wait(self, lane: int, event: int) -> None:
        if lane == HOST:
            self._add(lambda index: HostWait(index, "event", event, (), 0))
        else:
            self._add(lambda index: WaitEvent(index, lane, event, 0, "wait_event"))

    def edge(self, source: int, target: int) -> None:
        """What ``source`` has been given -> what ``target`` is given from now on."""
        self.wait(target, self.record(source))

    def synchronize(self, *lanes: int) -> None:
        self._add(lambda index: HostWait(index, "synchronize", None, lanes, 0))

    @property
    def order(self) -> PartialOrder:
        return PartialOrder.of(self.records)

    def _add(self, make: Callable[[int], Record]) -> int:
        index = len(self.records)
        self.records.append(make(index))
        return index


class Hand(Script):
    """Writes a program: a trace, and what to run again."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[int, Buffer] = {}
        self._actions: dict[int, tuple[Action, ...]] = {}
        self._host_reads: list[HostRead] = []

    def empty(self, lane: int, *shape: int, dtype: torch.dtype = torch.float64, pinned: bool = False) -> View:
        """A new block that holds nothing yet."""
        return self._block(lane, torch.empty(*shape, dtype=dtype), fresh=True, pinned=pinned)

    def full(self, lane: int, content: Tensor, *, pinned: bool = False) -> View:
        """A block that is older than the trace, with its content."""
        view = self._block(lane, content, fresh=False, pinned=pinned)
        raw = content.contiguous().flatten().view(torch.uint8).clone()
        self._buffers[view.block] = self._buffers[view.block]._replace(initial=raw)
        return view

    def call(
        self,
        lane: int,
        func: str,
        *args: Any,
        out: View | None = None,
        inplace: bool = False,
        fills: bool = False,
        **kwargs: Any,
    ) -> None:
        """Run an op: views among ``args`` are read, ``out`` is written, ``inplace`` writes the first one,
        and so does ``fills``, without reading it."""
        views = [arg for arg in args if isinstance(arg, View)]
        accesses = [_access(view, write=False) for view in views[fills:]]
        inplace = inplace or fills
        if out is not None:
            accesses.append(_access(out, write=True))
        if inplace:
            accesses.append(_access(views[0], write=True))
        index = self._add(lambda index: Op(index, lane, func, 0, tuple(accesses)))
        self._actions[index] = (Call(func, args, kwargs, (None,) if inplace else (out,)),)

    def update(self, lane: int, view: View, *sources: View, kept: bool = False) -> None:
        """``view = odd * view + sources + constant``: generic, so that no two updates commute."""
        number = len(self.records)
        accesses = [_access(source, write=False) for source in (*sources, view)] + [_access(view, write=True)]
        if kept:
            accesses = [access._replace(kept=True) for access in accesses]
        index = self._add(lambda index: Op(index, lane, "update", 0, tuple(accesses)))
        self._actions[index] = (
            Call("aten::mul_.Scalar", (view, 2 * number + 3), {}, (None,)),
            *(Call("aten::add_.Tensor", (view, source), {}, (None,)) for source in sources),
            Call("aten::add_.Scalar", (view, 7 * number + 1), {}, (None,)),
        )

    def fill(self, lane: int, view: View) -> None:
        """The first write of a new block."""
        self.call(lane, "aten::fill_.Scalar", view, 1000 + len(self.records), fills=True)

    def give(self, lane: int, reads: Mapping[View, Tensor], writes: Mapping[View, Tensor]) -> None:
        """A kernel that nobody can run again."""
        accesses = [_access(view, write=False) for view in reads] + [
            _access(view, write=True) for view in writes
        ]
        index = self._add(lambda index: Op(index, lane, "kernel", 0, tuple(accesses)))
        self._actions[index] = (Given(tuple(reads.items()), tuple(writes.items())),)

    def read(self, lane: int, view: View, name: str, *, kept: bool = False) -> None:
        """The host gets a copy of a tensor; it does not wait."""
        number = -1 - len(self._host_reads)
        copy = View(number, view.dtype, view.shape, _contiguous(view.shape), 0)
        self._buffers[number] = Buffer(view.numel * view.torch_dtype.itemsize, poison_of(view.torch_dtype))
        access = _access(view, write=False)._replace(kept=kept)
        index = self._add(lambda index: Op(index, lane, "aten::copy_", 0, (access,)))
        self._actions[index] = (Call("aten::copy_", (copy, view), {}, (None,)),)
        self._host_reads.append(HostRead(copy, name))

    def program(self, **names: View) -> Program:
        lanes = max((record.lane for record in self.records if isinstance(record, Op)), default=0)
        return Program(
            records=tuple(self.records),
            info=TraceInfo([Lane(i, f"lane {i}") for i in range(lanes + 1)], [Site("hand.py", 1, "hand")]),
            buffers=dict(self._buffers),
            actions=dict(self._actions),
            host_reads=tuple(self._host_reads),
            names=names,
        )

    def _block(self, lane: int, like: Tensor, *, fresh: bool, pinned: bool) -> View:
        number = sum(block >= 0 for block in self._buffers)
        self._buffers[number] = Buffer(like.nbytes, poison_of(like.dtype))
        self.alloc(number, lane, like.nbytes, fresh=fresh, pinned=pinned)
        return View.of(like.contiguous(), number)


def _access(view: View, *, write: bool) -> Access:
    region = region_of(view.offset, view.shape, view.strides, view.torch_dtype.itemsize)
    assert region is not None
    return Access(view.block, region, write, view.shape, view.dtype)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def new_script() -> Callable[[], Script]:
    return Script


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture(scope="session")
def new_hand() -> Callable[[], Hand]:
    return Hand
