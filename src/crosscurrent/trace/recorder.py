"""Lanes and storages, as records.

``Recorder`` keeps what a trace has to remember of the running program (lanes, live blocks, the current
recording of each event) and hands records to its sinks in the order in which the host issued them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from crosscurrent.trace.memory import Block, Deaths, Gone, HostCache, Layouts
from crosscurrent.trace.records import (
    HOST,
    Access,
    DropEvent,
    Free,
    HostWait,
    Lane,
    MemoryKind,
    Op,
    Record,
    Region,
    Sink,
    Through,
    TraceInfo,
    Unknown,
)
from crosscurrent.trace.sites import Sites

_new: Final[Any] = tuple.__new__
DEFAULT_STREAM: Final = 0


class Environment(Protocol):
    """What differs between a real GPU and the simulation."""

    def classify(self, tensor: Tensor) -> tuple[MemoryKind, int] | None:
        """The kind of memory and the device (-1 for pinned memory); None for pageable memory."""

    @property
    def device_of(self) -> Callable[[Tensor], int]:
        """Gives the device of a plain ``Tensor`` that is no view: negative for memory of the host."""

    def allocated_on(self, device: int, storage: torch.UntypedStorage) -> int:
        """The stream that memory of ``device`` was allocated on, where its allocation was not seen."""

    @property
    def current_stream(self) -> Callable[[int], int]:
        """Gives the stream that the calling thread's next op on a device runs on, in backward too."""

    def current_device(self) -> int:
        """The calling thread's current device."""

    def stream_name(self, device: int, stream: int) -> str:
        """What to call a stream in a report."""


class Waited(NamedTuple):
    """One kind of host wait: the call, and the lanes that it waited for."""

    kind: str
    op: str
    site: int
    lanes: tuple[int, ...]


class Misunderstood(NamedTuple):
    """Something that could not be understood."""

    op: str
    site: int
    reason: str


def as_one(sinks: Sequence[Sink | Callable[[Record], None]]) -> Sink:
    """One sink that hands records to all of them."""
    only = sinks[0] if len(sinks) == 1 else None
    if isinstance(only, Sink):
        return only
    return Through(*(sink.feed if isinstance(sink, Sink) else sink for sink in sinks))


Captured: TypeAlias = tuple[Op, ...]
"""What a graph does each time. Its streams are joined into one: the order inside is the captured one."""


class Recorder:
    """The state of one trace. All methods may be called from any thread."""

    # Quicker than the dictionary of an instance, which every op would be looking things up in.
    __slots__ = (
        "_acquire",
        "_blocks",
        "_current_stream",
        "_deaths",
        "_device_of",
        "_index",
        "_lanes",
        "_last_device",
        "_last_lane",
        "_last_stream",
        "_misunderstood",
        "_num_blocks",
        "_num_recordings",
        "_outside",
        "_recorded_at",
        "_recordings",
        "_release",
        "_sink",
        "_sinks",
        "_waited",
        "environment",
        "host_cache",
        "host_waits",
        "in_call",
        "info",
        "layouts",
        "lock",
        "muted",
        "not_understood",
        "site",
        "sites",
    )

    def __init__(
        self,
        environment: Environment,
        sinks: Sequence[Sink | Callable[[Record], None]],
        *,
        full_stack: bool = False,
    ) -> None:
        self.environment = environment
        self._current_stream = environment.current_stream
        self._device_of = environment.device_of
        self.sites = Sites(full_stack=full_stack)
        self.info = TraceInfo([Lane(HOST, "host")], self.sites.sites)
        self.layouts = Layouts()
        self.host_cache = HostCache()
        # One entry for each time, but equal ones are one object: a long program costs a pointer per wait.
        self.host_waits: list[Waited] = []
        self.not_understood: list[Misunderstood] = []
        self._waited: dict[Waited, Waited] = {}
        self._misunderstood: dict[Misunderstood, Misunderstood] = {}
        self._sinks = tuple(sinks)
        self._sink = as_one(self._sinks)
        self.lock = threading.RLock()
        """Held while anything is made of what happened; by observers, too, while they look at blocks."""
        # For each op; quicker than ``with``.
        self._acquire: Any = self.lock.acquire
        self._release: Any = self.lock.release
        self._index = 0
        self._num_blocks = 0
        self._num_recordings = 0
        self._lanes: dict[tuple[int, int], int] = {}
        self._blocks: dict[int, Block] = {}
        self._deaths = Deaths(self.sites)
        self._recordings: dict[Hashable, int] = {}
        self._recorded_at: dict[int, tuple[int, int]] = {}
        # The sink of all that is not captured, while something is.
        self._outside = self._sink
        # The stream that was asked for last, and its lane.
        self._last_device = -1
        self._last_stream = -1
        self._last_lane = HOST
        self.site = -1
        """The call site of the call that is being turned into records."""
        self.in_call = False
        """Whether records come from a call that observers are told of."""
        self.muted = False
        """Whether synchronization is an observer's own, which copies values, and no part of the program."""

    def close(self) -> None:
        """The watch is over: report the last frees, and follow nothing any more."""
        with self.lock:
            self.bury()
            self._deaths.closed = True
            self._blocks.clear()
            self._deaths.noted.clear()

    def add_sink(self, sink: Callable[[Record], None]) -> None:
        """Hand records to one more sink from now on."""
        with self.lock:
            self._sinks = (*self._sinks, sink)
            self._sink = as_one(self._sinks)

    def put(self, kind: Callable[..., Record], *fields: Any) -> int:
        """Hand out one record; returns its index."""
        index = self._index
        self._index = index + 1
        self._sink.feed(_new(kind, (index, *fields)))
        return index

    def begin(self) -> None:
        """Start on a call: what died before it comes first. All that it leads to has its call site."""
        if self._deaths.noted:
            self.bury()
        self.site = self.sites.here()

    def lane(self, device: int, stream: int | None = None) -> int:
        """The lane of a stream; of the calling thread's current stream of ``device`` by default."""
        if stream is None:
            stream = self._current_stream(device)
        if stream != self._last_stream or device != self._last_device:
            self._last_lane = self._lane(device, stream)
            self._last_device = device
            self._last_stream = stream
        return self._last_lane

    def _lane(self, device: int, stream: int) -> int:
        lane = self._lanes.get((device, stream))
        if lane is None:
            lane = self._lanes[device, stream] = len(self.info.lanes)
            self.info.lanes.append(Lane(lane, self.environment.stream_name(device, stream), device, stream))
        return lane

    def unknown(self, name: str, reason: str) -> None:
        """Something that could not be understood."""
        with self.lock:
            what = Misunderstood(name, self.sites.here(), reason)
            self.not_understood.append(self._misunderstood.setdefault(what, what))
            self.put(Unknown, *what)

    def host_wait(self, kind: str, lanes: tuple[int, ...], name: str = "") -> None:
        """The host waits for all work so far of ``lanes`` (none: it is held up, and nothing is ordered)."""
        self._note_wait(kind, name, lanes)
        index = self.put(HostWait, kind, None, lanes, self.site, name)
        for lane in lanes:
            self.host_cache.waited(lane, index)

    def _note_wait(self, kind: str, name: str, lanes: tuple[int, ...]) -> None:
        if kind != "query":
            wait = Waited(kind, name, self.site, lanes)
            self.host_waits.append(self._waited.setdefault(wait, wait))

    def drop_event(self, number: int) -> None:
        """Nobody can wait for recording ``number`` any more."""
        del self._recorded_at[number]
        self.put(DropEvent, number)

    # -- memory ----------------------------------------------------------------------------------

    def storage_of(self, number: int) -> torch.UntypedStorage | None:
        """The storage that is block ``number`` now; None if it is gone. For rare use."""
        for block in list(self._blocks.values()):
            if block.index == number:
                return block.storage()
        return None

    def block_of(self, tensor: Tensor, *, fresh: bool = False) -> Block | None:
        """The block that a tensor lives in; None for pageable memory. ``fresh``: an unseen one is new."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return None
        block = self._blocks.get(storage._cdata) or self._admit(tensor, storage, fresh)
        return None if block.memory is None and not self._reconsider(block, tensor) else block

    def _reconsider(self, block: Block, tensor: Tensor) -> bool:
        """What was pageable may have become more (the simulation learns late what some helpers are)."""
        where = self.environment.classify(tensor)
        if where is None:
            return False
        # Pinned memory that was not: registered later, and no allocation.
        fresh = where[0] is MemoryKind.DEVICE
        self._allocate(block, where[0], where[1], tensor.untyped_storage().nbytes(), fresh)
        return True

    def _made(self, out: Any) -> None:
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            self.block_of(tensor, fresh=True)

    def _admit(self, tensor: Tensor, storage: torch.UntypedStorage, fresh: bool) -> Block:
        where = self.environment.classify(tensor)
        cdata = storage._cdata
        block = Block(storage, cdata, self._deaths)
        if where is None:
            block.be(-1, None, -1, 0)
        else:
            self._allocate(block, where[0], where[1], storage.nbytes(), fresh)
        self._blocks[cdata] = block  # at last: an interrupt leaves no half of a block
        return block

    def _allocate(
        self, block: Block, memory: MemoryKind, device: int, nbytes: int, fresh: bool = True
    ) -> None:
        """Make ``block`` a new allocation. One without bytes is never heard of."""
        number = self._num_blocks
        self._num_blocks = number + 1
        block.be(number, memory, device, nbytes)
        if nbytes == 0:
            return
        if not block.on_device:
            if fresh and not self.host_cache.take(nbytes):
                self.host_wait("allocation", (), "pinned memory")
            lane = HOST
        elif fresh:
            lane = self.lane(device)
        else:
            storage = block.storage()
            assert storage is not None, "its tensor is at hand"
            # Freed, it goes back to the pool of that stream.
            lane = self.lane(device, self.environment.allocated_on(device, storage))
        index = self._index
        self._index = index + 1
        self._sink.alloc(index, number, lane, nbytes, memory, self.site, fresh)

    def bury(self) -> None:
        """Report the storages and forget the events that died since the last call."""
        dead = self._deaths.noted
        blocks = self._blocks
        while dead:
            block = dead.popleft()
            if isinstance(block, Gone):
                number = self._recordings.pop(block.event, None)
                if number is not None:
                    self.drop_event(number)
                continue
            if blocks.get(block.cdata) is block:
                del blocks[block.cdata]
            if not block.nbytes or block.private:  # pageable memory has no bytes here
                continue
            index = self._index
            self._index = index + 1
            self._sink.free(index, block.index, self.sites.at(block.place))
            if not block.on_device:
                self.host_cache.freed(block.nbytes, block.uses)

    def _free(self, block: Block, site: int) -> None:
        if block.nbytes == 0 or block.private:
            return
        self.put(Free, block.index, site)
        if not block.on_device:
            self.host_cache.freed(block.nbytes, block.uses)

    def resized(self, tensor: Tensor, name: str) -> None:
        """A tensor was resized in place; its storage may have moved to a larger block, content copied."""
        block = self.block_of(tensor)
        if block is not None:
            self._moved(block, tensor.untyped_storage().nbytes(), name)

    def released(self, storage: torch.UntypedStorage, name: str = "resize_") -> None:
        """``storage.resize_(n)`` ran: the old block is free, and a new one took over what fits."""
        with self.lock:
            self.begin()
            block = self._blocks.get(storage._cdata)
            if block is not None and block.memory is not None:
                self._moved(block, storage.nbytes(), name)

    def _moved(self, block: Block, nbytes: int, name: str) -> None:
        if nbytes == block.nbytes:
            return
        old, old_nbytes, memory = block.index, block.nbytes, block.memory
        assert memory is not None, "pageable memory is not followed"
        kept = min(old_nbytes, nbytes)
        if nbytes == 0:
            self._free(block, self.site)
            self._allocate(block, memory, block.device, 0)
            return
        self._allocate(block, memory, block.device, nbytes)
        if kept:
            region = Region(0, kept, kept)
            shape = (kept,)
            accesses = (
                Access(old, region, False, shape, "uint8"),
                Access(block.index, region, True, shape, "uint8"),
            )
            self.put(Op, self.lane(block.device) if block.on_device else HOST, name, self.site, accesses)
        if old_nbytes:
            self.put(Free, old, self.site)
