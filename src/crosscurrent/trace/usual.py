"""The records of usual ops, made on a path of their own.

Note [The usual op]
    Nearly all ops of a program take a few tensors of one device, which were seen before, and return nothing
    or new tensors. ``usual`` makes their records and does nothing that they do not need; it steps aside
    (returns False) for all others before it has emitted an op. What can be known of an overload is worked
    out once, in its ``Plan``. A block keeps the accesses that the op before made to it (``Block.write``,
    and ``Block.read`` once it is read): as long as it is seen in the same layout, which is compared in
    full, there is nothing to look up or to make. The layout of a result is mostly that of the op's last one.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from torch import Tensor, UntypedStorage

from crosscurrent.trace.access import Kind, Signature, Use
from crosscurrent.trace.memory import Block, Layout
from crosscurrent.trace.records import Access, MemoryKind, Op
from crosscurrent.trace.sync import SyncTaps

_new: Final[Any] = tuple.__new__
# What is final is no look-up in compiled code.
_TENSOR: Final[Any] = Tensor
_OP: Final[Any] = Op
_ACCESS: Final[Any] = Access
# Nor is a method of PyTorch's own that is called as a function.
_storage: Final[Any] = Tensor.untyped_storage
_strides: Final[Any] = Tensor.stride
_offset: Final[Any] = Tensor.storage_offset
_is_contiguous: Final[Any] = Tensor.is_contiguous
_nbytes: Final[Any] = UntypedStorage.nbytes
_DEVICE: Final = MemoryKind.DEVICE
_NONE: Final = -2  # no device, and not that of host memory either
_NO_TENSORS: Final = frozenset({type(None), bool, int, float, complex})

Single: TypeAlias = tuple[int, bool, bool]
"""The position of an argument that is one tensor, whether it is read, and whether it is written."""


class Plan:
    """What is known of an overload, worked out once for each trace."""

    __slots__ = (
        "covers",
        "device",
        "dtype",
        "func",
        "layout",
        "makes_tensors",
        "may_move",
        "name",
        "named",
        "offset",
        "shape",
        "sign",
        "singles",
        "strides",
        "touches_nothing",
        "trace",
    )

    trace: object
    """What the plans of one trace have in common; not its tracer, which would keep itself alive."""
    func: Any
    """The op; kept, so that its id is its own."""
    singles: tuple[Single, ...] | None
    """None for an op with lists of tensors, or with rules of its own."""
    shape: Any
    """The layout of its last new result, and below the device."""
    strides: Any
    offset: Any
    dtype: Any
    covers: int
    """The size of a block that this layout covers; -1 if it covers none."""
    layout: Layout
    device: int

    def __init__(self, trace: object, func: Any, sign: Signature) -> None:
        self.trace = trace
        self.func = func
        self.sign = sign
        self.name = sign.name
        self.named = sign.named
        self.makes_tensors = sign.makes_tensors
        self.touches_nothing = sign.kind is Kind.NOTHING
        self.may_move = sign.may_move
        self.shape = None
        self.singles = None
        if sign.kind is Kind.PLAIN and sign.singles is not None:
            self.singles = tuple(
                (place, bool(use & Use.READ), bool(use & Use.WRITE)) for place, use in sign.singles
            )


class UsualOps(SyncTaps):
    """Makes the records of usual ops; see Note [The usual op]."""

    __slots__ = ()

    def usual(self, plan: Plan, args: tuple[Any, ...], kwargs: Any, out: Any) -> bool:
        """Make the record of a usual op; False: it is none, and no op was made."""
        singles = plan.singles
        if singles is None or (kwargs and not plan.named.isdisjoint(kwargs)):
            return False
        device = _NONE
        accesses: list[Any] = []
        blocks = self._blocks
        num = len(args)
        for place, reads, writes in singles:
            if place >= num:
                break
            tensor = args[place]
            kind = type(tensor)
            if kind is not _TENSOR and kind in _NO_TENSORS:
                continue  # left out, or a number in its place
            try:
                block = blocks[_storage(tensor)._cdata]
            except (AttributeError, KeyError, NotImplementedError, TypeError):
                return False
            if block.device != device:
                if device != _NONE or not block.on_device:
                    return False
                device = block.device
            if not (
                tensor.shape == block.shape
                and (_is_contiguous(tensor) if block.strides is None else _strides(tensor) == block.strides)
                and tensor.dtype is block.dtype
                and (block.is_covered or _offset(tensor) == block.offset)
            ):
                self._lay(block, tensor)
            write = block.write
            if write is not None:
                if reads:
                    read = block.read
                    if read is None:
                        read = block.read = reading(write)
                    accesses.append(read)
                if writes:
                    accesses.append(write)
        lane = -1
        if device != _NONE:
            stream: int = self._current_stream(device)
            if stream == self._last_stream and device == self._last_device:
                lane = self._last_lane
            else:
                lane = self.lane(device, stream)
        if plan.makes_tensors:
            if type(out) is _TENSOR:
                lane = self._new_result(plan, out, accesses, device, lane)
            elif type(out) is tuple or type(out) is list:
                for result in out:
                    if result is None:
                        continue
                    if type(result) is not _TENSOR:
                        return False
                    lane = self._new_result(plan, result, accesses, device, lane)
                    if lane < 0:
                        return False
                    device = plan.device
            else:
                return False
            if lane < 0:
                return False
        if accesses:
            index = self._index
            self._index = index + 1
            self._sink.op(_new(_OP, (index, lane, plan.name, self.site, tuple(accesses))))
        return True

    def _new_result(self, plan: Plan, result: Any, accesses: list[Any], device: int, lane: int) -> int:
        """Add the write of a new result on a device; gives its lane, or -1 if it is something else.

        ``device`` and ``lane`` are those of the arguments, if there are any on a device.
        """
        blocks = self._blocks
        try:
            storage = _storage(result)
        except NotImplementedError:
            return -1
        cdata = storage._cdata
        if cdata in blocks:
            return -1  # in the memory of an argument
        on: int = self._device_of(result)
        if on != device or on < 0:
            if on < 0 or device != _NONE:
                return -1
            device = on
            lane = self.lane(device)
        plan.device = device
        shape = result.shape
        dtype = result.dtype
        nbytes: int = _nbytes(storage)
        if not (
            shape == plan.shape
            and (_is_contiguous(result) if plan.strides is None else _strides(result) == plan.strides)
            and dtype is plan.dtype
            and (nbytes == plan.covers or _offset(result) == plan.offset)
        ):
            strides = _strides(result)
            offset = _offset(result)
            key: Any = (shape, strides, offset, dtype)
            plan.layout = self.layouts.known.get(key) or self.layouts.learn(key)
            plan.shape = shape
            plan.strides = None if _is_contiguous(result) else strides
            plan.offset = offset
            plan.dtype = dtype
            plan.covers = nbytes if covers(plan.layout, nbytes) else -1
        block = Block(storage, cdata, self._deaths)
        block.index = number = self._num_blocks
        self._num_blocks = number + 1
        block.memory = _DEVICE
        block.on_device = True
        block.device = device
        block.nbytes = nbytes
        block.private = False
        block.uses = None
        block.shape = shape
        block.strides = plan.strides
        block.offset = plan.offset
        block.is_covered = nbytes == plan.covers
        block.dtype = dtype
        block.read = None
        block.write = None
        blocks[cdata] = block  # at last: an interrupt leaves no half of a block
        if nbytes:
            index = self._index
            self._index = index + 1
            self._sink.alloc(index, number, lane, nbytes, _DEVICE, self.site, True)
        region, dims, name = plan.layout
        if region is not None:
            block.write = access = _new(_ACCESS, (number, region, True, dims, name, False))
            accesses.append(access)
        return lane

    def _lay(self, block: Block, tensor: Tensor) -> None:
        """Keep the layout of a tensor, and the accesses that ops make to it, with its block."""
        key: Any = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        layout = self.layouts.known.get(key) or self.layouts.learn(key)
        block.shape, block.strides, block.offset, block.dtype = key
        if tensor.is_contiguous():
            block.strides = None
        block.is_covered = covers(layout, block.nbytes)
        self._access(block, layout)

    def _access(self, block: Block, layout: Layout) -> None:
        region, shape, dtype = layout
        block.read = None
        block.write = (
            None if region is None else _new(_ACCESS, (block.index, region, True, shape, dtype, False))
        )


def covers(layout: Layout, nbytes: int) -> bool:
    """Whether it covers all bytes of its block in one run, so that no other offset is possible."""
    region = layout.region
    return region is not None and region.run == nbytes


def reading(write: Access) -> Access:
    """The read of what is written."""
    number, region, _, shape, dtype, _ = write
    read: Access = _new(_ACCESS, (number, region, False, shape, dtype, False))
    return read
