"""Peak device memory of the long-context gradient, for sequences of 4, 8, 16 and 32 times the cache.

    python benchmarks/memory.py                # on the GPU, or simulated where there is none
    python benchmarks/memory.py --json out.json --policy h2o

It should not grow with the sequence, token ids aside. Plain autograd through the same bounded caches, which
keeps every version of them, is measured next to it. Exits with 1 if the peaks are not flat to within 5
percent.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from crosscurrent.gradient import GradientArgs, LongContextGradientModel
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.model.config import ModelConfig
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.suite.reference import ReferenceCache, reference_loss
from crosscurrent.trace.simulate import simulate

MULTIPLES = (4, 8, 16, 32)
FLAT = 0.05
VOCABULARY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One sequence length, in bytes above what the model itself takes; token ids aside."""

    multiple: int
    sequence_length: int
    long_context: int
    plain_autograd: int | None
    checkpoints_in_cpu_memory: int


def peak_of(step: Callable[[], Tensor], device: torch.device) -> int:
    """Peak bytes that a forward and a backward pass allocate."""
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step().backward()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class Subject:
    """A model, and both ways to its gradient."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        config = ModelConfig.named(options.size, vocab_size=VOCABULARY)
        cache = CacheConfig.from_name(options.policy, cache_length=options.cache_length)
        with device:
            self.gpt, self.head = Transformer(config), Head(config)
        grad = GradientArgs(
            chunk_size=options.chunk_size,
            layers_per_cell=options.layers_per_cell,
            layercp_qname=options.quantizer,
            cachecp_qname=options.quantizer,
            layercp_pin_memory=True,
            cachecp_pin_memory=True,
            async_cpu_transfer=True,
        )
        self.model = LongContextGradientModel(self.gpt, self.head, cache=cache, grad=grad)
        self.chunk_size = options.chunk_size
        self.reference = ReferenceCache(
            policy=cache.policy.value, lengths=(options.cache_length,) * config.num_layers
        )

    def plain_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss for plain autograd, through caches out of place."""
        return reference_loss(
            self.gpt, self.head, inputs, targets, cache=self.reference, chunk_size=self.chunk_size
        )


def measure(options: argparse.Namespace, device: torch.device) -> list[Measured]:
    """The peaks for all multiples."""
    subject = Subject(options, device)
    found = []
    for multiple in MULTIPLES:
        length = multiple * options.cache_length
        ids = torch.randint(VOCABULARY, (options.batch_size, length + 1)).to(device)
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        # The first step makes what stays: gradients, angles, workspaces.
        subject.model(inputs, targets).backward()
        peak = peak_of(partial(subject.model, inputs, targets), device)
        plain = None
        if multiple <= options.plain_up_to:
            plain = peak_of(partial(subject.plain_loss, inputs, targets), device)
        budget = subject.model.pinned_budget(batch_size=options.batch_size, sequence_length=length)
        found.append(
            Measured(
                multiple=multiple,
                sequence_length=length,
                # Ids and targets, as the model holds them in the pass: int64.
                long_context=peak - 2 * inputs.numel() * 8,
                plain_autograd=plain,
                checkpoints_in_cpu_memory=budget.total,
            )
        )
        subject.model.zero_grad()
    return found


def show(found: Sequence[Measured], spread: float, machine: str) -> None:
    """Print the table."""
    print(f"peak device memory above the model, {machine}")
    print(f"{'sequence':>10} {'x cache':>8} {'long context':>16} {'plain autograd':>16} {'CPU memory':>16}")
    for each in found:
        plain = "-" if each.plain_autograd is None else f"{each.plain_autograd:,}"
        print(
            f"{each.sequence_length:>10} {each.multiple:>8} {each.long_context:>16,} {plain:>16} "
            f"{each.checkpoints_in_cpu_memory:>16,}"
        )
    print(f"spread {spread:.1%}: {'flat' if spread <= FLAT else 'NOT flat'} to within {FLAT:.0%}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and say whether the peaks are flat."""
    parser = argparse.ArgumentParser(description="peak device memory by sequence length")
    parser.add_argument("--size", default="tiny", help="a named model size")
    parser.add_argument("--policy", default="lastrec", help="lastrec, h2o, h2o-torch-quantized8, ...")
    parser.add_argument("--quantizer", default="default", help="of both kinds of checkpoints")
    parser.add_argument("--cache-length", type=int, default=64)
    parser.add_argument("--chunk-size", type=int, default=16)
    parser.add_argument("--layers-per-cell", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument(
        "--plain-up-to", type=int, default=MULTIPLES[-1], help="longest multiple to try plain autograd with"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    real = torch.cuda.is_available()
    with nullcontext() if real else simulate():
        found = measure(options, torch.device("cuda"))
    peaks = [each.long_context for each in found]
    spread = max(peaks) / min(peaks) - 1
    show(found, spread, torch.cuda.get_device_name() if real else "simulated")
    if options.json:
        result = {"real_gpu": real, "spread": spread, "measured": [asdict(each) for each in found]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if spread <= FLAT else 1


if __name__ == "__main__":
    sys.exit(main())
