"""The records of usual ops, made on a path of their own.

Note [The usual op]
    Nearly all ops of a program take a few tensors of one device, which were seen before, and return nothing
    or new tensors. ``usual`` makes their records and does nothing that they do not need; it steps aside
    (returns False) for all others before it has emitted an op. What can be known of an overload is worked
    out once, in its ``Plan``. A block keeps the accesses that the op before made to it (``Block.read``,
    ``Block.write``): as long as it is seen in the same layout, which is compared in full, there is nothing
    to look up or to make. The layout of a result is mostly that of the op's last one.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

from crosscurrent.trace.access import Kind, Signature, Use
from crosscurrent.trace.memory import Block, Layout, LayoutKey
from crosscurrent.trace.records import Access, Alloc, MemoryKind, Op
from crosscurrent.trace.sync import SyncTaps

_new: Any = tuple.__new__
_DEVICE = MemoryKind.DEVICE
_NONE = -2  # no device, and not that of host memory either
_NO_TENSORS = frozenset({type(None), bool, int, float, complex})

Single: TypeAlias = tuple[int, bool, bool]
"""The position of an argument that is one tensor, whether it is read, and whether it is written."""


class Plan:
    """What is known of an overload, worked out once for each trace."""

    __slots__ = (
        "func",
        "key",
        "layout",
        "makes_tensors",
        "may_move",
        "name",
        "named",
        "sign",
        "singles",
        "touches_nothing",
    )

    func: Any
    """The op; kept, so that its id is its own."""
    singles: tuple[Single, ...] | None
    """None for an op with lists of tensors, or with rules of its own."""
    key: LayoutKey | None
    """The layout of its last new result."""
    layout: Layout

    def __init__(self, func: Any, sign: Signature) -> None:
        self.func = func
        self.sign = sign
        self.name = sign.name
        self.named = sign.named
        self.makes_tensors = sign.makes_tensors
        self.touches_nothing = sign.kind is Kind.NOTHING
        self.may_move = sign.may_move
        self.key = None
        self.singles = None
        if sign.kind is Kind.PLAIN and sign.singles is not None:
            self.singles = tuple(
                (place, bool(use & Use.READ), bool(use & Use.WRITE)) for place, use in sign.singles
            )


class UsualOps(SyncTaps):
    """Makes the records of usual ops; see Note [The usual op]."""

    __slots__ = ()

    def usual(self, plan: Plan, args: Any, kwargs: Any, out: Any) -> bool:
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
            if tensor.__class__ in _NO_TENSORS:
                continue  # left out, or a number in its place
            try:
                block = blocks[tensor.untyped_storage()._cdata]
            except (AttributeError, KeyError, NotImplementedError):
                return False
            if block.device != device:
                if device != _NONE or not block.on_device:
                    return False
                device = block.device
            if not (
                tensor.shape == block.shape
                and tensor.stride() == block.strides
                and tensor.dtype is block.dtype
                and tensor.storage_offset() == block.offset
            ):
                self._lay(block, tensor)
            if block.read is not None:
                if reads:
                    accesses.append(block.read)
                if writes:
                    accesses.append(block.write)
        lane = -1
        if device != _NONE:
            stream = self._current_stream(device)
            if stream == self._last_stream and device == self._last_device:
                lane = self._last_lane
            else:
                lane = self.lane(device, stream)
        if plan.makes_tensors:
            lane = self._new_results(plan, out, accesses, device, lane)
            if lane < 0:
                return False
        if accesses:
            index = self._index
            self._index = index + 1
            self._sink(_new(Op, (index, lane, plan.name, self.site, tuple(accesses))))
        return True

    def _new_results(self, plan: Plan, out: Any, accesses: list[Any], device: int, lane: int) -> int:
        """Add the writes of new results on a device; gives their lane, or -1 if there are others.

        ``device`` and ``lane`` are those of the arguments, if there are any on a device.
        """
        blocks = self._blocks
        kind = out.__class__
        if kind is Tensor:
            out = (out,)
        elif kind is not tuple and kind is not list:
            return -1
        for result in out:
            if result is None:
                continue
            if result.__class__ is not Tensor:
                return -1
            try:
                storage = result.untyped_storage()
            except NotImplementedError:
                return -1
            cdata = storage._cdata
            if cdata in blocks:
                return -1  # in the memory of an argument
            on = self._device_of(result)
            if on != device or on < 0:
                if on < 0 or device != _NONE:
                    return -1
                device = on
                lane = self.lane(device)
            key: Any = (result.shape, result.stride(), result.storage_offset(), result.dtype)
            if key != plan.key:
                plan.layout = self.layouts.known.get(key) or self.layouts.learn(key)
                plan.key = key
            block = blocks[cdata] = Block(storage, self._on_death)
            block.cdata = cdata
            block.index = number = self._num_blocks
            self._num_blocks = number + 1
            block.memory = _DEVICE
            block.on_device = True
            block.device = device
            block.nbytes = nbytes = storage.nbytes()
            block.private = False
            block.uses = None
            block.shape, block.strides, block.offset, block.dtype = key
            region, shape, dtype = plan.layout
            if nbytes:
                index = self._index
                self._index = index + 1
                self._sink(_new(Alloc, (index, number, lane, nbytes, _DEVICE, self.site, True)))
            if region is None:
                block.read = block.write = None
            else:
                block.read = _new(Access, (number, region, False, shape, dtype, False))
                block.write = access = _new(Access, (number, region, True, shape, dtype, False))
                accesses.append(access)
        return lane

    def _lay(self, block: Block, tensor: Tensor) -> None:
        """Keep the layout of a tensor, and the accesses that ops make to it, with its block."""
        key: Any = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        layout = self.layouts.known.get(key) or self.layouts.learn(key)
        block.shape, block.strides, block.offset, block.dtype = key
        self._access(block, layout)

    def _access(self, block: Block, layout: Layout) -> None:
        region, shape, dtype = layout
        if region is None:
            block.read = block.write = None
            return
        number = block.index
        block.read = _new(Access, (number, region, False, shape, dtype, False))
        block.write = _new(Access, (number, region, True, shape, dtype, False))
