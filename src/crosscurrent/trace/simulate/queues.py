"""Stream queues: the pool that streams come from, and which queue each thread works on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from crosscurrent.trace.simulate.autograd import StreamLog
from crosscurrent.trace.simulate.clock import KERNEL, Clock

if TYPE_CHECKING:
    from crosscurrent.trace.simulate.capture import Capture
    from crosscurrent.trace.simulate.engine import Pass

POOL_SIZE = 32
"""Queues per device and priority. The 33rd stream shares its queue with the first."""

BRANCH = 1 << 32
"""Stream ids of graph branches start here: no stream of the pool has one that large."""

HIGHEST_PRIORITY = -3
"""Priorities run from 0, the lowest, down to this one."""


class Queue:
    """One queue of work on one device. Several ``torch.cuda.Stream`` objects can be one queue."""

    __slots__ = ("capture", "device", "free_at", "priority", "stream_id")

    def __init__(self, device: int, stream_id: int, priority: int) -> None:
        self.device = device
        self.stream_id = stream_id
        self.priority = priority
        self.free_at = 0
        self.capture: Capture | None = None

    @property
    def handle(self) -> int:
        """A number that stands for the ``cudaStream_t``; 0 for a default stream, as in CUDA."""
        return self.stream_id and (self.device + 1 << 32) | self.stream_id

    def launch(self, clock: Clock, cost: int = KERNEL) -> None:
        """Add work that takes ``cost`` nanoseconds."""
        self.free_at = max(self.free_at, clock.now) + cost


class _PerThread(threading.local):
    """What CUDA keeps per thread: the current device, and the current stream of each device."""

    def __init__(self, defaults: list[Queue]) -> None:
        self.adopted = False
        """Whether the simulation's dispatch mode is on the stack of this thread."""
        self.device = 0
        self.current = list(defaults)
        self.logs = [StreamLog(queue) for queue in defaults]
        self.backward: Pass | None = None
        self.entered: list[tuple[Queue, int, Queue]] = []
        """Streams entered as contexts, with the device and the stream that were current before."""
        self.quiet = 0


class Queues:
    """All queues of all devices, with the numbering of streams that PyTorch uses."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.defaults = [Queue(device, 0, 0) for device in range(num_devices)]
        self.thread = _PerThread(self.defaults)
        self._known: dict[tuple[int, int], Queue] = {(q.device, 0): q for q in self.defaults}
        self._handed_out: dict[tuple[int, int], int] = {}

    def take(self, device: int, priority: int = 0) -> Queue:
        """The next queue of the pool of a device and priority, round robin."""
        priority = max(HIGHEST_PRIORITY, min(0, priority))
        count = self._handed_out.get((device, priority), 0)
        self._handed_out[device, priority] = count + 1
        stream_id = (count % POOL_SIZE) << 5 | (1 - priority) << 1 | 1
        return self.by_id(device, stream_id)

    def by_id(self, device: int, stream_id: int) -> Queue:
        """The queue with a PyTorch stream id."""
        queue = self._known.get((device, stream_id))
        if queue is None:
            kind = stream_id >> 1 & 0xF
            if not (0 <= device < self.num_devices and stream_id & 1 and 1 <= kind <= 1 - HIGHEST_PRIORITY):
                raise RuntimeError(f"no stream {stream_id} on simulated device cuda:{device}")
            queue = self._known[device, stream_id] = Queue(device, stream_id, 1 - kind)
        return queue

    def of_device(self, device: int) -> list[Queue]:
        """Every queue of a device that was ever used."""
        return [queue for (owner, _), queue in list(self._known.items()) if owner == device]
