"""What a dispatch mode on a real GPU does for each op: run it, and show it to the tracer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

import torch

from crosscurrent.trace.access import Kind, runner, signature
from crosscurrent.trace.subclasses import has_own_dispatch, step_aside
from crosscurrent.trace.tracer import Tracer
from crosscurrent.trace.usual import Plan

_KNOWS_ITS_WAITS = frozenset({Kind.COPY, Kind.TO_COPY, Kind.FOREACH_COPY, Kind.WAITS, Kind.INDEX, Kind.PIN})

Held: TypeAlias = tuple[Callable[[], None], ...]
_NOTHING_HELD: Final[Held] = ()


class Here:
    """The callbacks of one thread that are held back while an op runs; None outside of ops."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: Held | None = None


class Tap:
    """What the handlers of all threads share: the tracer, while there is one, and a ``threading.local``."""

    __slots__ = ("_local", "tracer")

    def __init__(self, local: Any) -> None:
        self.tracer: Tracer | None = None
        self._local = local

    def here(self) -> Here:
        """What belongs to the calling thread."""
        here: Here = self._local.here
        return here


class _Way:
    """How an op is run."""

    __slots__ = ("func", "is_composite", "knows_its_waits", "plan", "run", "touches_nothing")

    def __init__(self, func: Any) -> None:
        self.func = func  # kept, so that its id is its own
        self.run: Any = runner(func)
        sign = signature(func)
        self.is_composite = _is_composite(func)
        self.touches_nothing = sign.kind is Kind.NOTHING and not sign.may_move
        self.knows_its_waits = sign.kind in _KNOWS_ITS_WAITS
        self.plan: Plan | None = None


class Handler:
    """The handler of one dispatch mode."""

    __slots__ = ("_tap", "_ways")

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._ways: dict[int, _Way] = {}

    def handle(
        self,
        mode: AbstractContextManager[Any],
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op that ``mode`` was given, and show it to the tracer."""
        if types:
            for kind in types:
                if has_own_dispatch(kind):
                    return step_aside(mode, func, types, args, kwargs or {})
        if kwargs is None:
            kwargs = {}
        way = self._ways.get(id(func))
        if way is None:
            way = self._ways[id(func)] = _Way(func)
        if way.is_composite:
            with mode:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        tap = self._tap
        tracer = tap.tracer
        if tracer is None:  # a thread that outlives the watch
            return func(*args, **kwargs)
        if tracer.observers:
            tracer.before(func, args, kwargs)
        elif way.touches_nothing:
            return way.run(*args, **kwargs)
        plan = way.plan
        if plan is None or plan.trace is not tracer.trace:
            plan = way.plan = tracer.plan(func)
        here = tap.here()
        outer, here.held = here.held, _NOTHING_HELD
        try:
            out = way.run(*args, **kwargs) if kwargs else way.run(*args)
        except Exception:
            # What came before the error did happen.
            if not way.knows_its_waits:
                for report in here.held or ():
                    report()
            tracer.failed(func, args, kwargs)
            raise
        finally:
            held, here.held = here.held, outer
        if held and not way.knows_its_waits:
            for report in held:
                report()
        tracer.ran(plan, args, kwargs, out)
        return out


def _is_composite(func: Any) -> bool:
    """Whether an op is to be taken apart: under inference mode PyTorch does not do it by itself."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Some ops have a kernel of their own besides, and then that is what runs without a watch.
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CUDA")
