"""What a tracer asks about the simulated machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, UntypedStorage

from crosscurrent.trace.records import MemoryKind
from crosscurrent.trace.simulate.memory import PINNED, UNDETERMINED
from crosscurrent.trace.simulate.queues import BRANCH

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.simulation import Simulation


class Environment:
    """Kinds of memory, current streams, names."""

    def __init__(self, simulation: Simulation) -> None:
        self._get = simulation.memory.blocks.get
        self._block_of = simulation.memory.block_of
        self._thread = simulation.queues.thread
        self._kinds = [(MemoryKind.DEVICE, index) for index in range(simulation.num_devices)]

    def classify(self, tensor: Tensor) -> tuple[MemoryKind, int] | None:
        """The memory that a tensor lies in and its device (-1 for pinned memory); None: pageable."""
        try:
            block = self._get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            block = self._block_of(tensor)
        if block is None or block.device == UNDETERMINED:
            return None
        return (MemoryKind.PINNED, -1) if block.device == PINNED else self._kinds[block.device]

    def device_of(self, tensor: Tensor) -> int:
        """The device of a tensor; negative for memory of the host, and for what is not known yet."""
        block = self._get(tensor.untyped_storage()._cdata)
        return -1 if block is None else block.device

    def allocated_on(self, device: int, storage: UntypedStorage) -> int:
        """The stream that memory was allocated on, of which nothing was seen."""
        block = self._get(storage._cdata)
        return 0 if block is None or block.queue is None else block.queue.stream_id

    def current_stream(self, device: int) -> int:
        """The stream that the next op of this thread on ``device`` runs on."""
        return self._thread.current[device].stream_id

    def current_device(self) -> int:
        """The current device of this thread."""
        return self._thread.device

    def stream_name(self, device: int, stream: int) -> str:
        """A name for people: ``cuda:0 default``, ``cuda:0 stream 33``."""
        if stream >= BRANCH:
            return f"cuda:{device} graph branch {stream - BRANCH}"
        return f"cuda:{device} {f'stream {stream}' if stream else 'default'}"
