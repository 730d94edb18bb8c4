"""What ops do, as records.

One ``Tracer`` belongs to one watch. Whoever sees the program (the simulation, or the dispatch mode and
the taps on a real GPU) tells it about ops and synchronization, after they ran. What is special about
copies and about ops that make the host wait is in ``copies`` and ``waits``; lanes and storages
are in ``recorder``, synchronization in ``sync``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from crosscurrent.trace import copies, waits
from crosscurrent.trace.access import Kind, Signature, Use, in_training, signature
from crosscurrent.trace.memory import Block
from crosscurrent.trace.recorder import Environment
from crosscurrent.trace.records import HOST, Access, Op, Record
from crosscurrent.trace.sync import SyncTaps

log = logging.getLogger(__name__)

_new: Any = tuple.__new__
_MANY = int(Use.MANY)
_READ = int(Use.READ)
_WRITE = int(Use.WRITE)
_PLAIN = int(Kind.PLAIN)
_NOTHING = int(Kind.NOTHING)


class CallObserver(Protocol):
    """Sees every call with its values, before and after; for those who run a trace again."""

    def before_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The op is about to run."""

    def after_call(
        self, records: list[Record], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """The op ran, and was turned into ``records``."""


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


class Tracer(SyncTaps):
    """Makes the records of one trace. All methods may be called from any thread."""

    def __init__(
        self, environment: Environment, sinks: Sequence[Callable[[Record], None]], *, full_stack: bool = False
    ) -> None:
        super().__init__(environment, sinks, full_stack=full_stack)
        self.observers: list[CallObserver] = []
        self._signatures: dict[int, Signature] = {}
        # Signatures are kept by id, which is an op's own only as long as the op is alive.
        self._seen: list[Any] = []
        self._failed: set[str] = set()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to run (needed only while there are observers)."""
        for observer in self.observers:
            observer.before_call(func, args, kwargs)

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An op ran. Everything it did to memory that is followed becomes records."""
        sign = self._signatures.get(id(func))
        if sign is None:
            sign = self._signatures[id(func)] = signature(func)
            self._seen.append(func)
        kind = sign.kind
        if kind == _NOTHING and not self.observers:
            return
        with self._lock:
            self.begin()
            if self.observers:
                self._observed(sign, func, args, kwargs, out)
                return
            try:
                if kind == _PLAIN:
                    self.emit_call(sign.name, self.gather(sign, args, kwargs, out))
                else:
                    self._special(sign, func, args, kwargs, out)
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                # An op with arguments or results of a kind never met. The program goes on, and so does the
                # watch; that something is missing from its trace is said in every report.
                if sign.name not in self._failed:
                    self._failed.add(sign.name)
                    log.warning("%s was not understood", sign.name, exc_info=True)
                self.unknown(sign.name, f"{type(error).__name__}: {error}")

    def _observed(self, sign: Signature, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        collected: list[Record] = []

        def collect(record: Record) -> None:
            collected.append(record)
            self._to_all(record)

        sink, self._sink = self._sink, collect
        self.in_call = True
        try:
            self._special(sign, func, args, kwargs, out)
        finally:
            self._sink = sink
            self.in_call = False
        for observer in self.observers:
            observer.after_call(collected, func, args, kwargs, out)

    def _special(self, sign: Signature, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        kind = sign.kind
        if kind is Kind.BATCH_NORM:
            training = args[5] if len(args) > 5 else kwargs["training"]
            sign = in_training(sign) if training else sign
            kind = Kind.PLAIN
        match kind:
            case Kind.NOTHING:
                pass
            case Kind.PLAIN:
                self.emit_call(sign.name, self.gather(sign, args, kwargs, out))
            case Kind.EMPTY:
                self._made(out)
                if sign.grows:
                    self.resized(out, sign.name)
            case Kind.COPY:
                copies.copy(self, sign.name, args[0], args[1], _argument(args, kwargs, 2, "non_blocking"))
            case Kind.TO_COPY:
                non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
                source = args[1] if sign.name == "aten.copy.default" else args[0]
                self._made(out)
                copies.copy(self, sign.name, out, source, non_blocking)
            case Kind.FOREACH_COPY:
                for target, source in zip(args[0], args[1], strict=True):
                    copies.copy(self, sign.name, target, source, _argument(args, kwargs, 2, "non_blocking"))
            case Kind.WAITS:
                waits.emit(self, sign, self.gather(sign, args, kwargs, out), sign.wait)
            case Kind.INDEX:
                call = self.gather(sign, args, kwargs, out)
                waits.emit(self, sign, call, waits.reason(self, func, args, kwargs, call))
            case Kind.RESIZE:
                self.resized(args[0], sign.name)
            case Kind.PIN:
                self._made(out)
                copies.copy(self, sign.name, out, args[0], False)
            case Kind.RECORD_STREAM:
                device, stream = self.environment.stream_key(args[1])  # type: ignore[attr-defined]
                self.stream_used(args[0], device, stream)
            case Kind.CUSTOM:
                self._custom(sign, self.gather(sign, args, kwargs, out))
            case Kind.OPAQUE:
                self._opaque(sign, args, kwargs, out)

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
            block = self._admit(result, storage, fresh=True)
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
            block = self._admit(tensor, storage, fresh=False)
        self._add(call, tensor, block, use)

    def _add(self, call: Call, tensor: Tensor, block: Block, use: int) -> None:
        if block.memory is None and not self._reconsider(block, tensor):
            return
        key: Any = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        try:
            region, shape, dtype = self.layouts.known[key]
        except KeyError:
            region, shape, dtype = self.layouts.learn(key)
        number = block.index
        call.inputs.append(number)
        if region is None:
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
            accesses.append(_new(Access, (number, region, False, shape, dtype, False)))
        if use & _WRITE:
            accesses.append(_new(Access, (number, region, True, shape, dtype, False)))
            call.writes = True

    def emit_call(self, name: str, call: Call) -> None:
        """One ``Op`` on the stream, and before it what the host does to pinned memory as it issues it."""
        if call.host:
            self.put(Op, HOST, name, self.site, tuple(call.host))
        if call.device:
            index = self._index
            self._index = index + 1
            lane = self.lane(call.on_device)
            self._sink(_new(Op, (index, lane, name, self.site, tuple(call.device))))
            if call.elsewhere is not None:
                for device, accesses in call.elsewhere.items():
                    self.put(Op, self.lane(device), name, self.site, tuple(accesses))

    def _custom(self, sign: Signature, call: Call) -> None:
        """An op that is not PyTorch's own: its kernel may reach into pinned memory."""
        if call.host and call.device:
            call.device += call.host
            call.host.clear()
            self.unknown(sign.name, "pinned memory among its arguments: taken to be touched by the stream")
        self.emit_call(sign.name, call)

    def _opaque(self, sign: Signature, args: Any, kwargs: Any, out: Any) -> None:
        call = Call()
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.touch(call, leaf, _READ)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                block = self.block_of(leaf, fresh=True)
                if block is None or block.index not in call.inputs:
                    self.touch(call, leaf, _WRITE)
        self.emit_call(sign.name, call)
        if sign.why_unknown and (call.device or call.host):
            self.unknown(sign.name, sign.why_unknown)

    def _not_strided(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            self.unknown("tensor", f"a tensor of layout {tensor.layout}: its memory is not followed")


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, False)
