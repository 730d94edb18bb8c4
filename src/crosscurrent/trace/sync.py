"""Synchronization, graphs and accesses that are no ops, as records.

``SyncTaps`` is what the simulation and the taps on a real GPU call for streams, events, graphs, host accesses
and declared accesses. Streams are ``(device, stream)`` pairs and events any hashable key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from torch import Tensor

from crosscurrent.trace.captures import Capture
from crosscurrent.trace.memory import Block, Gone
from crosscurrent.trace.recorder import DEFAULT_STREAM, Captured, Environment, Recorder
from crosscurrent.trace.records import (
    GRAPH_POOL,
    HOST,
    NO_EVENT,
    Access,
    Alloc,
    HostWait,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    Region,
    Sink,
    Through,
    UseStream,
    WaitEvent,
)


class SyncTaps(Recorder):
    """The taps that are not about ops. All may be called from any thread."""

    __slots__ = ("_captures", "_pools")

    def __init__(
        self,
        environment: Environment,
        sinks: Sequence[Sink | Callable[[Record], None]],
        *,
        full_stack: bool = False,
    ) -> None:
        super().__init__(environment, sinks, full_stack=full_stack)
        self._captures: list[Capture] = []
        self._pools: dict[Hashable, int] = {}

    # -- synchronization ---------------------------------------------------------------------------

    def event_recorded(self, event: Hashable, device: int, stream: int, via: str = "record") -> None:
        """``event`` marks what the stream has been given so far."""
        with self.lock:
            self.begin()
            previous = self._recordings.get(event)
            self._recordings[event] = self.record_event(self.lane(device, stream), via)
            if previous is not None:
                self.drop_event(previous)

    def event_waited(self, event: Hashable, device: int, stream: int, via: str = "wait_event") -> None:
        """The stream waits for the recording of ``event`` that is current now."""
        with self.lock:
            self.begin()
            number = self._recordings.get(event, NO_EVENT)
            self.put(WaitEvent, self.lane(device, stream), number, self.site, via)

    def event_gone(self, event: Hashable) -> None:
        """``event`` was destroyed, or its handle means another event from now on."""
        if event in self._recordings:
            self._deaths.noted.append(Gone(event))

    def event_synchronized(self, event: Hashable, kind: str = "event") -> None:
        """The host waited for ``event``."""
        with self.lock:
            self.begin()
            number = self._recordings.get(event, NO_EVENT)
            lanes: tuple[int, ...] = ()
            if number != NO_EVENT:
                lane, index = self._recorded_at[number]
                lanes = (lane,)
                self.host_cache.waited(lane, index)
            self._note_wait(kind, "", lanes)
            self.put(HostWait, kind, number, (), self.site, "")

    def event_queried_true(self, event: Hashable) -> None:
        """``event.query()`` said that the work is done."""
        self.event_synchronized(event, "query")

    def stream_synchronized(self, device: int, stream: int, kind: str = "synchronize") -> None:
        """The host waited for a stream."""
        with self.lock:
            self.begin()
            self.host_wait(kind, (self.lane(device, stream),))

    def stream_queried_true(self, device: int, stream: int) -> None:
        """``stream.query()`` said that the work is done."""
        self.stream_synchronized(device, stream, "query")

    def device_synchronized(self, device: int) -> None:
        """The host waited for all streams of a device."""
        with self.lock:
            self.begin()
            self.host_wait(
                "synchronize", tuple(lane for (of, _), lane in self._lanes.items() if of == device)
            )

    def record_event(self, lane: int, via: str) -> int:
        """Number a new recording on ``lane``."""
        number = self._num_recordings
        self._num_recordings += 1
        self._recorded_at[number] = (lane, self.put(RecordEvent, lane, number, self.site, via))
        return number

    def join(self, lane: int, other: int, via: str) -> None:
        """``lane`` waits for what ``other`` has been given so far."""
        number = self.record_event(other, via)
        self.put(WaitEvent, lane, number, self.site, via)
        self.drop_event(number)

    # -- graphs --------------------------------------------------------------------------------------

    def capture_started(self) -> None:
        """From now on what this thread's current stream is given goes into a graph, and does not run."""
        with self.lock:
            self.begin()
            if not self._captures:
                self._outside, self._sink = self._sink, Through(self._captured_or_not)
            self._captures.append(Capture(self.lane(self.environment.current_device())))

    def capture_ended(self) -> Captured | None:
        """The capture is over; gives what each replay does, or None if its beginning was not seen."""
        with self.lock:
            self.begin()
            lane = self.lane(self.environment.current_device())
            capture = next((each for each in self._captures if each.lane == lane), None)
            if capture is None:
                return None
            self._captures.remove(capture)
            if not self._captures:
                self._sink = self._outside
            for record in capture.records:
                if isinstance(record, Alloc):
                    self.put(Alloc, *record._replace(fresh=False)[1:])
            for block in self._blocks.values():
                block.private = block.private or block.index in capture.blocks
            return tuple(record for record in capture.records if isinstance(record, Op))

    @property
    def is_capturing(self) -> bool:
        """Whether what this thread's current stream is given goes into a graph."""
        if not self._captures:
            return False
        lane = self.lane(self.environment.current_device())
        return any(lane in capture.lanes for capture in self._captures)

    def _captured_or_not(self, record: Record) -> None:
        if any(capture.takes(record) for capture in self._captures):
            self._index -= 1  # it has no place in the trace
        else:
            self._outside.feed(record)

    def replayed(self, captured: Captured, device: int, after: int | None = None) -> int:
        """A graph was launched: its accesses, in the order of their capture, on the current stream.

        Gives the number of this launch, to be passed on as ``after`` by the next one of the same graph:
        CUDA orders a launch after the previous launches of the same executable graph.
        """
        with self.lock:
            self.begin()
            if after is not None:
                self.put(WaitEvent, self.lane(device), after, self.site, "graph")
                self.drop_event(after)
            for op in captured:
                self.put(Op, self.lane(device), op.name, op.site, op.accesses)
            return self.record_event(self.lane(device), "graph")

    def pool_used(self, pool: Hashable, device: int) -> None:
        """A graph is launched whose memory pool it shares with other graphs.

        What is free in the pool after one capture serves the next, so that launches of two such graphs
        write to the same memory. One byte stands for all of it.
        """
        with self.lock:
            self.begin()
            number = self._pools.get(pool)
            if number is None:
                number = self._pools[pool] = self._num_blocks
                self._num_blocks = number + 1
                owner = self.lane(device, DEFAULT_STREAM)
                self.put(Alloc, number, owner, 1, MemoryKind.DEVICE, self.site, False)
            access = Access(number, Region(0, 1, 1), True, (1,), "uint8")
            self.put(Op, self.lane(device), GRAPH_POOL, self.site, (access,))

    # -- accesses that are no ops --------------------------------------------------------------------

    def stream_used(self, tensor: Tensor, device: int, stream: int) -> None:
        """``tensor.record_stream(stream)``."""
        with self.lock:
            self.begin()
            block = self.block_of(tensor)
            if block is not None and block.nbytes:
                self.put(UseStream, block.index, self.lane(device, stream), self.site)

    def host_access(self, tensor: Tensor, write: bool, name: str) -> None:
        """The host reads or writes a tensor's bytes now; nothing happens unless they are pinned."""
        with self.lock:
            self.begin()
            block = self.block_of(tensor)
            if block is not None and not block.on_device:
                accesses = self._whole(block, tensor, write)
                if accesses:
                    self.put(Op, HOST, name, self.site, accesses)

    def looked_at(self, tensor: Tensor, name: str) -> None:
        """The host looks at a tensor's content without an op: printing goes around all dispatch modes."""
        with self.lock:
            self.begin()
            block = self.block_of(tensor)
            accesses = () if block is None else self._whole(block, tensor, False)
            if block is None or not accesses:
                return
            lane = self.lane(block.device) if block.on_device else HOST
            self.put(Op, lane, name, self.site, accesses)
            if block.on_device:
                self.host_wait("item", (lane,), name)

    def host_bytes(
        self, tensor: Tensor, access: tuple[Region, tuple[int, ...], str], write: bool, name: str
    ) -> None:
        """The host touches some bytes of a tensor's storage: a region of it, with a shape and a type."""
        with self.lock:
            self.begin()
            block = self.block_of(tensor)
            if block is not None and not block.on_device:
                region, shape, dtype = access
                self.put(Op, HOST, name, self.site, (Access(block.index, region, write, shape, dtype),))

    def declared(self, reads: Iterable[Tensor], writes: Iterable[Tensor], name: str = "access") -> None:
        """Accesses that no tap can see, declared by the user.

        Device memory is touched on the current stream of its device, and pinned memory too when a device
        tensor is declared with it (a kernel that reads host memory); pinned memory alone by the host.
        """
        with self.lock:
            self.begin()
            accesses: list[Access] = []
            devices: list[int] = []
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    block = self.block_of(tensor)
                    if block is not None:
                        accesses += self._whole(block, tensor, write)
                        if block.on_device and block.device not in devices:
                            devices.append(block.device)
            if accesses:
                lane = self.lane(devices[0]) if devices else HOST
                self.put(Op, lane, name, self.site, tuple(accesses))

    def _whole(self, block: Block, tensor: Tensor, write: bool) -> tuple[Access, ...]:
        region, shape, dtype = self.layouts.of(tensor)
        return () if region is None else (Access(block.index, region, write, shape, dtype),)
