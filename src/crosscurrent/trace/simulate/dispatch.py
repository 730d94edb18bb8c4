"""The dispatch mode: runs each aten op on the CPU and keeps account of the device it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.trace.access import runner
from crosscurrent.trace.simulate import plans
from crosscurrent.trace.simulate.clock import ISSUE, KERNEL
from crosscurrent.trace.simulate.memory import ON_HOST, UNDETERMINED
from crosscurrent.trace.subclasses import has_own_dispatch, step_aside

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.engine import Pass
    from crosscurrent.trace.simulate.queues import Queue
    from crosscurrent.trace.simulate.simulation import Simulation

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_get_mode = torch._C._get_dispatch_mode
strided = torch.strided


def _for_fakes(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call asks for while tensors are fake: they have no memory, what they stand for is on the CPU."""
    wanted = kwargs.get("device")
    if wanted is None or wanted.type != "cuda" or _get_mode(_FAKE) is None:
        return kwargs
    return {**kwargs, "device": plans.CPU}


class SimulatedDispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One per simulation, on the mode stack of every thread.

    The common case is kept short: plain tensors of one device, no device among the arguments.
    """

    supports_higher_order_operators = True

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.simulation = simulation
        self._get_block = simulation.memory.blocks.get
        self._plans: dict[Any, tuple[Callable[..., Any] | None, Callable[..., Any]]] = {}
        """Of each op its plan, and what runs it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides a handler from the compiler costs more than the handler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(has_own_dispatch(kind) for kind in types):
            return step_aside(self, func, types, args, _for_fakes(kwargs or {}))
        try:
            plan, run = self._plans[func]
        except KeyError:
            plan, run = self._plans[func] = plans.plan_for(func), runner(func)
        if kwargs is None:
            kwargs = {}
        simulation = self.simulation
        if plan is not None or simulation.attention:
            return self._special(plan, func, args, kwargs)
        device = self.place(func, args, kwargs)
        for tracer in simulation.tracers:
            if tracer.observers:
                tracer.before(func, args, kwargs)
        try:
            out = run(*args, **kwargs)
        except Exception:
            self._failed(func, args, kwargs)
            raise
        if device != ON_HOST:
            if type(out) is Tensor and out.layout is strided:
                storage = out.untyped_storage()
                if self._get_block(storage._cdata) is None:
                    simulation.memory.tag(storage, device)
            else:
                self.tag_results(out, device)
            if device >= 0:
                thread = simulation.queues.thread
                clock = simulation.clock
                now = clock.now = clock.now + ISSUE
                queue = thread.current[device]
                free_at = queue.free_at
                queue.free_at = (free_at if free_at > now else now) + KERNEL
        for tracer in simulation.tracers:
            tracer.op(func, args, kwargs, out)
        return out

    def _special(self, plan: Callable[..., Any] | None, func: Any, args: Any, kwargs: Any) -> Any:
        simulation = self.simulation
        simulation.queues.thread.adopted = True
        if plan is not None and _get_mode(_FAKE) is not None:
            return func(*args, **_for_fakes(kwargs))
        if plan is plans.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if simulation.attention:
            if not simulation.is_active:
                return func(*args, **kwargs)
            run = simulation.queues.thread.backward
            if run is not None:
                run.settle()
                if run.sums_on is not None:
                    return self._sum(run, plan, func, args, kwargs)
            queue = self._captured_queue(func, args, kwargs)
            if queue is not None and queue.capture is not None:
                return queue.capture.call(self, plan, func, args, kwargs, queue)
        return self.run(func, args, kwargs) if plan is None else plan(self, func, args, kwargs)

    def _sum(self, run: Pass, plan: Callable[..., Any] | None, func: Any, args: Any, kwargs: Any) -> Any:
        """The engine sums two gradients, between two nodes."""
        thread = self.simulation.queues.thread
        outer, device = list(thread.current), thread.device
        queue = run.sums_on
        assert queue is not None
        current = [*outer[: queue.device], queue, *outer[queue.device + 1 :]]
        self.simulation.restore_streams(current, since=run.since)
        try:
            if queue.capture is not None:
                return queue.capture.call(self, plan, func, args, kwargs, queue)
            return self.run(func, args, kwargs) if plan is None else plan(self, func, args, kwargs)
        finally:
            self.simulation.restore_streams(outer, device)
            run.go_on()

    def _captured_queue(self, func: Any, args: Any, kwargs: Any) -> Queue | None:
        """The stream that a call would be captured on, if any is being captured."""
        thread = self.simulation.queues.thread
        if all(queue.capture is None for queue in thread.current):
            return None
        wanted = kwargs.get("device")
        if wanted is not None and wanted.type == "cuda":
            return thread.current[self.simulation.device_index(wanted)]
        place = self.place(func, args, kwargs, mixed=True)
        if place >= 0:
            return thread.current[place]
        # What C++ code makes without a word on the device will be used on it.
        loose = place == UNDETERMINED or (wanted is not None and "pin_memory" not in kwargs)
        return thread.current[thread.device] if loose else None

    def run(self, func: Any, args: Any, kwargs: Any, *, mixed: bool = False) -> Any:
        """Run an op on the device of its tensors; ``mixed`` if tensors of the host may take part."""
        device = self.place(func, args, kwargs, mixed=mixed)
        return self.run_on(device, func, args, kwargs)

    def run_on(self, device: int, func: Any, args: Any, kwargs: Any, shown: Any = None) -> Any:
        """Run an op whose results belong to ``device``; ``shown`` are the kwargs that tracers see."""
        simulation = self.simulation
        seen = kwargs if shown is None else shown
        simulation.before_call(func, args, seen)
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._failed(func, args, seen)
            raise
        if device != ON_HOST:
            self.tag_results(out, device)
        self.report(device, func, args, seen, out)
        return out

    def _failed(self, func: Any, args: Any, kwargs: Any) -> None:
        """Tell the tracers of an op that raised an error."""
        if not self.simulation.queues.thread.quiet:
            for tracer in self.simulation.tracers:
                tracer.failed(func, args, kwargs)

    def report(self, device: int, func: Any, args: Any, kwargs: Any, out: Any, cost: int = KERNEL) -> None:
        """Let the clock go on, and tell the tracers."""
        simulation = self.simulation
        if simulation.queues.thread.quiet:
            return
        simulation.clock.now += ISSUE
        if device >= 0:
            simulation.queues.thread.current[device].launch(simulation.clock, cost)
        for tracer in simulation.tracers:
            tracer.op(func, args, kwargs, out)

    def place(self, func: Any, args: Any, kwargs: Any, *, mixed: bool = False) -> int:
        """The device that the tensors of a call lie on; raises what CUDA raises when they differ.

        This is the quick look that is enough for most calls.
        """
        device = ON_HOST
        on_host = False
        get = self._get_block
        try:
            for value in args:
                if isinstance(value, Tensor):
                    block = get(value.untyped_storage()._cdata)
                    place = ON_HOST if block is None else block.device
                    if place == ON_HOST:
                        on_host = True
                    elif device == ON_HOST and place >= 0:
                        device = place
                    elif place != device:
                        return self._place(func, args, kwargs, mixed)
                elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
                    return self._place(func, args, kwargs, mixed)
        except (NotImplementedError, RuntimeError):  # a tensor without a storage
            return self._place(func, args, kwargs, mixed)
        if on_host and device != ON_HOST:
            return self._place(func, args, kwargs, mixed)
        for value in kwargs.values():
            if isinstance(value, (Tensor, list, tuple)):
                return self._place(func, args, kwargs, mixed)
        return device

    def _place(self, func: Any, args: Any, kwargs: Any, mixed: bool) -> int:
        """The same, for every call."""
        device = ON_HOST
        host: Tensor | None = None
        loose: list[Tensor] | None = None
        get = self._get_block
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                tensors: Any = (value,)
            elif type(value) is list or type(value) is tuple:
                tensors = value
            else:
                continue
            for tensor in tensors:
                if not isinstance(tensor, Tensor):
                    continue
                try:
                    block = get(tensor.untyped_storage()._cdata)
                except (NotImplementedError, RuntimeError):
                    block = self.simulation.memory.block_of(tensor)
                if block is None or block.device == ON_HOST:
                    host = tensor if host is None or host.dim() == 0 else host
                elif block.device == UNDETERMINED:
                    loose = [tensor] if loose is None else [*loose, tensor]
                elif device == ON_HOST:
                    device = block.device
                elif device != block.device and not mixed:
                    raise plans.device_error(func, device, block.device)
        if device != ON_HOST:
            if (
                host is not None
                and not mixed
                and (host.dim() > 0 or plans.writes_to(func, args, kwargs, host))
            ):
                raise plans.device_error(func, device, ON_HOST)
            for tensor in loose or ():
                self.simulation.memory.retag(tensor.untyped_storage(), device)
            return device
        return ON_HOST if loose is None else UNDETERMINED

    def tag_results(self, out: Any, device: int) -> None:
        """What an op returned and is not known yet is new memory of ``device``."""
        if isinstance(out, Tensor):
            try:
                storage = out.untyped_storage()
            except (NotImplementedError, RuntimeError):
                if device < 0:
                    return
                raise NotImplementedError(
                    f"simulated CUDA has only dense strided tensors, this one is {out.layout}"
                ) from None
            if self._get_block(storage._cdata) is None:
                self.simulation.memory.tag(storage, device)
        elif type(out) is list or type(out) is tuple:
            for each in out:
                self.tag_results(each, device)
