"""Schedules a second of one core, on a trace of 100 small ops; and what replaying the gradient costs.

    python benchmarks/schedules.py

Four streams work on slices of a few buffers and hand results to one another; with waits, and without. The
programs are recorded under simulated CUDA, so that they are what a user's program would be. The gradient is
that of a small transformer whose checkpoints travel on streams of their own; its plain step is the one that
was recorded, unwatched.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

import crosscurrent
from crosscurrent.gradient import GradientArgs, LongContextGradientModel
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.model.config import ModelConfig
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.recording import keep_values
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.strategies import PCT, Classes, Exhaustive, RandomWalk, Strategy

NUM_OPS = 100
SECONDS = 2.0
TARGET = 1000
GRADIENT_TARGET = 1.5


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
                            shared[i].copy_(data[16 * i : 16 * i + 16])
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


def gradient() -> None:
    """Print what one replay of the gradient takes, next to the step itself."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=64, num_layers=3, embed_size=64, num_heads=4, num_groups=2, mlp_size=128)
    with crosscurrent.simulate():
        gpt = Transformer(config)
        model = LongContextGradientModel(
            gpt,
            Head(config),
            cache=CacheConfig.from_name("lastrec", cache_length=64),
            grad=GradientArgs(
                chunk_size=16, async_cpu_transfer=True, layercp_pin_memory=True, cachecp_pin_memory=True
            ),
        ).to("cuda")
        ids = torch.randint(64, (2, 256), device="cuda")

        def step() -> Tensor:
            model.zero_grad()
            loss = model(ids, ids)
            loss.backward()
            return loss

        plain = min(timed(step) for _ in range(5))
        with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
            keeper.name({"loss": step()})
    replayer = Replayer(keeper.program())
    again = min(timed(lambda: replayer.run(replayer.order.program)) for _ in range(5))
    verdict = "" if again < GRADIENT_TARGET * plain else f"  above the target of {GRADIENT_TARGET}"
    print(
        f"gradient {len(replayer.order)} ops  step {1000 * plain:.0f} ms, replay {1000 * again:.0f} ms: "
        f"{again / plain:.2f} of it{verdict}"
    )


def timed(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
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
    gradient()


if __name__ == "__main__":
    main()
