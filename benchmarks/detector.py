"""How long the detector takes for an op, and what it keeps, as the trace grows.

    python benchmarks/detector.py [--max-ops 1000000]

The trace is a training loop without host waits: an op on ``main`` reads two tensors and writes a
new one, the oldest is freed, and each 10th result is stored on another stream with an event, a
wait and ``record_stream``. ``ops`` alone is an op with three accesses to live blocks and nothing else.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Iterator
from itertools import islice

from crosscurrent.races.advice import advise
from crosscurrent.races.detector import Detector
from crosscurrent.trace.records import (
    HOST,
    Access,
    Alloc,
    DropEvent,
    Free,
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

MAIN, STORE = 1, 2
NBYTES = 4096
WHOLE = Region(0, NBYTES, NBYTES)
LINES = 100
INFO = TraceInfo(
    [Lane(HOST, "host"), Lane(MAIN, "main"), Lane(STORE, "device_to_host")],
    [Site("train.py", line, "step") for line in range(LINES)],
)


def training(num_ops: int) -> Iterator[Record]:
    """About ``num_ops`` ops, with their allocations, frees and events."""
    index = 0
    for block in range(3):
        yield Alloc(index, block, MAIN, NBYTES, MemoryKind.DEVICE, 0)
        index += 1
    for step in range(num_ops):
        line, oldest, new = step % LINES, step, step + 3
        yield Alloc(index, new, MAIN, NBYTES, MemoryKind.DEVICE, line)
        reads = Access(oldest, WHOLE, False), Access(oldest + 1, WHOLE, False)
        yield Op(index + 1, MAIN, "add", line, (*reads, Access(new, WHOLE, True)))
        index += 2
        if step % 10 == 9:
            yield RecordEvent(index, MAIN, step, line, "record")
            yield WaitEvent(index + 1, STORE, step, line, "wait_event")
            yield DropEvent(index + 2, step)
            yield Op(index + 3, STORE, "copy_", line, (Access(oldest, WHOLE, False),))
            yield UseStream(index + 4, oldest, STORE, line)
            index += 5
        yield Free(index, oldest, line)
        index += 1


def loop_time(num_ops: int) -> tuple[float, int]:
    """Microseconds for an op with all that belongs to it, and the entries kept at the end."""
    records = training(num_ops)
    detector = Detector()
    spent = 0.0
    while chunk := list(islice(records, 20_000)):
        # Making the records is no work of the detector.
        begin = time.process_time()
        for record in chunk:
            detector.feed(record)
        spent += time.process_time() - begin
    if detector.causes:
        raise RuntimeError(f"the loop has no race, but {len(detector.causes)} were found")
    return spent / num_ops * 1e6, detector.num_retained


def kibibytes(num_ops: int) -> float:
    """What a detector holds at the end of a run, in KiB of Python objects."""
    tracemalloc.start()
    detector = Detector()
    for record in training(num_ops):
        detector.feed(record)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / 2**10


def op_time(num_ops: int = 100_000) -> float:
    """Microseconds for an op with three accesses to live blocks."""
    detector = Detector()
    for record in training(2):
        detector.feed(record)
    accesses = (Access(2, WHOLE, False), Access(3, WHOLE, False), Access(4, WHOLE, True))
    ops = [Op(step, MAIN, "add", step % LINES, accesses) for step in range(num_ops)]
    begin = time.process_time()
    for op in ops:
        detector.feed(op)
    return (time.process_time() - begin) / num_ops * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-ops", type=int, default=1_000_000)
    max_ops = parser.parse_args().max_ops
    print(f"one op, three accesses: {op_time():.2f} us")
    print(f"{'ops':>9} {'us per op':>10} {'entries':>8} {'KiB':>6}")
    num_ops = 1000
    while num_ops <= max_ops:
        microseconds, kept = loop_time(num_ops)
        print(f"{num_ops:>9,} {microseconds:>10.2f} {kept:>8,} {kibibytes(num_ops):>6.1f}")
        num_ops *= 10
    records = list(training(6000))
    begin = time.process_time()
    advice = advise(records, INFO)
    print(
        f"advice on {len(records):,} records with {sum(each.count for each in advice):,} waits at "
        f"{len(advice)} call sites: {time.process_time() - begin:.2f} s"
    )


if __name__ == "__main__":
    main()
