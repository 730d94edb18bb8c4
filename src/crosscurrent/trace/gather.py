"""What an op reads and writes, as accesses to blocks."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from crosscurrent.trace.access import Signature, Use
from crosscurrent.trace.memory import Block
from crosscurrent.trace.records import HOST, Access, Op
from crosscurrent.trace.usual import UsualOps, reading

_new: Final[Any] = tuple.__new__
_MANY: Final = int(Use.MANY)
_READ: Final = int(Use.READ)
_WRITE: Final = int(Use.WRITE)


class Call:
    """The accesses of one call: those on the device, those of the host (to pinned memory), and where.

    Lists of tensors may lie on several devices; what is on others than the first is in ``elsewhere``.
    """

    __slots__ = ("device", "elsewhere", "host", "inputs", "is_view", "on_device", "writes")

    def __init__(self) -> None:
        self.device: list[Access] = []
        self.elsewhere: dict[int, list[Access]] | None = None
        self.host: list[Access] = []
        self.inputs: list[int] = []
        self.on_device = -1
        self.is_view = False
        self.writes = False

    def on(self, device: int) -> list[Access]:
        """The accesses on another device than the first one."""
        if self.elsewhere is None:
            self.elsewhere = {}
        return self.elsewhere.setdefault(device, [])


class Gatherer(UsualOps):
    """Finds the accesses of calls."""

    __slots__ = ()

    def gather(self, sign: Signature, args: Any, kwargs: Any, out: Any) -> Call:
        """What a call reads and writes. New storages are allocated on the way."""
        call = Call()
        touch = self.touch
        for use, arg in zip(sign.positional, args):  # noqa: B905 (trailing arguments may be left out)
            if use and arg is not None:
                if use < _MANY:
                    touch(call, arg, use)
                else:
                    for one in arg:
                        if one is not None:
                            touch(call, one, use)
        if kwargs:
            self._gather_named(call, sign, kwargs)
        if sign.makes_tensors:
            if isinstance(out, Tensor):
                self._result(call, out)
            else:
                self._results(call, out)
            if call.is_view and not call.writes:
                call.device.clear()
                call.host.clear()
        return call

    def remeasure(self, sign: Signature, args: Any, kwargs: Any) -> None:
        """What a call writes to may have been resized, in a place that no tap can see."""
        positional = zip(sign.positional, args)  # noqa: B905 (trailing arguments may be left out)
        written = [(use, arg) for use, arg in positional if use & _WRITE]
        written += [(use, arg) for name, arg in kwargs.items() if (use := sign.by_name.get(name, 0)) & _WRITE]
        for use, arg in written:
            for one in (arg or ()) if use & _MANY else (arg,):
                if isinstance(one, Tensor):
                    self.resized(one, sign.name)

    def _gather_named(self, call: Call, sign: Signature, kwargs: dict[str, Any]) -> None:
        for name, arg in kwargs.items():
            use = sign.by_name.get(name, 0)
            if not use or arg is None:
                continue
            for one in arg if use & _MANY else (arg,):
                if sign.grows and use & _WRITE:
                    self.resized(one, sign.name)
                self.touch(call, one, use)

    def _results(self, call: Call, out: Any) -> None:
        for result in out:
            if isinstance(result, Tensor):
                self._result(call, result)
            elif isinstance(result, (tuple, list)):
                self._results(call, result)

    def _result(self, call: Call, result: Tensor) -> None:
        """A result is written, unless it lies in the memory of an argument: then it is a view."""
        try:
            storage = result.untyped_storage()
        except NotImplementedError:
            self._not_strided(result)
            return
        block = self._blocks.get(storage._cdata)
        if block is None:
            block = self._admit(result, storage, True)
        elif block.index in call.inputs:
            call.is_view = True
            return
        self._add(call, result, block, _WRITE)

    def touch(self, call: Call, tensor: Tensor, use: int) -> None:
        """Add a tensor's bytes to the accesses of ``call``."""
        try:
            storage = tensor.untyped_storage()
        except AttributeError:
            return  # a number in the place of a tensor
        except NotImplementedError:
            self._not_strided(tensor)
            return
        block = self._blocks.get(storage._cdata)
        if block is None:
            block = self._admit(tensor, storage, False)
        self._add(call, tensor, block, use)

    def _add(self, call: Call, tensor: Tensor, block: Block, use: int) -> None:
        if block.memory is None and not self._reconsider(block, tensor):
            return
        if not (
            tensor.shape == block.shape
            and (tensor.is_contiguous() if block.strides is None else tensor.stride() == block.strides)
            and tensor.dtype is block.dtype
            and (block.is_covered or tensor.storage_offset() == block.offset)
        ):
            self._lay(block, tensor)
        call.inputs.append(block.index)
        write = block.write
        if write is None:
            return
        if not block.on_device:
            accesses = call.host
        elif block.device == call.on_device:
            accesses = call.device
        elif call.on_device < 0:
            call.on_device = block.device
            accesses = call.device
        else:
            accesses = call.on(block.device)
        if use & _READ:
            if block.read is None:
                block.read = reading(write)
            accesses.append(block.read)
        if use & _WRITE:
            accesses.append(write)
            call.writes = True

    def emit_call(self, name: str, call: Call) -> None:
        """One ``Op`` on the stream, and before it what the host does to pinned memory as it issues it."""
        if call.host:
            self.put(Op, HOST, name, self.site, tuple(call.host))
        if call.device:
            index = self._index
            self._index = index + 1
            lane = self.lane(call.on_device)
            self._sink.op(_new(Op, (index, lane, name, self.site, tuple(call.device))))
            if call.elsewhere is not None:
                for device, accesses in call.elsewhere.items():
                    self.put(Op, self.lane(device), name, self.site, tuple(accesses))

    def _not_strided(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            self.unknown("tensor", f"a tensor of layout {tensor.layout}: its memory is not followed")
