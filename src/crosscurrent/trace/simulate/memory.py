"""Which storage stands for which memory: device, pinned or pageable, and how much of it there is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from crosscurrent.trace.simulate.queues import Queue, Queues

ON_HOST: Final = -1
"""What stands in place of a device's index for memory of the host."""

PINNED: Final = ON_HOST
"""``Block.device`` of page-locked host memory. Pageable memory has no block."""

UNDETERMINED: Final = -2
"""``Block.device`` of what C++ code made without a word on the device: it belongs where it is used.

PyTorch's composite operators create helpers "on the device of my argument". Here that argument
really lives on the CPU, so such a request looks like one for the CPU.
"""

_ROUNDING = 512
_SEGMENT = 2 << 20
DEFAULT_CAPACITY = 80 << 30


class Block(weakref.ref[torch.UntypedStorage]):
    """One storage that is not plain pageable memory: a weak reference to it, with what is known."""

    __slots__ = ("device", "key", "nbytes", "queue")

    device: int
    key: int
    nbytes: int
    queue: Queue | None
    """The stream that device memory was allocated on, to whose pool it goes back."""


class DeviceMemory:
    """The counters of one device's caching allocator."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self.limit = capacity
        self.allocated = self.peak = self.reserved = self.peak_reserved = 0
        self.num_allocs = self.num_frees = self.num_ooms = 0
        self.total_allocated = self.total_freed = 0
        self.active = self.peak_active = 0

    def grow(self, nbytes: int, device: int) -> None:
        """Count an allocation, or raise ``OutOfMemoryError`` when it does not fit."""
        if self.allocated + nbytes > self.limit:
            self.num_ooms += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {_size(nbytes)}. GPU {device} has a total capacity "
                f"of {_size(self.capacity)} of which {_size(self.limit - self.allocated)} is free. "
                f"(simulated device; set its size with simulate(capacity=...))"
            )
        self.allocated += nbytes
        self.total_allocated += nbytes
        self.num_allocs += 1
        self.active += 1
        if self.allocated > self.peak:
            self.peak = self.allocated
        if self.active > self.peak_active:
            self.peak_active = self.active
        if self.allocated > self.reserved:
            self.reserved = _whole(self.allocated, _SEGMENT)
            self.peak_reserved = max(self.peak_reserved, self.reserved)

    def shrink(self, nbytes: int) -> None:
        """Count a free."""
        self.allocated -= nbytes
        self.total_freed += nbytes
        self.num_frees += 1
        self.active -= 1

    def empty_cache(self) -> None:
        """Give back what is reserved and not in use."""
        self.reserved = _whole(self.allocated, _SEGMENT)

    def reset_peak(self) -> None:
        """Peaks start again from what is in use now."""
        self.peak, self.peak_reserved, self.peak_active = self.allocated, self.reserved, self.active


class _Depth(threading.local):
    """How deep a thread is inside of operators that are written in Python."""

    depth = 0


class Memory:
    """The tags of all live storages that are device or pinned memory."""

    def __init__(self, queues: Queues, capacity: int) -> None:
        self._thread = queues.thread
        self.bare = _Depth()
        self.blocks: dict[int, Block] = {}
        """Keyed by the address of the ``StorageImpl``, which is its identity while it lives."""
        self.devices = [DeviceMemory(capacity) for _ in range(queues.num_devices)]
        self._counts = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Storages tagged meanwhile take no device memory: their content moves elsewhere at once."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def tag(self, storage: torch.UntypedStorage, device: int) -> Block:
        """Declare a storage to be memory of ``device``, or ``PINNED``, or ``UNDETERMINED``."""
        nbytes = storage.nbytes() + _ROUNDING - 1 & -_ROUNDING if self._counts else 0
        if device >= 0 and nbytes:
            self.devices[device].grow(nbytes, device)
        block = Block(storage, self._died)
        block.device = device
        block.nbytes = nbytes
        block.queue = self._thread.current[device] if device >= 0 else None
        block.key = key = storage._cdata
        self.blocks[key] = block
        return block

    def retag(self, storage: torch.UntypedStorage, device: int) -> None:
        """Change what a storage is, or its size after it was resized."""
        self.untag(storage)
        self.tag(storage, device)

    def untag(self, storage: torch.UntypedStorage) -> None:
        """A storage is pageable memory from now on."""
        block = self.blocks.pop(storage._cdata, None)
        if block is not None:
            self._release(block)

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor lies in; None for pageable memory and tensors without storage."""
        try:
            return self.blocks.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return self._block_of_wrapper(tensor)

    @contextmanager
    def laid_bare(self) -> Iterator[None]:
        """Inside, tensors of this thread are where they really are: on the CPU.

        For the implementation of an operator, which runs below the simulation: what it makes there for
        itself is on the CPU, and so must be what it makes that next to.
        """
        self.bare.depth += 1
        try:
            yield
        finally:
            self.bare.depth -= 1

    def device_of(self, tensor: torch.Tensor) -> int:
        """The index of the device that a tensor lies on, or ``ON_HOST``."""
        if self.bare.depth:
            return ON_HOST
        block = self.block_of(tensor)
        return block.device if block is not None and block.device >= 0 else ON_HOST

    def _block_of_wrapper(self, tensor: torch.Tensor) -> Block | None:
        functorch = torch._C._functorch
        if functorch.is_functorch_wrapped_tensor(tensor):
            return self.block_of(functorch.get_unwrapped(tensor))
        return None

    def _died(self, block: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(block, Block)
        if self.blocks.get(block.key) is block:
            del self.blocks[block.key]
            self._release(block)

    def _release(self, block: Block) -> None:
        if block.device >= 0 and block.nbytes:
            self.devices[block.device].shrink(block.nbytes)


def _whole(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
