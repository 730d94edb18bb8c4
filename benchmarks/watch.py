"""What watching costs: microseconds per op, and how time and memory grow with the length of a trace.

    python benchmarks/watch.py [--ops 1000000] [--only-step NAME]

On a machine without a GPU the step runs on simulated CUDA, and "eager" is the same step on the CPU. There
the aim is less than 20 microseconds per op over eager. "watch, as on a GPU" is what a watch does for each op
on a GPU, done for the tensors of a CPU, which tells how much of it is the simulation's. On a GPU "eager" is
the step on the device, PyTorch's own sanitizer is measured too, and the aim is a watched step below 3 times
the eager one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import crosscurrent
from crosscurrent.races.detector import Detector
from crosscurrent.trace.cuda import CudaDispatch, CudaEnvironment, CudaSource
from crosscurrent.trace.records import MemoryKind
from crosscurrent.trace.tracer import Tracer

GPU = torch.cuda.is_available()
# Without a GPU all work is done by this one thread, and its own time does not count who else is running.
now = time.perf_counter if GPU else time.process_time


Step = Callable[[], None]

ROUNDS = 5
"""How often the ways of running a step take turns."""


class EmptyMode(TorchDispatchMode):
    """The least that a dispatch mode costs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class AllOnDevice(CudaEnvironment):
    """Takes the tensors of the CPU for those of one device with one stream."""

    def __init__(self) -> None:
        super().__init__()
        # Both without a frame of Python's, as on a GPU: device 1 is where ``is_cpu`` is true.
        self.current_stream = {1: 0}.__getitem__
        self.device_of = attrgetter("is_cpu")

    def classify(self, tensor: Tensor) -> tuple[MemoryKind, int]:
        return MemoryKind.DEVICE, 1

    def allocated_on(self, device: int, storage: torch.UntypedStorage) -> int:
        return 0


def as_on_a_gpu() -> CudaDispatch:
    """The dispatch mode of a watch on a GPU, for the tensors of a CPU."""
    source = CudaSource()
    source.environment = AllOnDevice()
    source.tap.tracer = Tracer(source.environment, [Detector()])
    return CudaDispatch(source)


def small(device: str) -> Step:
    """About 120 small ops, of the kinds that models are made of."""

    @torch.no_grad()
    def step() -> None:
        x = torch.ones(8, 8, device=device)
        weight = torch.ones(8, 8, device=device)
        for _ in range(10):
            y = (x @ weight) + x
            y.mul_(0.5)
            z = torch.relu(y).view(64).view(8, 8)
            z = z * z.sum(dim=1)
            z.add_(1.0)
            x = x + torch.tanh(z)
            x.mul_(0.1)

    return step


def layer(device: str) -> Step:
    """Forward, backward and optimizer step of a small transformer layer."""
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(2, 8, 16, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gradient(device: str) -> Step:
    """The long-context gradient, with transfers on streams of their own where there is a device."""
    from crosscurrent.gradient import GradientArgs, LongContextGradientModel
    from crosscurrent.kvcache.names import CacheConfig
    from crosscurrent.model.config import ModelConfig
    from crosscurrent.model.transformer import Head, Transformer

    config = ModelConfig(vocab_size=32, num_layers=4, embed_size=16, num_heads=4, num_groups=2, mlp_size=32)
    on_device = device != "cpu"
    grad = GradientArgs(
        chunk_size=4,
        layercp_pin_memory=on_device,
        cachecp_pin_memory=on_device,
        async_cpu_transfer=on_device,
    )
    cache = CacheConfig.from_name("lastrec", cache_length=16)
    model = LongContextGradientModel(Transformer(config), Head(config), cache=cache, grad=grad).to(device)
    ids = torch.zeros(1, 64, dtype=torch.long, device=device)

    def step() -> None:
        model(ids, ids).backward()
        model.zero_grad()

    return step


STEPS: dict[str, tuple[Callable[[str], Step], int]] = {
    "small step": (small, 100),
    "transformer layer with its optimizer": (layer, 60),
    "long-context gradient": (gradient, 10),
}
"""The steps, and how often each is run."""


def count_ops(step: Step) -> int:
    """The number of ops that a dispatch mode sees in a step."""

    class Counter(EmptyMode):
        num = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counter.num += 1
            return func(*args, **(kwargs or {}))

    with Counter():
        step()
    return Counter.num


def microseconds(step: Step, repeats: int) -> float:
    """The best time per op of some runs: the others only measure who else uses the machine."""
    step()
    num_ops = count_ops(step)
    best = float("inf")
    for _ in range(repeats):
        if GPU:
            torch.cuda.synchronize()
        start = now()
        step()
        if GPU:
            torch.cuda.synchronize()
        best = min(best, now() - start)
    return best / num_ops * 1e6


def alternately(step: Step, repeats: int, ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The best time per op in each way of running it. They take turns, so that all meet the same company."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            with way():
                best[name] = min(best[name], microseconds(step, repeats // ROUNDS))
    return best


def per_op(name: str) -> None:
    """Print the costs of one step.

    On a GPU, "eager, traced" and "empty mode, traced" are what is left of both once a watch was there:
    PyTorch's GPU trace, which a watch switches on, cannot be switched off again, and calls Python at each
    allocation and each free.
    """
    build, repeats = STEPS[name]
    torch.manual_seed(0)
    step = build("cuda" if GPU else "cpu")
    step()
    num_ops = count_ops(step)
    ways: dict[str, Callable[[], Any]] = {"eager": contextlib.nullcontext, "empty dispatch mode": EmptyMode}
    if GPU:
        times = alternately(step, repeats, ways)
        traced: dict[str, Callable[[], Any]] = {
            "watch": clean_watch,
            "eager, traced": contextlib.nullcontext,
            "empty mode, traced": EmptyMode,
        }
        times |= alternately(step, repeats, traced)
        times["PyTorch's sanitizer"] = sanitized(step, repeats)
    else:
        times = alternately(step, repeats, ways | {"watch, as on a GPU": as_on_a_gpu})
        with crosscurrent.simulate():
            step = build("cuda")
            simulated = {"simulate": contextlib.nullcontext, "simulate and watch": clean_watch}
            times |= alternately(step, repeats, simulated)
            num_ops = count_ops(step)
            del step
    print(f"{name}: {num_ops} ops")
    eager = times["eager"]
    for label, value in times.items():
        print(
            f"  {label:22} {value:7.2f} us/op  {value - eager:+7.2f} over eager  {value / eager:5.1f} times"
        )


@contextlib.contextmanager
def clean_watch() -> Iterator[None]:
    """A watch that finds nothing."""
    with crosscurrent.watch() as watch:
        yield
    assert not watch.findings, watch.report()


def sanitized(step: Step, repeats: int) -> float:
    """The step under PyTorch's CUDA sanitizer; its callbacks stay afterwards, so it comes last."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
    try:
        return microseconds(step, repeats)
    finally:
        _sanitizer.cuda_sanitizer.disable()  # type: ignore[no-untyped-call]


def growth(num_ops: int) -> None:
    """Run so many ops under one watch, and print the time per op and the peak memory of this process."""
    with contextlib.nullcontext() if GPU else crosscurrent.simulate(), crosscurrent.watch() as watch:
        side = torch.cuda.Stream()
        kept: list[Tensor] = [torch.zeros(64, device="cuda") for _ in range(8)]
        host = torch.zeros(64, pin_memory=True)
        done = 0
        start = now()
        while done < num_ops:
            for i in range(8):
                kept[i] = kept[i] * 2 + 1
                kept[i].add_(kept[i - 1])
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host.copy_(kept[0], non_blocking=True)
            side.record_event().synchronize()
            done += 8 * 3 + 1
        took = now() - start
        assert not watch.findings, watch.report()
    gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  {num_ops:>9,} ops  {took / done * 1e6:7.2f} us/op  {peak:7.0f} MiB at most")


def main() -> None:
    """Print all of it, each part in a process of its own, for its own peak of memory and untraced ops."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", type=int, default=1_000_000, help="longest trace of the growth test")
    parser.add_argument("--only-growth", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only-step", choices=STEPS, help="measure nothing but this step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only_growth:
        growth(options.only_growth)
        return
    if options.only_step:
        per_op(options.only_step)
        return
    print("growth:", flush=True)
    length = 1000
    while length <= options.ops:
        subprocess.run([sys.executable, __file__, "--only-growth", str(length)], check=True)
        length *= 10
    for name in STEPS:
        subprocess.run([sys.executable, __file__, "--only-step", name], check=True)


if __name__ == "__main__":
    main()
