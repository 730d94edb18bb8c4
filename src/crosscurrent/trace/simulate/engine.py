"""Streams of backward passes, as PyTorch's engine on a GPU handles them.

Note [Backward on streams]
A node of the graph runs on the stream that was current, on its device, when its forward op ran. On a GPU
the engine keeps that stream in the node. Here it follows from the node's sequence number: each thread
remembers at which number it changed streams. The node that accumulates a leaf's gradient gets the stream
of the leaf's first use.

When a node is done, each gradient that it made is handed to the node that consumes it:

- the only gradient for that input: the consumer's stream waits for the producer's stream, now;
- one of several: they are summed on the consumer's stream, which waits for each producer; for the first
  one only once the second arrives, but for what the first had issued when it was done;
- in both cases the consumer's stream counts as a user of the gradient (``record_stream``).

Before the pass, roots are handed their gradients by the stream that is current around ``backward``. After
it, that stream waits for the streams of all leaves. Between nodes, streams that no node asked for are the
default ones, for a node on the host those of the caller.

A pass whose graph knows one stream only, the caller's, needs none of this, and runs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from crosscurrent.trace.simulate.autograd import current_node, sequence_number
from crosscurrent.trace.simulate.memory import ON_HOST

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.queues import Queue
    from crosscurrent.trace.simulate.simulation import Simulation

_METADATA = "crosscurrent stream"


class Engine:
    """Stands for PyTorch's autograd engine, and puts a backward pass on its streams."""

    def __init__(self, simulation: Simulation, real: Any) -> None:
        self._simulation = simulation
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def run_backward(self, roots: Sequence[Any], grads: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; the arguments are those of the real engine."""
        simulation = self._simulation
        thread = simulation.queues.thread
        plain = all(log.knows_only(queue) for log, queue in zip(thread.logs, thread.current, strict=True))
        if plain and simulation.num_devices == 1 and thread.backward is None:
            return self._real.run_backward(roots, grads, *args, **kwargs)
        inputs = args[2] if len(args) > 2 else kwargs.get("inputs", ())
        if any(_is_wrapper(tensor) for tensor in (*roots, *inputs)):
            return self._real.run_backward(roots, grads, *args, **kwargs)
        run = Pass(simulation, roots, inputs)
        with run.running(roots, grads):
            return self._real.run_backward(roots, grads, *args, **kwargs)


class _HandOver(NamedTuple):
    """A gradient goes from the stream that made it to the stream that consumes it."""

    edge: tuple[Any, int]
    producer: Queue
    consumer: Queue


class Pass:
    """One backward pass: the graph, the streams of its nodes, and the hand-overs between them."""

    def __init__(self, simulation: Simulation, roots: Sequence[Any], inputs: Sequence[Any]) -> None:
        self.simulation = simulation
        self.thread = simulation.queues.thread
        self.ambient = list(self.thread.current)
        self.device = self.thread.device
        self._nodes: list[Any] = []
        self._producers: dict[tuple[Any, int], int] = {}
        self._first_use: dict[Any, int] = {}
        self._targets = {node for node, _ in map(_edge_of, inputs)}
        self._devices: dict[Any, int] = {}
        self._arrived: dict[tuple[Any, int], int] = {}
        self._first: dict[tuple[Any, int], tuple[Queue, Any]] = {}
        self._leaves: set[Queue] = set()
        self._started: Any = None
        self._edges: Iterator[None] | None = None
        self._sum_on: Queue | None = None
        self.since = 0
        """The sequence number at which the last node, or sum between nodes, was done. An op has its number
        already when it shows that the next node has begun."""
        self._walk([node for node, _ in map(_edge_of, roots)])
        known = self._targets and None not in self._targets
        self._needed = self._find_needed() if known else None

    def _walk(self, roots: list[Any]) -> None:
        seen: set[Any] = set()
        stack = roots
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self._nodes.append(node)
            number = node._sequence_nr()
            for consumer, place in node.next_functions:
                if consumer is None:
                    continue
                edge = consumer, place
                self._producers[edge] = self._producers.get(edge, 0) + 1
                self._first_use[consumer] = min(number, self._first_use.get(consumer, number))
                stack.append(consumer)

    def _find_needed(self) -> set[Any]:
        """The nodes on a way to one of the inputs that gradients were asked for."""
        users: dict[Any, list[Any]] = {}
        for node in self._nodes:
            for consumer, _ in node.next_functions:
                users.setdefault(consumer, []).append(node)
        needed: set[Any] = set()
        stack = list(self._targets)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(users.get(node, ()))
        return needed

    def running(self, roots: Sequence[Any], grads: Sequence[Any]) -> _Running:
        """The context in which the real engine does this pass."""
        return _Running(self, roots, grads)

    def begin(self, roots: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        """Hand the roots their gradients, and watch every node; returns the handles of the hooks."""
        for root, grad in zip(roots, grads, strict=False):
            node, _ = _edge_of(root)
            source = grad if isinstance(grad, Tensor) else root
            device = self.simulation.memory.device_of(source) if isinstance(source, Tensor) else ON_HOST
            self._devices.setdefault(node, device)
            if device != ON_HOST and node is not None:
                producer, consumer = self.ambient[device], self.queue_of(node, device)
                self._join(producer, consumer)
                if node in self._targets:
                    self._leaves.add(consumer)
                if isinstance(grad, Tensor):
                    self._used(grad, consumer, producer)
        self.since = sequence_number()
        return [node.register_hook(self._hook(node)) for node in self._nodes]

    def end(self) -> None:
        """The caller's streams wait for those of the leaves."""
        self.simulation.restore_streams(self.ambient, self.device)
        for queue in sorted(self._leaves, key=lambda queue: (queue.device, queue.stream_id)):
            self._join(queue, self.ambient[queue.device])

    def queue_of(self, node: Any, device: int) -> Queue:
        """The stream of a node, on its device."""
        number = node._sequence_nr()
        if number < 1 << 63:
            return self.thread.logs[device].at(number)
        metadata = node.metadata
        queue: Queue | None = metadata.get(_METADATA)
        if queue is None or queue.device != device:
            first = self._first_use.get(node)
            log = self.thread.logs[device]
            queue = self.ambient[device] if first is None or first >= 1 << 63 else log.at(first)
            metadata[_METADATA] = queue
        return queue

    def settle(self) -> None:
        """Called before anything that depends on the current stream: notice that a node has begun."""
        node = current_node()
        if node is not None and node is not self._started and self._edges is None:
            self._start(node)

    def _start(self, node: Any) -> None:
        self._started = node
        device = self._devices.get(node, ON_HOST)
        if device == ON_HOST:
            self.simulation.restore_streams(self.ambient, self.device, self.since)
            return
        current = list(self.simulation.queues.defaults)
        current[device] = self.queue_of(node, device)
        self.simulation.restore_streams(current, device, self.since)

    def _hook(self, node: Any) -> Callable[[Any, Any], None]:
        def done(outputs: Any, inputs: Any) -> None:
            self._finish(node, outputs or ())

        return done

    def _finish(self, node: Any, outputs: Sequence[Any]) -> None:
        if self._started is not node:
            self._start(node)
        device = self._devices.get(node, ON_HOST)
        queue = None if device == ON_HOST else self.queue_of(node, device)
        if queue is not None and not node.next_functions:
            self._leaves.add(queue)
        # Not a reference to any gradient stays: the engine adds in place what only it holds.
        self._edges = self._hand_over(self._hand_overs(node, queue, outputs))
        self.go_on()

    def go_on(self) -> None:
        """Hand over gradients until the engine has a sum to do, or all are handed over."""
        assert self._edges is not None
        self.since = sequence_number()
        if next(self._edges, self) is self:
            self._edges = None
            self._started = None

    @property
    def sums_on(self) -> Queue | None:
        """The stream of the sum that the engine does next, if the next op is one."""
        return self._sum_on

    def _hand_overs(self, node: Any, queue: Queue | None, outputs: Sequence[Any]) -> list[_HandOver]:
        """The gradients of a node that cross to a device's stream, in order."""
        hand_overs: list[_HandOver] = []
        for edge, grad in zip(node.next_functions, outputs, strict=False):
            consumer = edge[0]
            if consumer is None or not isinstance(grad, Tensor):
                continue
            if self._needed is not None and consumer not in self._needed:
                continue
            device = self.simulation.memory.device_of(grad)
            self._devices.setdefault(consumer, device)
            if device == ON_HOST:
                continue
            producer = queue if queue is not None and queue.device == device else self.thread.current[device]
            target = self.queue_of(consumer, device)
            if consumer in self._targets:
                self._leaves.add(target)  # it may not run at all: its input is what was asked for
            self._used(grad, target, producer)
            hand_overs.append(_HandOver(edge, producer, target))
        return hand_overs

    def _hand_over(self, hand_overs: list[_HandOver]) -> Iterator[None]:
        """Each step ends where the engine sums two gradients."""
        for edge, producer, target in hand_overs:
            arrived = self._arrived[edge] = self._arrived.get(edge, 0) + 1
            if self._producers[edge] == 1:
                self._join(producer, target)
            elif arrived == 1:
                self._first[edge] = producer, self.simulation.record_internal(producer)
            else:
                self._join(producer, target)
                first = self._first.pop(edge, None)
                if first is not None and first[0] is not target:
                    self.simulation.wait_internal(first[1], target)
                self._sum_on = target
                yield
                self._sum_on = None

    def _join(self, producer: Queue, consumer: Queue) -> None:
        if producer is not consumer:
            self.simulation.wait_internal(self.simulation.record_internal(producer), consumer)

    def _used(self, grad: Tensor, consumer: Queue, producer: Queue) -> None:
        if producer is not consumer:
            for tracer in self.simulation.tracers:
                tracer.stream_used(grad, consumer.device, consumer.stream_id)


class _Running:
    """Makes a pass the one that this thread runs, also inside another one."""

    def __init__(self, run: Pass, roots: Sequence[Any], grads: Sequence[Any]) -> None:
        self._run = run
        self._roots = roots
        self._grads = grads

    def __enter__(self) -> None:
        run = self._run
        self._outer = run.thread.backward
        self._handles = run.begin(self._roots, self._grads)
        run.thread.backward = run
        run.simulation.attend(+1)

    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None:
        run = self._run
        run.simulation.attend(-1)
        run.thread.backward = self._outer
        for handle in self._handles:
            handle.remove()
        run.end()


def _is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is of a Python class that handles its own ops, as those of tracers are."""
    return isinstance(tensor, Tensor) and torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def _edge_of(root: Any) -> tuple[Any, int]:
    """The node and output number of a tensor or of a ``GradientEdge``."""
    if not isinstance(root, Tensor):
        return root.node, root.output_nr
    if root.grad_fn is not None:
        return root.grad_fn, root.output_nr
    if not root.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(root):
        return None, 0  # a leaf of a function transform, inside of which PyTorch cannot tell its node either
    edge = torch.autograd.graph.get_gradient_edge(root)
    return edge.node, edge.output_nr
