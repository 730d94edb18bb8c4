"""How many schedules a second one core runs, on a trace of 100 small ops.

    python benchmarks/schedules.py

Four streams work on slices of a few buffers, hand results to one another, and copy to pinned memory. The
program is recorded under simulated CUDA, so that it is what a user's program would be.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from itertools import islice  # noqa: E402

import torch  # noqa: E402

import crosscurrent  # noqa: E402
from crosscurrent.schedules.program import Program  # noqa: E402
from crosscurrent.schedules.recording import keep_values  # noqa: E402
from crosscurrent.schedules.replay import Replayer  # noqa: E402
from crosscurrent.schedules.strategies import PCT, Classes, Exhaustive, RandomWalk, Strategy  # noqa: E402

NUM_OPS = 100
SECONDS = 2.0
TARGET = 1000


def record(*, racy: bool = False) -> Program:
    """A program of ``NUM_OPS`` ops on four streams; ``racy`` leaves out the waits."""
    with crosscurrent.simulate():
        streams = [torch.cuda.Stream() for _ in range(4)]
        data = torch.arange(64.0, device="cuda")
        shared = torch.zeros(4, 16, device="cuda")
        torch.cuda.synchronize()
        with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
            for step in range(NUM_OPS // 4):
                for i, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        if step % 5 == 4:
                            if not racy:
                                stream.wait_stream(streams[i - 1])
                            shared[i].add_(shared[i - 1])
                        elif step % 5 == 3:
                            shared[i] = data[16 * i : 16 * i + 16] * 0.5
                        else:
                            shared[i].mul_(1.01)
                        if not racy and step % 5 == 4:
                            streams[i - 1].wait_stream(stream)
            torch.cuda.synchronize()
            keeper.name({"shared": shared})
        return keeper.program()


def rate(replayer: Replayer, strategy: Strategy) -> tuple[float, float]:
    """Schedules a second, and the share of the time that went into choosing them."""
    proposals = strategy.proposals(replayer.space)
    count = 0
    choosing = 0.0
    start = time.perf_counter()
    while (now := time.perf_counter()) - start < SECONDS:
        some = list(islice(proposals, 50))
        choosing += time.perf_counter() - now
        if not some:
            break
        for proposal in some:
            replayer.run(proposal.linear)
        count += len(some)
    spent = time.perf_counter() - start
    return count / spent, choosing / spent


def main() -> None:
    torch.set_num_threads(1)
    strategies: Sequence[tuple[str, Strategy]] = (
        ("random", RandomWalk(count=10**6)),
        ("PCT, depth 3", PCT(count=10**6)),
        ("exhaustive", Exhaustive()),
        ("exhaustive, one per class", Classes()),
    )
    for kind in ("ordered", "racy"):
        replayer = Replayer(record(racy=kind == "racy"))
        for name, strategy in strategies:
            if kind == "ordered" and isinstance(strategy, Classes):
                continue  # there is one class
            per_second, choosing = rate(replayer, strategy)
            verdict = "" if per_second >= TARGET else f"  below the target of {TARGET}"
            print(
                f"{kind:8} {len(replayer.order)} ops  {name:26} {per_second:7.0f} schedules/s "
                f"({choosing:.0%} choosing){verdict}"
            )


if __name__ == "__main__":
    main()
