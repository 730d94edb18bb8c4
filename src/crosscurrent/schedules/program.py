"""A program: a trace, and what it takes to run it again.

The records say in which orders it can run. For each operation the program holds its *actions*: the op
and its arguments with tensors as views of blocks (``Call``), or, where there is no code to run again (a
kernel that was only declared, the host writing through NumPy, a random fill), the values that came
out (``Given``). Memory that existed before, or that the host wrote, comes with its content; all other
memory starts as poison. What the host read lies in blocks of its own, numbered from -1 down, so that the
whole state of a run is memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crosscurrent.schedules.order import PartialOrder
from crosscurrent.schedules.reuse import Reuse, check
from crosscurrent.trace.memory import region_of
from crosscurrent.trace.records import DropEvent, Free, Op, Record, TraceInfo


class View(NamedTuple):
    """A tensor as a view of a block: strides and offset in elements."""

    block: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    lazy: str = ""
    """``conj`` or ``neg`` (or both): what PyTorch does to the elements as they are read."""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @classmethod
    def of(cls, tensor: Tensor, block: int) -> View:
        return cls(
            block,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            "conj" * tensor.is_conj() + "neg" * tensor.is_neg(),
        )


class Buffer(NamedTuple):
    """The memory of one block."""

    nbytes: int
    fill: int
    """The byte that poisons it: see ``poison_of``."""

    initial: Tensor | None = None
    """Its bytes (uint8) at the start, if it held something then."""


class Call(NamedTuple):
    """Run an op again. Arguments are plain values, views, and tensors of the host's own memory."""

    func: str | Callable[..., Any]
    """``namespace::name.overload``, or something that only this process can call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[View | None, ...]
    """Where what the op returns goes, flat; None for what is an argument or a view of one."""

    random: Tensor | None = None
    """The state of the generator before the call, if the op draws from one."""


class Given(NamedTuple):
    """Put values where they were seen. If what it read is not what it was, what it wrote is poison."""

    reads: tuple[tuple[View, Tensor], ...]
    writes: tuple[tuple[View, Tensor], ...]


Action = Call | Given


class HostRead(NamedTuple):
    """Something that the host read: where it ends up, and what to call it."""

    view: View
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A trace that can be run again, in any order that its edges allow."""

    records: tuple[Record, ...]
    info: TraceInfo
    buffers: Mapping[int, Buffer]
    """By block; those with negative numbers belong to the host."""

    actions: Mapping[int, tuple[Action, ...]]
    """By the record number of the operation."""

    host_reads: tuple[HostRead, ...] = ()
    names: Mapping[str, View] = field(default_factory=dict)
    """The final values that the user has names for."""

    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """What was seen in the run that was recorded, by name and by the name of what the host read."""

    device: str = "cpu"
    """Where it ran: ``cpu`` for simulated CUDA, else ``cuda``. Elsewhere the bits may differ."""

    def order(self, reuse: Sequence[Reuse] = ()) -> PartialOrder:
        """What must come before what, once it is decided who is handed whose memory."""
        check(self.records, reuse)
        return PartialOrder.of(self.records, {choice.block: choice.old for choice in reuse})

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that tell this program from another; values and source lines do not matter."""
        return fingerprint(self.records)


def fingerprint(records: Sequence[Record]) -> str:
    """Twelve hex digits that tell what a trace does: its lanes, ops, regions, edges and memory."""
    digest = hashlib.blake2b(digest_size=6)
    for record in _settled(records):
        plain: Any = record
        if isinstance(record, Op):
            plain = (
                record.lane,
                record.name,
                *((a.block, a.region, a.write, a.kept) for a in record.accesses),
            )
        else:
            plain = tuple(
                str(value)
                for name, value in zip(record._fields, record, strict=True)
                if name not in ("index", "site", "via", "reason")
            )
        digest.update(repr((type(record).__name__, tuple(plain))).encode())
    return digest.hexdigest()


def _settled(records: Sequence[Record]) -> Iterator[Record]:
    """The records without what differs between versions of Python, and from run to run.

    Events are dropped when the garbage collector comes by. And in which order a function lets go of its
    variables at its end is up to Python; frees with nothing in between mean the same in any order.
    """
    frees: list[Free] = []
    for record in records:
        if isinstance(record, Free):
            frees.append(record)
        elif not isinstance(record, DropEvent):
            yield from sorted(frees, key=lambda free: free.block)
            frees.clear()
            yield record
    yield from sorted(frees, key=lambda free: free.block)


def views_in(value: Any) -> Iterator[View]:
    """The views among the arguments of a call, however deep."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from views_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from views_in(item)


def views_of(action: Action) -> Iterator[View]:
    """All views of an action."""
    if isinstance(action, Call):
        yield from views_in(action.args)
        yield from views_in(action.kwargs)
        yield from (view for view in action.results if view is not None)
    else:
        yield from (view for view, _ in (*action.reads, *action.writes))


def whole_views(program: Program) -> dict[int, View]:
    """By block: a view of all of it, in the type (and if that is all of it, the shape) of its widest view."""
    widest: dict[int, tuple[int, View]] = {}
    for actions in program.actions.values():
        for action in actions:
            for view in views_of(action):
                size = _num_bytes(view)
                if view.block not in widest or size > widest[view.block][0]:
                    widest[view.block] = size, view
    whole = {}
    for block, (size, view) in widest.items():
        nbytes, itemsize = program.buffers[block].nbytes, view.torch_dtype.itemsize
        if size != nbytes or view.numel * itemsize != nbytes:
            dtype, count = ("uint8", nbytes) if nbytes % itemsize else (view.dtype, nbytes // itemsize)
            view = View(block, dtype, (count,), (1,), 0)
        whole[block] = view
    return whole


def _num_bytes(view: View) -> int:
    """How many bytes a view touches, if no two of its dimensions overlap."""
    region = region_of(view.offset, view.shape, view.strides, view.torch_dtype.itemsize)
    if region is None:
        return 0
    count = region.run
    for repeated, _ in region.dims:
        count *= repeated
    return count


def poison_of(dtype: torch.dtype) -> int:
    """The byte that makes memory of this type show that it was read too early.

    Only ones is a NaN in every floating-point format. For integers a fixed garbage that is out of range
    as an index; for booleans the one value besides zero that is one.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return 0xFF
    return 0x01 if dtype is torch.bool else 0x5A
