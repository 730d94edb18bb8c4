"""The same work again and again: issued op by op, or as CUDA graphs.

Usage:

    graphs = Graphs(enabled=True)
    graphs.begin(signature, device)                # all that work reads without being given it; see the note
    cache = graphs.keep("cache", make_cache)       # memory that work writes in place
    (y,) = graphs.call(key, work, x, z)            # work(x, z), or one launch that does the same

Note [What a graph may stand for]
    A launch runs the kernels of the call that was captured, on the addresses of that call. So `work` reads
    its inputs and what `keep` gave, writes what `keep` gave, and returns tensors; what else it depends on is
    named by its key (integers, shapes, the layers that it computes) or by the signature (parameters, the
    choice of kernels). It has no effect on the host, since a launch would not repeat it.

    Inputs and outputs have fixed places, one for each position and shape, which all graphs share: they
    follow one another on one stream. An output is therefore valid until the next call. What lies between has
    its memory from one pool, for the same reason.

    A key's first call is issued op by op, which also compiles kernels and makes the libraries' workspaces;
    the second is captured. So what comes only once costs nothing more. Kept memory, places and graphs stay
    from run to run; another signature drops them all.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor

from crosscurrent.operators.copies import copy_all
from crosscurrent.operators.memset_nodes import driver, replace_memsets

Work = Callable[..., Sequence[Tensor]]
T = TypeVar("T")

_MOST_GRAPHS = 1024
"""Lengths that are all different would make graphs without end. Later keys are issued op by op."""

_MOST_RECALLED = 64
"""Of tensors that are small."""


class _Graph:
    """A captured call, and the places of its inputs and outputs."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.launch: torch.cuda.CUDAGraph | None = None
        """None until it is captured."""


class Graphs:
    """Calls work; the second time captures it, from then on launches it. See the note."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._signature: object = None
        self._user: torch.cuda.Stream | None = None
        """The stream of the latest run."""
        self._capturing: torch.cuda.Stream | None = None
        """Kept when graphs are dropped: the matrix library holds a workspace for each stream that it saw."""
        self._clear()

    def _clear(self) -> None:
        self._kept: dict[Hashable, object] = {}
        self._recalled: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._places: dict[Hashable, Tensor] = {}
        self._graphs: dict[Hashable, _Graph] = {}

    def begin(self, signature: object, device: torch.device) -> None:
        """Begin a run on a device, in which work depends on `signature`, besides what it is given."""
        if self._signature != signature:
            self.drop()
            self._signature = signature
        stream = torch.cuda.current_stream(device)
        if self._user is not None and self._user != stream:
            # Kept memory was the last run's, on another stream.
            stream.wait_stream(self._user)
        self._user = stream

    def drop(self) -> None:
        """Forget everything. The host waits for the device first, if there is anything.

        A graph may not go while it runs, and memory would go back to the stream that it was allocated on,
        which need not come after the latest run.
        """
        if self._user is not None and (self._kept or self._recalled or self._graphs):
            torch.cuda.synchronize(self._user.device)
        self._clear()

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` makes. With graphs, what it made the first time: its addresses stay the same."""
        if not self._enabled:
            return make()
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[return-value]

    def recall(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes of its key alone. With graphs, the latest are remembered."""
        if not self._enabled:
            return make()
        if key in self._recalled:
            self._recalled.move_to_end(key)
        else:
            self._recalled[key] = make()
            if len(self._recalled) > _MOST_RECALLED:
                _, oldest = self._recalled.popitem(last=False)
                # Freed while in use: it may be from another stream, which does not come after this run.
                oldest.record_stream(torch.cuda.current_stream(oldest.device))
        return self._recalled[key]

    def taken(self, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """What was written to kept memory, for somebody else to have."""
        if not self._enabled:
            return kept
        fresh = [torch.empty_like(tensor) for tensor in kept]
        copy_all(fresh, kept)
        return fresh

    def call(
        self, key: Hashable, work: Work, *inputs: Tensor, when_read: Callable[[], None] = lambda: None
    ) -> Sequence[Tensor]:
        """The outputs of `work(*inputs)`, valid until the next call.

        `when_read` is called when all that reads the inputs has been issued.
        """
        # Anomaly detection reads what each function gave, which a launch does not show.
        enabled = self._enabled and not torch.is_anomaly_enabled()
        graph = self._graphs.get(key) if enabled else None
        if graph is None:
            outputs = work(*inputs)
            when_read()
            if enabled and len(self._graphs) < _MOST_GRAPHS:
                self._graphs[key] = _Graph(self._find_places("in", inputs), self._find_places("out", outputs))
            return outputs
        copy_all(graph.inputs, inputs)
        when_read()
        if graph.launch is None:
            graph.launch = self._capture(work, graph)
        graph.launch.replay()  # type: ignore[no-untyped-call, unused-ignore]
        return graph.outputs

    def _find_places(self, side: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        places = []
        for position, tensor in enumerate(tensors):
            key = side, position, tensor.shape, tensor.dtype
            if key not in self._places:
                self._places[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            places.append(self._places[key])
        return places

    def _capture(self, work: Work, graph: _Graph) -> torch.cuda.CUDAGraph:
        assert self._user is not None, "begin() comes first"
        if self._capturing is None or self._capturing.device != self._user.device:
            self._capturing = torch.cuda.Stream(self._user.device)  # type: ignore[no-untyped-call, unused-ignore]
        # A pool goes with the last of its graphs, one that failed too, and its handle is then worth nothing.
        pool = next((other.launch.pool() for other in self._graphs.values() if other.launch), None)
        launch = torch.cuda.CUDAGraph(keep_graph=True)
        with _no_collection(), torch.cuda.stream(self._capturing):
            # Of this thread only: others may go on to use CUDA, a data loader's, for instance.
            launch.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                copy_all(graph.outputs, work(*graph.inputs))
            except BaseException:
                # The error that matters is the one under way; a capture that it broke ends with another.
                with suppress(RuntimeError):
                    launch.capture_end()
                raise
            launch.capture_end()
        if driver() is not None:
            replace_memsets(launch.raw_cuda_graph())
        launch.instantiate()
        return launch


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: destroying another graph or an event would make the capture invalid."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def choice_of_kernels() -> tuple[object, ...]:
    """The global settings that decide which kernels PyTorch takes."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined, unused-ignore]
        # Of the ways to ask for this the only one that PyTorch answers whichever way it was set.
        matmul.fp32_precision,
        matmul.allow_fp16_accumulation,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.preferred_blas_library(),
        torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call, unused-ignore]
        torch.backends.cudnn.enabled,
        torch.is_inference_mode_enabled(),
    )
