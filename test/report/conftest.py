"""Traces written by hand whose call sites lie in a real file, and a browser to look at pages with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.races.advice import advise
from crosscurrent.races.detector import Detector
from crosscurrent.report.document import HostWaits, Report, Verdict
from crosscurrent.trace.records import (
    HOST,
    Access,
    Alloc,
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
    WaitEvent,
)

MAIN, FETCH, SEND = 1, 2, 3

PROGRAM = """\
import torch

fetch = torch.cuda.Stream()
slots = [torch.empty(1024, 1024, device="cuda") for _ in range(2)]


def prefetch(host, slot):
    with torch.cuda.stream(fetch):
        slot.copy_(host, non_blocking=True)
        ready = fetch.record_event()
    return ready


def step(batch, slot, ready, weight):
    torch.cuda.current_stream().wait_event(ready)
    hidden = slot @ weight
    return hidden.relu().sum().item()
"""


class Trace:
    """Writes a trace, one call a record; ``at`` sets the line of the file that the next calls come from."""

    def __init__(self, file: str, lanes: tuple[str, ...] = ("host", "main", "fetch", "send")) -> None:
        self.records: list[Record] = []
        self.info = TraceInfo(
            [
                Lane(i, name, None if i == HOST else 0, None if i == HOST else i)
                for i, name in enumerate(lanes)
            ],
            [],
        )
        self._file = file
        self._events = 0
        self.at(1, "<module>")

    def at(self, line: int, function: str) -> None:
        site = Site(self._file, line, function)
        if site not in self.info.sites:
            self.info.sites.append(site)
        self._site = self.info.sites.index(site)

    def alloc(self, block: int, lane: int, nbytes: int, *, pinned: bool = False) -> None:
        memory = MemoryKind.PINNED if pinned else MemoryKind.DEVICE
        self._add(lambda index, site: Alloc(index, block, lane, nbytes, memory, site))

    def free(self, block: int) -> None:
        self._add(lambda index, site: Free(index, block, site))

    def op(
        self,
        lane: int,
        name: str,
        *accesses: tuple[int, str],
        shape: tuple[int, ...] = (1024, 1024),
        shapes: tuple[tuple[int, ...], ...] = (),
    ) -> int:
        """Accesses are ``(block, "r" or "w")`` of a whole float32 tensor. Gives the record's index."""
        found = []
        for i, (block, how) in enumerate(accesses):
            size = shapes[i] if shapes else shape
            nbytes = 4
            for length in size:
                nbytes *= length
            found.append(Access(block, Region(0, nbytes, nbytes), how == "w", size, "torch.float32"))
        return self._add(lambda index, site: Op(index, lane, name, site, tuple(found)))

    def record(self, lane: int, via: str = "record") -> int:
        self._events += 1
        event = self._events
        self._add(lambda index, site: RecordEvent(index, lane, event, site, via))
        return event

    def wait(self, lane: int, event: int, via: str = "wait_event") -> int:
        return self._add(lambda index, site: WaitEvent(index, lane, event, site, via))

    def host_wait(self, kind: str, *lanes: int, event: int | None = None) -> int:
        return self._add(lambda index, site: HostWait(index, kind, event, lanes, site))

    def report(self, **fields: object) -> Report:
        """What ``check`` would say about the trace."""
        detector = Detector()
        for record in self.records:
            detector.feed(record)
        found = tuple(detector.findings(self.info))
        values: dict[str, object] = {
            "title": "train.py --steps 2",
            "verdict": Verdict.RACES if found else Verdict.RACE_FREE,
            "findings": found,
            "host_waits": tuple(
                HostWaits(
                    kind=wait.record.kind,
                    op=wait.record.op,
                    site=self.info.sites[wait.record.site],
                    streams=tuple(self.info.lanes[lane].name for lane in wait.lanes),
                    times=wait.times,
                )
                for wait in detector.host_waits
            ),
            "info": self.info,
            "records": tuple(self.records),
            "simulated": True,
        }
        if "advice" not in fields:
            values["advice"] = tuple(advise(self.records, self.info))
        return Report(**{**values, **fields})  # type: ignore[arg-type]

    def _add(self, make: Callable[[int, int], Record]) -> int:
        index = len(self.records)
        self.records.append(make(index, self._site))
        return index


def double_buffer(file: str, *, batches: int, waits_for_reader: bool) -> Trace:
    """A prefetcher with two slots. Without the wait it refills a slot that is still being read."""
    trace = Trace(file)
    trace.at(4, "<module>")
    slots, host, weight, hidden = (10, 11), (20, 21), 30, 31
    for block in (*slots, weight, hidden):
        trace.alloc(block, MAIN, 1 << 22)
    for block in host:
        trace.alloc(block, HOST, 1 << 22, pinned=True)
    consumed: dict[int, int] = {}
    for batch in range(batches):
        slot = batch % 2
        trace.at(9, "prefetch")
        if waits_for_reader and slot in consumed:
            trace.wait(FETCH, consumed[slot])
        trace.op(FETCH, "aten.copy_.default", (host[slot], "r"), (slots[slot], "w"))
        trace.at(10, "prefetch")
        ready = trace.record(FETCH)
        trace.at(15, "step")
        trace.wait(MAIN, ready)
        trace.at(16, "step")
        trace.op(MAIN, "aten.mm.default", (slots[slot], "r"), (weight, "r"), (hidden, "w"))
        consumed[slot] = trace.record(MAIN)
        trace.at(17, "step")
        trace.op(MAIN, "aten.relu.default", (hidden, "r"), (hidden, "w"))
        if batch % 4 == 3:  # the host reads the loss now and then, which orders all that it issues later
            trace.host_wait("item", MAIN)
    return trace


def _load(name: str) -> Any:
    """A module of this folder. Tests are imported by path, so the folder is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real headless Chromium; for tests marked ``chromium``."""
    module = _load("browser_over_pipe")
    program = module.find()
    assert program is not None, "a test that uses the browser has to be marked chromium"
    with module.Browser(program) as browser:
        yield browser


@pytest.fixture(scope="session")
def import_trace() -> Callable[[dict[str, Any]], Any]:
    """Imports the document of a Chrome trace as Perfetto does, and says what it drops."""
    importer: Callable[[dict[str, Any]], Any] = _load("trace_importer").import_trace
    return importer


@pytest.fixture(scope="session")
def long_report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Races somewhere in a trace of 100,000 operations."""
    file = tmp_path_factory.mktemp("long") / "train.py"
    file.write_text(PROGRAM)
    return double_buffer(str(file), batches=33_500, waits_for_reader=False).report(advice=None)


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The file that the call sites of the traces lie in."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return str(file)


@pytest.fixture
def new_trace(program: str) -> Callable[[], Trace]:
    return lambda: Trace(program)


@pytest.fixture
def racy(program: str) -> Trace:
    return double_buffer(program, batches=4, waits_for_reader=False)


@pytest.fixture
def ordered(program: str) -> Trace:
    return double_buffer(program, batches=4, waits_for_reader=True)
