"""CUDA graphs: capture and replay.

Note [Capture]
A captured call must have no effect, but later calls need its results to exist. So captured calls do run,
on the real memory; when the capture ends, memory that was there before gets back what it held, and memory
that the capture made is poisoned (NaN), because nothing has been computed yet on a real device either.
Replay runs the calls again and puts their results where the captured ones are. Tracers hear of a call at
each replay, and never at capture.

Streams that join a capture, by waiting for an event of it, become branches of the graph. Each branch gets
a lane of its own, which nothing outside of the graph can be ordered with. The stream that was captured
first becomes the replaying stream. A graph starts only after its previous launch is done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from crosscurrent.trace.simulate.plans import WAITING
from crosscurrent.trace.simulate.queues import BRANCH, Queue
from crosscurrent.trace.simulate.streams import Event, running

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.dispatch import SimulatedDispatch
    from crosscurrent.trace.simulate.simulation import Simulation

_pools = itertools.count(1)
_branches = itertools.count(1)
_NOTHING_TO_DO = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


@dataclass(slots=True)
class _Call:
    queue: Queue
    func: Any
    plan: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


@dataclass(slots=True)
class _Mark:
    """An event recorded (``wait`` False) or waited for inside a graph."""

    queue: Queue
    key: int
    wait: bool


@dataclass(eq=False)
class Capture:
    """What one graph has captured so far, or in all."""

    simulation: Simulation
    origin: Queue
    steps: list[_Call | _Mark] = field(default_factory=list)
    invalid: bool = False
    _made: dict[int, UntypedStorage] = field(default_factory=dict)
    _kept: dict[int, tuple[UntypedStorage, Tensor]] = field(default_factory=dict)
    _known: dict[Queue, dict[Queue, int]] = field(default_factory=dict)
    _events: dict[int, dict[Queue, int]] = field(default_factory=dict)
    _generators: list[Tensor] = field(default_factory=list)

    def begin(self) -> None:
        """From now on the origin's work is captured."""
        self._generators = [g.get_state() for g in self.simulation.random.defaults]
        self._join(self.origin, {})

    def end(self) -> None:
        """Stop capturing; see Note [Capture]."""
        for queue in self._known:
            queue.capture = None
        for storage, bytes_before in self._kept.values():
            _put_back(storage, bytes_before)
        for generator, state in zip(self.simulation.random.defaults, self._generators, strict=True):
            generator.set_state(state)
        for storage in self._made.values():
            _poison(storage)
        for key in self._events:
            self.simulation.captured_events[key] = self
        self._kept.clear()

    def check_joined(self) -> None:
        """Raise if a branch has work that the origin does not wait for."""
        known = self._known[self.origin]
        for queue, have in self._known.items():
            if known.get(queue, 0) < have[queue]:
                raise torch.AcceleratorError(
                    f"CUDA error: capturing stream has unjoined work: stream {queue.stream_id} took part in "
                    "the capture, and the capturing stream does not wait for it before the capture ends"
                )

    def call(
        self, mode: SimulatedDispatch, plan: Any, func: Any, args: Any, kwargs: Any, queue: Queue
    ) -> Any:
        """Capture one call."""
        self._check_allowed(func, args)
        schema = getattr(func, "_schema", None)
        written = list(_written(schema, args, kwargs)) if schema is not None else []
        for tensor in written:
            self._keep(tensor)
        before = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        with self.simulation.muted():
            out = mode.run(func, args, kwargs) if plan is None else plan(mode, func, args, kwargs)
        fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and _key(leaf) not in before]
        for tensor in fresh:
            self._made[_key(tensor)] = tensor.untyped_storage()
        if fresh or written:
            self.steps.append(_Call(queue, func, plan, args, kwargs, out))
            self._advance(queue)
        return out

    def record(self, queue: Queue, key: int) -> None:
        """An event was recorded on a captured stream."""
        self.steps.append(_Mark(queue, key, False))
        self._events[key] = dict(self._known[queue])

    def wait(self, queue: Queue, key: int) -> None:
        """A stream waits for an event of this capture, and takes part in it from now on."""
        self._join(queue, self._events[key])
        self.steps.append(_Mark(queue, key, True))
        self._advance(queue)

    def knows(self, key: int) -> bool:
        """Whether an event was last recorded in this capture."""
        return key in self._events

    def forget(self, key: int) -> None:
        """The event was recorded again, elsewhere."""
        self._events.pop(key, None)

    def _join(self, queue: Queue, seen: dict[Queue, int]) -> None:
        known = self._known.setdefault(queue, {queue: 0})
        queue.capture = self
        for other, count in seen.items():
            known[other] = max(count, known.get(other, 0))

    def _advance(self, queue: Queue) -> None:
        self._known[queue][queue] += 1

    def _check_allowed(self, func: Any, args: Any) -> None:
        masks = any(
            isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8)
            for arg in args[1:2]
            if isinstance(arg, (list, tuple)) and str(func).startswith("aten.index")
            for leaf in arg
        )
        if masks or WAITING & set(getattr(func, "tags", ())):
            self.refuse(str(func))

    def refuse(self, call: str) -> None:
        """Raise, and make the capture invalid."""
        self.invalid = True
        raise torch.AcceleratorError(f"CUDA error: operation not permitted when stream is capturing ({call})")

    def _keep(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key not in self._made and key not in self._kept:
            storage = tensor.untyped_storage()
            self._kept[key] = storage, _all_bytes(storage).clone()


class GraphMethods:
    """What the C++ base class of ``torch.cuda.CUDAGraph`` does."""

    _capture: Capture | None
    _ready: bool
    _pool: tuple[int, int]
    _lanes: dict[Queue, Queue]
    _finished: Event | None

    def __new__(cls, keep_graph: bool = False) -> Any:
        running()
        self = object.__new__(cls)
        self._clear()
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _clear(self) -> None:
        self._capture, self._ready, self._lanes, self._finished = None, False, {}, None
        self._pool = new_pool()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begin to capture the current stream."""
        simulation = running()
        thread = simulation.queues.thread
        queue = thread.current[thread.device]
        if self._capture is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph; call reset() first.")
        if queue.stream_id == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to "
                "replay them on the default stream.)"
            )
        if queue.capture is not None:
            raise torch.AcceleratorError("CUDA error: this stream is being captured already")
        self._pool = pool if pool is not None else self._pool
        self._capture = Capture(simulation, queue)
        self._capture.begin()
        simulation.attend(+1)

    def capture_end(self) -> None:
        """End the capture, which must have begun on the current stream."""
        simulation = running()
        capture = self._capture
        if capture is None or self._ready:
            raise RuntimeError("capture_end() without capture_begin()")
        thread = simulation.queues.thread
        if thread.current[thread.device] is not capture.origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        simulation.attend(-1)
        capture.end()
        self._ready = not capture.invalid
        if capture.invalid:
            self._clear()
            raise torch.AcceleratorError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        try:
            capture.check_joined()
        except RuntimeError:
            self._clear()
            raise

    def instantiate(self) -> None:
        """Nothing is left to do."""

    def replay(self) -> None:
        """Run the captured calls, on the current stream."""
        if self._capture is None or not self._ready:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        simulation = running()
        simulation.refuse_in_capture("cudaGraphLaunch")
        thread = simulation.queues.thread
        capture = self._capture
        here = thread.current[capture.origin.device]
        if self._finished is not None:
            simulation.wait_internal(self._finished, here, "graph")
        events: dict[int, Event] = {}
        outer = list(thread.current)
        try:
            for step in capture.steps:
                queue = here if step.queue is capture.origin else self._lane(step.queue)
                if isinstance(step, _Call):
                    simulation.restore_streams([*outer[: queue.device], queue, *outer[queue.device + 1 :]])
                    replay_call(simulation, step)
                elif step.wait:
                    simulation.wait_internal(events[step.key], queue, "graph")
                else:
                    events[step.key] = simulation.record_internal(queue, "graph")
        finally:
            simulation.restore_streams(outer)
        self._finished = simulation.record_internal(here, "graph")

    def _lane(self, queue: Queue) -> Queue:
        if queue not in self._lanes:
            self._lanes[queue] = Queue(queue.device, BRANCH + next(_branches), queue.priority)
        return self._lanes[queue]

    def reset(self) -> None:
        """Forget the graph."""
        self._clear()

    def pool(self) -> tuple[int, int]:
        """The id of the graph's memory pool."""
        return self._pool

    def register_generator_state(self, generator: Any) -> None:
        """Nothing to do: replays draw from the generators as any call does."""

    def enable_debug_mode(self) -> None:
        """Not simulated."""
        raise NotImplementedError("simulated CUDA graphs have no debug mode")

    def debug_dump(self, debug_path: str) -> None:
        """Not simulated."""
        raise NotImplementedError("simulated CUDA graphs have no debug mode")

    def raw_cuda_graph(self) -> int:
        """Not simulated."""
        raise NotImplementedError("simulated CUDA graphs have no cudaGraph_t")

    def raw_cuda_graph_exec(self) -> int:
        """Not simulated."""
        raise NotImplementedError("simulated CUDA graphs have no cudaGraphExec_t")


def new_pool() -> tuple[int, int]:
    """A handle of a memory pool, as ``torch.cuda.graph_pool_handle`` gives it."""
    return 0, next(_pools)


def replay_call(simulation: Simulation, step: _Call) -> None:
    """Run one captured call again, into the memory of its captured results."""
    mode = simulation.mode
    for tracer in simulation.tracers:
        if tracer.observers:
            tracer.before(step.func, step.args, step.kwargs)
    schema = getattr(step.func, "_schema", None)
    if schema is None or schema.name not in _NOTHING_TO_DO:
        with simulation.muted(), _below_autograd(), simulation.memory.uncounted():
            again = (
                mode.run(step.func, step.args, step.kwargs)
                if step.plan is None
                else step.plan(mode, step.func, step.args, step.kwargs)
            )
            for captured, computed in zip(tree_leaves(step.out), tree_leaves(again), strict=True):
                if isinstance(captured, Tensor) and _key(captured) != _key(computed):
                    captured.copy_(computed)
    place = mode.place(step.func, (*step.args, *tree_leaves(step.out)), step.kwargs, mixed=True)
    mode.report(place, step.func, step.args, step.kwargs, step.out)


@contextmanager
def _below_autograd() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        yield


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _all_bytes(storage: UntypedStorage) -> Tensor:
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def _put_back(storage: UntypedStorage, before: Tensor) -> None:
    now = _all_bytes(storage)
    with torch._C._DisableTorchDispatch():
        size = min(now.numel(), before.numel())  # it may have been resized meanwhile
        now[:size].copy_(before[:size])


def _poison(storage: UntypedStorage) -> None:
    """Fill with bytes that are NaN in every floating-point type."""
    everything = _all_bytes(storage)
    with torch._C._DisableTorchDispatch():
        everything.fill_(0xFF)


def _written(schema: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a call writes to, of its arguments."""
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, Tensor):
                yield leaf
