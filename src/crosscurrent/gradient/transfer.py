"""The lanes that move checkpoints, and the only place where streams and events are made.

Three lanes: `main` computes, `host_to_device` brings the next cell's checkpoints in, `device_to_host`
takes the last cell's results out. The two transfer lanes run copies and nothing else: packing and
unpacking (quantization, and its scratch memory) belong to `main`, so that no scratch is shared.

Note [Who waits for whom]
    A tensor that crosses lanes does so in a slot of a double buffer, and each slot goes round a ring:

    incoming   consumed (main) -> filled (host_to_device) -> read (main) -> consumed ...
    outgoing   written (main) -> drained (device_to_host) -> written ...

    Each arrow that changes lanes is one wait on one event of the GPU; the host waits for none. Two orders
    need no wait of their own:
    - CPU bytes are never overwritten before they were read. What `device_to_host` writes there, `main`
      has computed after it received what had been read from there: the wait for `main` carries the order.
    - the memory of a double buffer is allocated before a run and freed after it. `close` makes `main` wait
      for both transfer lanes first, so the block may be reused at once.

Note [Waits that are already implied]
    Each lane counts its events and remembers the newest event of every other lane that it is ordered after,
    directly or through others (a vector clock of three entries). A wait that would add nothing is not
    issued. With the flag off all lanes are one, nothing is ever behind, and no event is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SLOTS = 2
"""Slots of a double buffer: one is computed with while the other is moved."""

Ring = tuple[int, int]
"""Bytes of a slot, and how many slots."""

_lane_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Moment:
    """An event on a lane, and what that lane was ordered after when it was recorded."""

    event: torch.cuda.Event
    lane: int
    reached: Mapping[int, int]


class Lane:
    """A sequence of work in program order: a stream, and what it is known to be ordered after.

    Where all work is on one lane there is no stream: moments are None and nothing is ever behind.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._id = next(_lane_ids)
        self._reached: dict[int, int] = {self._id: 0}
        self.latest: Moment | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of a lane that has its own."""
        assert self._stream is not None, "a single lane never waits"
        return self._stream

    def is_on(self, stream: torch.cuda.Stream) -> bool:
        """Whether this lane's work goes to `stream`."""
        return self._stream == stream

    def record(self) -> Moment | None:
        """Mark the work issued on this lane so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(self._stream)
        self._reached[self._id] += 1
        self.latest = Moment(event, self._id, dict(self._reached))
        return self.latest

    def behind(self, moment: Moment | None) -> torch.cuda.Event | None:
        """The event that this lane must wait for to come after `moment`, or None if it does already.

        The caller waits for it at once: from here on the lane counts as ordered. (The waits stand where
        their reasons are, and not in here.)
        """
        if moment is None or self._reached.get(moment.lane, 0) >= moment.reached[moment.lane]:
            return None
        for lane, count in moment.reached.items():
            self._reached[lane] = max(self._reached.get(lane, 0), count)
        return moment.event

    def issue(self) -> AbstractContextManager[object]:
        """Issue the work of a `with` block on this lane."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _make_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


class Lanes:
    """The three lanes by role. Not asynchronous: all three are the caller's stream."""

    def __init__(self, *, asynchronous: bool, device: torch.device) -> None:
        self.device = device
        self.main = Lane(None)
        self.host_to_device = self.device_to_host = self.main
        self._asynchronous = asynchronous
        if asynchronous:
            # What overlaps with what: one copy engine each way, next to the kernels of `main`.
            self.host_to_device = Lane(_make_stream(device))
            self.device_to_host = Lane(_make_stream(device))

    def open(self) -> None:
        """Begin a run: the caller's current stream is `main` from here on."""
        if not self._asynchronous:
            return
        stream = torch.cuda.current_stream(self.device)
        if not self.main.is_on(stream):
            self.main = Lane(stream)
        self._join()

    def close(self) -> None:
        """End a run: `main` comes after all copies, so that what they used may be freed."""
        self._join()

    def abandon(self) -> None:
        """End a run that an exception cut short, possibly between a copy and the event behind it."""
        if not self._asynchronous:
            return
        # Freed while in use: the slots go back to the allocator, and copies may be under way in them.
        self.host_to_device.record()
        self.device_to_host.record()
        self._join()

    def synchronize(self) -> None:
        """Make the host wait for everything, to read CPU bytes. No pass does."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _join(self) -> None:
        # The last cell's write: the next run (on another stream, perhaps) reuses the CPU bytes. And the
        # freed source of a copy: `main` may be given the memory of the slots as soon as the run has ended.
        if event := self.main.behind(self.device_to_host.latest):
            self.main.stream.wait_event(event)
        # The same for what came in; only a run that was cut short leaves a copy that `main` never received.
        if event := self.main.behind(self.host_to_device.latest):
            self.main.stream.wait_event(event)


class Readback:
    """A small tensor on its way to the host, on the current stream."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """The tensor in CPU memory. The host waits for it, which only a guard that was asked for does."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


class Uploads:
    """Brings token ids from pageable memory to the device without making the host wait.

    They go through pinned memory that is allocated once. The host may not write there while an earlier copy
    still reads, and it does not wait for that either: it takes another buffer. So there are as many buffers
    as the host is ahead of the device, in batches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[tuple[HostBuffer, torch.cuda.Event]] = []

    def upload(self, ids: Tensor) -> Tensor:
        """Copy integers in CPU memory to the device, on the current stream."""
        ids = ids.long()
        if self.device.type != "cuda":
            return ids.to(self.device)
        buffer, copied = self._idle()
        num_bytes = ids.numel() * ids.itemsize
        buffer.reserve(num_bytes)
        staged = buffer.bytes[:num_bytes].view(ids.dtype).view(ids.shape)
        staged.copy_(ids)
        on_device = torch.empty_like(staged, device=self.device)
        on_device.copy_(staged, non_blocking=True)
        copied.record(torch.cuda.current_stream(self.device))
        return on_device

    @property
    def pinned_bytes(self) -> int:
        """The pinned memory that is reserved for all buffers."""
        return sum(buffer.pinned_bytes for buffer, _ in self._buffers)

    def _idle(self) -> tuple[HostBuffer, torch.cuda.Event]:
        for buffer, copied in self._buffers:
            # Write after read: the host may only write where no copy reads any more. No wait: it only asks.
            if copied.query():  # type: ignore[no-untyped-call, unused-ignore]
                return buffer, copied
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        self._buffers.append((HostBuffer(pinned=True), event))
        return self._buffers[-1]


def reserved(num_bytes: int) -> int:
    """What PyTorch's pinned allocator reserves for a buffer: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


class HostBuffer:
    """The CPU bytes of one cell: contiguous, allocated once, grown when a longer cell comes along."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.written: Moment | None = None

    @property
    def pinned_bytes(self) -> int:
        """The pinned memory that is reserved for it."""
        return reserved(self.bytes.numel()) if self.pinned else 0

    def reserve(self, num_bytes: int) -> None:
        """Make room for `num_bytes`. Raises torch.OutOfMemoryError with the size if there is none."""
        if num_bytes <= self.bytes.numel():
            return
        # The old bytes go first, so that growing never needs both. PyTorch keeps pinned memory until the
        # copies that use it are done.
        self.bytes = torch.empty(0, dtype=torch.uint8)
        kind = "pinned" if self.pinned else "pageable"
        try:
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pinned)
        except RuntimeError as error:
            raise torch.OutOfMemoryError(
                f"could not allocate {num_bytes} bytes of {kind} CPU memory"
            ) from error


class Incoming:
    """A double buffer on the device that `host_to_device` fills and `main` reads, in the same order."""

    def __init__(self, lanes: Lanes, slots: Sequence[Tensor], fresh: Moment | None) -> None:
        self._lanes = lanes
        self._slots = slots
        # A slot's memory may have been something else of main's, and main may still be using that.
        self._consumed: list[Moment | None] = [fresh for _ in slots]
        self._filled: list[Moment | None] = [None for _ in slots]
        self._num_fetched = 0
        self._num_received = 0

    def fetch(self, source: HostBuffer, num_bytes: int) -> None:
        """Start to bring in the first `num_bytes` of `source`, behind what was fetched before."""
        index = self._num_fetched % len(self._slots)
        self._num_fetched += 1
        lane = self._lanes.host_to_device
        # Write after read: main may still read this slot for the cell before last. For a slot never used
        # yet, the start of a row or a run: the transfer lane must come after main's earlier work.
        if event := lane.behind(self._consumed[index]):
            lane.stream.wait_event(event)
        # Read before written: the forward pass, or the row above, may still be writing these CPU bytes.
        if event := lane.behind(source.written):
            lane.stream.wait_event(event)
        with lane.issue():
            self._slots[index][:num_bytes].copy_(source.bytes[:num_bytes], non_blocking=source.pinned)
        self._filled[index] = lane.record()

    def receive(self) -> Tensor:
        """The bytes of the oldest fetch that was not received yet, for work on `main`."""
        index = self._num_received % len(self._slots)
        lane = self._lanes.main
        # Read before written: the copy into this slot may still be under way.
        if event := lane.behind(self._filled[index]):
            lane.stream.wait_event(event)
        return self._slots[index]

    def release(self) -> None:
        """Give the slot that was received last back: the work that reads it has been issued."""
        self._consumed[self._num_received % len(self._slots)] = self._lanes.main.record()
        self._num_received += 1

    def retire(self) -> None:
        """Free the slots, between two runs."""
        for slot in self._slots:
            # Freed while in use: it may be from another stream, which does not come after `main`.
            slot.record_stream(torch.cuda.current_stream(slot.device))


class Outgoing:
    """A double buffer on the device that `main` writes and `device_to_host` drains, in the same order."""

    def __init__(self, lanes: Lanes, slots: Sequence[Tensor]) -> None:
        self._lanes = lanes
        self._slots = slots
        self._drained: list[Moment | None] = [None for _ in slots]
        self._num_sent = 0

    def acquire(self) -> Tensor:
        """The bytes that the next `send` sends, for work on `main`."""
        index = self._num_sent % len(self._slots)
        lane = self._lanes.main
        # Write after read: this slot is the source of a copy that may still run, two sends ago.
        if event := lane.behind(self._drained[index]):
            lane.stream.wait_event(event)
        return self._slots[index]

    def send(self, target: HostBuffer, num_bytes: int) -> None:
        """Start to take the first `num_bytes` of the acquired slot to `target`."""
        index = self._num_sent % len(self._slots)
        self._num_sent += 1
        lane = self._lanes.device_to_host
        # Sent before produced: a layer's input (the embedding's output for layer 0), a KV checkpoint or a
        # bottom head gradient leaves only after main has computed it.
        if event := lane.behind(self._lanes.main.record()):
            lane.stream.wait_event(event)
        with lane.issue():
            target.bytes[:num_bytes].copy_(self._slots[index][:num_bytes], non_blocking=target.pinned)
        target.written = self._drained[index] = lane.record()


def _allocate(lanes: Lanes, num_bytes: int, num_slots: int) -> list[Tensor]:
    return [torch.empty(num_bytes, dtype=torch.uint8, device=lanes.device) for _ in range(num_slots)]


def make_incoming(lanes: Lanes, rings: Sequence[Ring]) -> list[Incoming]:
    """The incoming buffers of a run; call it before the run's other work."""
    blocks = [_allocate(lanes, *ring) for ring in rings]
    # Recorded after all allocations: whatever main did with these blocks before lies before this event.
    fresh = lanes.main.record()
    return [Incoming(lanes, block, fresh) for block in blocks]


class Rings:
    """The incoming buffers of one run after the other.

    As long as they are large enough they are the same. Then the first copies of a run need not wait for what
    `main` did with their memory before, only for what last read them.
    """

    def __init__(self) -> None:
        self._rings: Sequence[Ring] = ()
        self._incoming: list[Incoming] = []

    def ready(self, lanes: Lanes, rings: Sequence[Ring]) -> list[Incoming]:
        """One for each ring."""
        if not self._rings or any(
            need > have for (need, _), (have, _) in zip(rings, self._rings, strict=True)
        ):
            for incoming in self._incoming:
                incoming.retire()
            self._rings, self._incoming = rings, make_incoming(lanes, rings)
        return self._incoming


def make_outgoing(lanes: Lanes, sizes: Sequence[int]) -> list[Outgoing]:
    """One outgoing double buffer per size in bytes. Main writes first, so there is nothing to wait for."""
    return [Outgoing(lanes, _allocate(lanes, size, NUM_SLOTS)) for size in sizes]
