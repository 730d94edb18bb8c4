"""What ops do, as records.

One ``Tracer`` belongs to one watch. Whoever sees the program (the simulation, or the dispatch mode and
the taps on a real GPU) tells it about ops and synchronization, after they ran. What is special about
copies and about ops that make the host wait is in ``copies`` and ``waits``; what an op reads and writes is
gathered in ``gather``; lanes and storages are in ``recorder``, synchronization in ``sync``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from crosscurrent.trace import copies, waits
from crosscurrent.trace.access import Kind, Signature, Use, in_training, signature, unscaled
from crosscurrent.trace.gather import Call, Gatherer
from crosscurrent.trace.recorder import Environment, as_one
from crosscurrent.trace.records import Record, Sink, Through
from crosscurrent.trace.usual import Plan

log = logging.getLogger(__name__)

_READ: Final = int(Use.READ)
_WRITE: Final = int(Use.WRITE)


class CallObserver(Protocol):
    """Sees every call with its values, before and after; for those who run a trace again.

    Calls that only go into a graph have no values, and are not shown.
    """

    def before_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The op is about to run."""

    def after_call(
        self, records: list[Record], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """The op ran, and was turned into ``records``."""


class Tracer(Gatherer):
    """Makes the records of one trace. All methods may be called from any thread."""

    __slots__ = ("__weakref__", "_failed", "_plans", "observers", "trace")

    def __init__(
        self,
        environment: Environment,
        sinks: Sequence[Sink | Callable[[Record], None]],
        *,
        full_stack: bool = False,
    ) -> None:
        super().__init__(environment, sinks, full_stack=full_stack)
        self.observers: list[CallObserver] = []
        self._plans: dict[int, Plan] = {}
        self.trace = object()
        """Stands for this trace in what is kept beyond it."""
        self._failed: set[str] = set()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to run (needed only while there are observers)."""
        with self.lock:
            if self.is_capturing:
                return
        for observer in self.observers:
            observer.before_call(func, args, kwargs)

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An op ran. Everything it did to memory that is followed becomes records."""
        self.ran(self._plans.get(id(func)) or self.plan(func), args, kwargs, out)

    def plan(self, func: Any) -> Plan:
        """What is known of an op; to be passed on to ``ran``."""
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._plans[id(func)] = Plan(self.trace, func, signature(func))
        return plan

    def ran(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """The same as ``op`` for a plan that was asked for earlier.

        The caller is the handler of a dispatch mode (or ``op``); its caller is the first frame that is
        looked at.
        """
        if plan.touches_nothing:
            if plan.may_move:
                self.released((args[0] if args else kwargs["self"]).untyped_storage())
            if not self.observers:
                return
        try:
            # In here: between a call and what follows it, a signal's handler may raise an error.
            self._acquire()
            if self._deaths.noted:
                self.bury()
            self.site = self.sites.here(3)
            if self.observers and not self.is_capturing:
                self._observed(plan.sign, plan.func, args, kwargs, out)
            elif not self.usual(plan, args, kwargs, out):
                self._special(plan.sign, plan.func, args, kwargs, out)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if self.observers and not self.is_capturing:
                raise
            # An op with arguments or results of a kind never met. The program goes on, and so does the
            # watch; that something is missing from its trace is said in every report.
            name = plan.name
            if name not in self._failed:
                self._failed.add(name)
                log.warning("%s was not understood", name, exc_info=True)
            self.unknown(name, f"{type(error).__name__}: {error}")
        finally:
            try:  # noqa: SIM105 (quicker)
                self._release()
            except RuntimeError:
                pass  # such an error came while another thread held the lock

    def failed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op raised an error; until then it may have resized what it was to write to."""
        with self.lock:
            self.begin()
            try:
                self.remeasure(self.plan(func).sign, args, kwargs)
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                self.unknown(self.plan(func).name, f"{type(error).__name__}: {error}")

    def _observed(self, sign: Signature, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        collected: list[Record] = []

        def collect(record: Record) -> None:
            collected.append(record)
            sink.feed(record)

        sink = as_one(self._sinks)
        before, self._sink = self._sink, Through(collect)
        self.in_call = True
        try:
            self._special(sign, func, args, kwargs, out)
        finally:
            self._sink = before
            self.in_call = False
        for observer in self.observers:
            observer.after_call(collected, func, args, kwargs, out)

    def _special(self, sign: Signature, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        kind = sign.kind
        if kind is Kind.BATCH_NORM:
            training = args[5] if len(args) > 5 else kwargs["training"]
            sign = in_training(sign) if training else sign
            kind = Kind.PLAIN
        elif kind is Kind.FUSED:
            sign = sign if kwargs.get("grad_scale") is not None else unscaled(sign)
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
                self.remeasure(sign, args, kwargs)
                self._custom(sign, self.gather(sign, args, kwargs, out))
            case Kind.OPAQUE:
                self._opaque(sign, args, kwargs, out)

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


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, False)
