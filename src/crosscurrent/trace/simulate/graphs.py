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

Here every graph has memory of its own. Where graphs share a pool on a GPU, what one has freed serves the
next; so that launches of them which nothing orders are seen, each tells tracers that it uses the pool. A pool
goes with the last of its graphs; PyTorch's allocator does not take its handle again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from crosscurrent.trace.simulate.capture import Call, Capture, storage_key
from crosscurrent.trace.simulate.current import running
from crosscurrent.trace.simulate.queues import BRANCH, Queue
from crosscurrent.trace.simulate.streams import Event

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.simulation import Simulation

_handles = itertools.count(1)
_branches = itertools.count(1)
_NOTHING_TO_DO = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


class _Pool:
    """The memory that graphs share."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.graphs: WeakSet[GraphMethods] = WeakSet()
        self.is_held = False
        """Whether a capture in it ended in an error: PyTorch goes on counting that one."""

    @property
    def is_gone(self) -> bool:
        """Whether the last of its graphs went."""
        return self.num_captures > 0 and not self.graphs and not self.is_held


_pools: defaultdict[tuple[int, int], _Pool] = defaultdict(_Pool)


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
        if pool is not None and _pools[pool].is_gone:
            raise RuntimeError(
                "use_count > 0 INTERNAL ASSERT FAILED: the memory pool of capture_begin() went with its "
                "last graph; keep one of its graphs, or begin with a new pool"
            )
        self._pool = pool if pool is not None else self._pool
        _pools[self._pool].num_captures += 1
        _pools[self._pool].graphs.add(self)
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
            _pools[self._pool].is_held = True
            self._clear()
            raise torch.AcceleratorError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        try:
            capture.check_joined()
        except RuntimeError:
            _pools[self._pool].is_held = True
            self._clear()
            raise

    def instantiate(self) -> None:
        """Nothing is left to do."""

    def replay(self) -> None:
        """Run the captured calls, on the current stream."""
        if self._capture is None or not self._ready:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        simulation = running()
        simulation.captures.refuse("cudaGraphLaunch")
        thread = simulation.queues.thread
        capture = self._capture
        here = thread.current[capture.origin.device]
        if self._finished is not None:
            simulation.wait_internal(self._finished, here, "graph")
        if _pools[self._pool].num_captures > 1:
            for tracer in simulation.tracers:
                tracer.pool_used(self._pool, here.device)
        events: dict[int, Event] = {}
        outer = list(thread.current)
        try:
            for step in capture.steps:
                queue = here if step.queue is capture.origin else self._lane(step.queue)
                if isinstance(step, Call):
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
        _pools[self._pool].graphs.discard(self)
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
    return 0, next(_handles)


def replay_call(simulation: Simulation, step: Call) -> None:
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
                if isinstance(captured, Tensor) and storage_key(captured) != storage_key(computed):
                    captured.copy_(computed)
    place = mode.place(step.func, (*step.args, *tree_leaves(step.out)), step.kwargs, mixed=True)
    mode.report(place, step.func, step.args, step.kwargs, step.out)


@contextmanager
def _below_autograd() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        yield
