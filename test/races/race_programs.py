"""Programs over lanes, events and blocks, written as lists of steps.

    races([write(FETCH, SLOT), edge(FETCH, MAIN), read(MAIN, SLOT)])

Every step is a call site of its own (its line is its position in the list), unless ``at`` gives it
another. Blocks that no ``alloc`` announces are older than the program. Events go by name and can be
recorded again: a wait binds to the recording that is current.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from crosscurrent.races.causes import Cause
from crosscurrent.races.detector import Detector
from crosscurrent.races.findings import Finding
from crosscurrent.trace.records import (
    HOST,
    NO_EVENT,
    Access,
    Alloc,
    DropEvent,
    Free,
    HostWait,
    Lane,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    Region,
    Site,
    TraceInfo,
    UseStream,
    WaitEvent,
)

MAIN, FETCH, STORE, EXTRA = 1, 2, 3, 4
NAMES = {HOST: "host", MAIN: "main", FETCH: "host_to_device", STORE: "device_to_host", EXTRA: "extra"}

SLOT, OTHER, PINNED = "slot", "other", "pinned"
NBYTES = 64
"""The size of a block that does not say its own."""

WHOLE = Region(0, NBYTES, NBYTES)


@dataclass
class Build:
    """The records so far, and what names stand for."""

    records: list[Record] = field(default_factory=list)
    blocks: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    num_blocks: int = 0
    num_events: int = 0
    site: int = 0

    @property
    def index(self) -> int:
        return len(self.records)

    def block(self, name: str, owner: int = MAIN) -> int:
        if name not in self.blocks:
            memory = MemoryKind.PINNED if name.startswith("pinned") else MemoryKind.DEVICE
            self.new_block(name, owner, NBYTES, memory, fresh=False)
        return self.blocks[name]

    def new_block(self, name: str, lane: int, nbytes: int, memory: MemoryKind, fresh: bool = True) -> None:
        self.blocks[name] = self.num_blocks
        self.records.append(Alloc(self.index, self.num_blocks, lane, nbytes, memory, self.site, fresh))
        self.num_blocks += 1

    def record(self, lane: int, name: str, via: str = "record") -> None:
        before = self.events.get(name)
        if before is not None:
            self.records.append(DropEvent(self.index, before))
        self.events[name] = self.num_events
        self.records.append(RecordEvent(self.index, lane, self.num_events, self.site, via))
        self.num_events += 1

    def wait(self, lane: int, name: str, via: str = "wait_event") -> None:
        event = self.events.get(name, NO_EVENT)
        self.records.append(WaitEvent(self.index, lane, event, self.site, via))


@dataclass(frozen=True)
class Step:
    """One step of a program: what it adds, and the call site that it claims to come from."""

    add: Callable[[Build], None]
    label: str
    line: int | None = None

    def __repr__(self) -> str:
        return self.label


def step(label: str) -> Callable[[Callable[[Build], None]], Step]:
    return lambda add: Step(add, label)


def at(line: int, inner: Step) -> Step:
    """The same step, written in another line."""
    return replace(inner, line=line)


def op(
    lane: int, *, reads: Iterable = (), writes: Iterable = (), name: str = "op", kept: bool = False
) -> Step:
    """An op; each access is a block's name, or a name with a region or a (start, stop) pair."""
    reads, writes = list(reads), list(writes)

    @step(f"op({lane}, reads={reads}, writes={writes}, kept={kept})")
    def add(build: Build) -> None:
        accesses = []
        for targets, is_write in ((reads, False), (writes, True)):
            for target in targets:
                block, region = (target, WHOLE) if isinstance(target, str) else target
                if not isinstance(region, Region):
                    start, stop = region
                    region = Region(start, stop, stop - start)
                number = build.block(block)
                # The caching allocator of pinned memory watches copies; that of device memory does not.
                held = kept and block.startswith("pinned")
                accesses.append(Access(number, region, is_write, (region.stop,), "uint8", held))
        build.records.append(Op(build.index, lane, name, build.site, tuple(accesses)))

    return add


def write(lane: int, block: str, region: Region | tuple[int, int] = WHOLE, **kwargs) -> Step:
    return op(lane, writes=[(block, region)], **kwargs)


def read(lane: int, block: str, region: Region | tuple[int, int] = WHOLE, **kwargs) -> Step:
    return op(lane, reads=[(block, region)], **kwargs)


def copy(lane: int, target: str, source: str, **kwargs) -> Step:
    return op(lane, reads=[source], writes=[target], name="copy_", **kwargs)


def update(lane: int, block: str, region: Region | tuple[int, int] = WHOLE, **kwargs) -> Step:
    return op(lane, reads=[(block, region)], writes=[(block, region)], **kwargs)


def record(lane: int, event: str = "event") -> Step:
    return Step(lambda build: build.record(lane, event), f"record({lane}, {event!r})")


def wait(lane: int, event: str = "event") -> Step:
    return Step(lambda build: build.wait(lane, event), f"wait({lane}, {event!r})")


def edge(first: int, second: int) -> Step:
    """``second.wait_stream(first)``: a recording and a wait."""

    @step(f"edge({first}, {second})")
    def add(build: Build) -> None:
        if first == second:
            return
        build.record(first, "wait_stream", "wait_stream")
        build.wait(second, "wait_stream", "wait_stream")

    return add


def sync(event: str = "event", kind: str = "event") -> Step:
    """``event.synchronize()``, or a ``query()`` that returned True."""

    @step(f"sync({event!r}, {kind!r})")
    def add(build: Build) -> None:
        if event in build.events:
            build.records.append(HostWait(build.index, kind, build.events[event], (), build.site))

    return add


def sync_lanes(*lanes: int, kind: str = "synchronize") -> Step:
    """The host waits for all work of some lanes."""
    return Step(
        lambda build: build.records.append(HostWait(build.index, kind, None, lanes, build.site)),
        f"sync_lanes{lanes}",
    )


def alloc(lane: int, block: str, nbytes: int = NBYTES) -> Step:
    memory = MemoryKind.PINNED if block.startswith("pinned") else MemoryKind.DEVICE
    return Step(
        lambda build: build.new_block(block, lane, nbytes, memory), f"alloc({lane}, {block!r}, {nbytes})"
    )


def free(block: str) -> Step:
    @step(f"free({block!r})")
    def add(build: Build) -> None:
        number = build.block(block)
        build.records.append(Free(build.index, number, build.site))
        del build.blocks[block]

    return add


def use_stream(block: str, lane: int) -> Step:
    """``tensor.record_stream(lane)``."""
    return Step(
        lambda build: build.records.append(UseStream(build.index, build.block(block), lane, build.site)),
        f"use_stream({block!r}, {lane})",
    )


def records_of(steps: Sequence[Step]) -> list[Record]:
    build = Build()
    for position, each in enumerate(steps):
        build.site = position if each.line is None else each.line
        each.add(build)
    return build.records


def info_for(steps: Sequence[Step]) -> TraceInfo:
    lines = range(max([len(steps), *(each.line + 1 for each in steps if each.line is not None)]))
    return TraceInfo(
        [Lane(number, name) for number, name in NAMES.items()],
        [Site("/program/train.py", line, "step") for line in lines],
    )


def detect(steps: Sequence[Step]) -> Detector:
    detector = Detector()
    for each in records_of(steps):
        detector.feed(each)
    return detector


def races(steps: Sequence[Step]) -> list[Finding]:
    """The findings of a program."""
    return detect(steps).findings(info_for(steps))


def causes(steps: Sequence[Step]) -> list[Cause]:
    return detect(steps).causes


def lines(finding: Finding) -> tuple[str, int, int]:
    """The kind of a finding and the positions of its two steps."""
    return finding.kind.value, finding.first.site.line, finding.second.site.line
