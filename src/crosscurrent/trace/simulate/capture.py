"""What a CUDA graph captures; see Note [Capture] in ``graphs``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map

from crosscurrent.trace.simulate.plans import WAITING
from crosscurrent.trace.simulate.queues import Queue

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.dispatch import SimulatedDispatch
    from crosscurrent.trace.simulate.simulation import Simulation


@dataclass(slots=True)
class Call:
    queue: Queue
    func: Any
    plan: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


@dataclass(slots=True)
class Mark:
    """An event recorded (``wait`` False) or waited for inside a graph."""

    queue: Queue
    key: int
    wait: bool


@dataclass(eq=False)
class Capture:
    """What one graph has captured so far, or in all."""

    simulation: Simulation
    origin: Queue
    steps: list[Call | Mark] = field(default_factory=list)
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
        self.simulation.captures.ended(self._events)
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
        before = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        with self.simulation.muted():
            out = mode.run(func, args, kwargs) if plan is None else plan(mode, func, args, kwargs)
        fresh = [
            leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and storage_key(leaf) not in before
        ]
        for tensor in fresh:
            self._made[storage_key(tensor)] = tensor.untyped_storage()
        if fresh or written:
            self.steps.append(Call(queue, func, plan, *tree_map(_plain, (args, kwargs, out))))
            self._advance(queue)
        return out

    def record(self, queue: Queue, key: int) -> None:
        """An event was recorded on a captured stream."""
        self.steps.append(Mark(queue, key, False))
        self._events[key] = dict(self._known[queue])

    def wait(self, queue: Queue, key: int) -> None:
        """A stream waits for an event of this capture, and takes part in it from now on."""
        self._join(queue, self._events[key])
        self.steps.append(Mark(queue, key, True))
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
        key = storage_key(tensor)
        if key not in self._made and key not in self._kept:
            storage = tensor.untyped_storage()
            self._kept[key] = storage, _all_bytes(storage).clone()


class Captures:
    """All captures of a simulation: which streams take part, and which events belong to them."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._ended_events: set[int] = set()

    def current(self) -> Capture | None:
        """The graph that the current stream of this thread is being captured into."""
        thread = self._simulation.queues.thread
        return thread.current[thread.device].capture

    def refuse(self, call: str) -> None:
        """Raise if this thread is capturing a graph, where ``call`` is not allowed."""
        if self._simulation.attention:
            for queue in self._simulation.queues.thread.current:
                if queue.capture is not None:
                    queue.capture.refuse(call)

    def ended(self, events: Iterable[int]) -> None:
        """A capture is over; these events were last recorded in it."""
        self._ended_events.update(events)

    def forget(self, event: int) -> None:
        """An event was recorded outside of any capture, or is gone."""
        self._ended_events.discard(event)
        for capture in self._running():
            capture.forget(event)

    def wait(self, queue: Queue, event: int) -> bool:
        """Whether a wait belongs to a capture, which then has handled it."""
        for capture in self._running():
            if capture.knows(event):
                capture.wait(queue, event)
                return True
        if event in self._ended_events:
            raise torch.AcceleratorError(
                "CUDA error: operation not permitted on an event last recorded in a capturing stream"
            )
        if queue.capture is not None:
            queue.capture.invalid = True
            raise torch.AcceleratorError(
                "CUDA error: dependency created on uncaptured work in another stream: the event was recorded "
                "outside of the capture"
            )
        return False

    def _running(self) -> set[Capture]:
        simulation = self._simulation
        if not simulation.attention:
            return set()
        queues = (q for device in range(simulation.num_devices) for q in simulation.queues.of_device(device))
        return {queue.capture for queue in queues if queue.capture is not None}


def storage_key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _plain(value: Any) -> Any:
    """A tensor without what autograd knows of it: on a GPU a graph keeps addresses, and no node alive."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return value.detach()


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
