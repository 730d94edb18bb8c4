"""The named configurations of ``crosscurrent bench``.

The three large ones stand for training on one large GPU: a window, heavy hitters with quantized KV
checkpoints, and a batch of long sequences with everything quantized. The small one takes seconds in
simulation: it is there to see that the harness works, and its times mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.checkpoints import CheckpointFormat, Shapes
from crosscurrent.gradient.plan import make_plan
from crosscurrent.kvcache.names import BufferKind, CacheConfig, PolicyKind
from crosscurrent.model.config import MLPKind, ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One model, one cache and one batch to measure."""

    name: str
    model: ModelConfig
    cache: CacheConfig
    grad: GradientArgs
    """How the lattice is cut and kept; ``with_flag`` adds how the work is issued."""
    dtype: torch.dtype
    batch_size: int
    sequence_length: int
    num_targets: int
    """The loss is that of the last tokens."""
    repeats: int
    """Measured steps of each flag, after the warm ones."""
    simulated: bool = False

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if self.model.lora is not None:
            raise ValueError("operations are counted for models whose parameters all train: set lora to None")

    def with_flag(self, flag: bool) -> GradientArgs:
        """How the gradient is computed with the flag off or on; nothing else differs.

        Both with CUDA graphs: what a step waits for should be the device, and not the host.
        """
        return replace(self.grad, async_cpu_transfer=flag, cuda_graphs=True)

    def checkpoint_format(self) -> CheckpointFormat:
        """The lattice of the sequence and the bytes of its checkpoints."""
        lengths = tuple(self.cache.length(layer) for layer in range(self.model.num_layers))
        plan = make_plan(
            self.sequence_length,
            cache_lengths=lengths,
            chunk_size=self.grad.chunk_size,
            layers_per_cell=self.grad.layers_per_cell,
            chunks_per_cell_multiplier=self.grad.chunks_per_cell_multiplier,
        )
        shapes = Shapes(
            batch_size=self.batch_size,
            embed_size=self.model.embed_size,
            num_groups=self.model.groups,
            head_size=self.model.head_dim,
            cache_lengths=lengths,
            dtype=self.dtype,
        )
        return CheckpointFormat(plan, shapes, self.cache, self.grad)

    def description(self) -> str:
        """What is measured, in one line."""
        m, g = self.model, self.grad
        return (
            f"{m.num_layers} layers, {m.num_heads} heads, {m.groups} query groups, head size {m.head_dim}, "
            f"MLP {m.mlp_kind.value} {m.hidden_size}, vocabulary {m.vocab_size}, "
            f"{str(self.dtype).removeprefix('torch.')}; batch {self.batch_size} x {self.sequence_length} "
            f"tokens, loss on the last {self.num_targets}; {self.cache.policy.value} cache of "
            f"{self.cache.cache_length}, chunks of {g.chunk_size}, {g.layers_per_cell} layer(s) a cell; "
            f"layer inputs {g.layercp_qname}, KV checkpoints {g.cachecp_qname}"
        )


def _grad(*, layers: str = "default", caches: str = "default", per_cell: int = 1, chunk: int) -> GradientArgs:
    return GradientArgs(
        layers_per_cell=per_cell,
        chunk_size=chunk,
        layercp_qname=layers,
        cachecp_qname=caches,
        layercp_pin_memory=True,
        cachecp_pin_memory=True,
    )


_LARGE = ModelConfig(
    vocab_size=32_000,
    num_layers=8,
    embed_size=2048,
    num_heads=16,
    num_groups=8,
    head_size=128,
    mlp_kind=MLPKind.GELU,
)
_QUANTIZED = BufferKind.QUANTIZED8.value

_H200_A = Configuration(
    name="h200-a",
    model=_LARGE,
    cache=CacheConfig(policy=PolicyKind.LASTREC, cache_length=4096),
    grad=_grad(chunk=512),
    dtype=torch.bfloat16,
    batch_size=1,
    sequence_length=16_384,
    num_targets=8192,
    repeats=7,
)
_H200_B = replace(
    _H200_A,
    name="h200-b",
    cache=CacheConfig(policy=PolicyKind.H2O, cache_length=4096),
    grad=_grad(chunk=512, caches=_QUANTIZED),
    sequence_length=32_768,
    num_targets=16_384,
    repeats=5,
)
_H200_C = replace(
    _H200_B,
    name="h200-c",
    grad=_grad(chunk=512, layers=_QUANTIZED, caches=_QUANTIZED, per_cell=2),
    batch_size=4,
    sequence_length=65_536,
    num_targets=32_768,
    repeats=3,
)
_CPU_SMALL = Configuration(
    name="cpu-small",
    model=ModelConfig(vocab_size=48, num_layers=3, embed_size=32, num_heads=4, num_groups=2),
    cache=CacheConfig(policy=PolicyKind.H2O, cache_length=16),
    grad=_grad(chunk=4, caches=_QUANTIZED, per_cell=2),
    dtype=torch.float32,
    batch_size=2,
    sequence_length=46,
    num_targets=23,
    repeats=3,
    simulated=True,
)

CONFIGURATIONS: Final = {each.name: each for each in (_H200_A, _H200_B, _H200_C, _CPU_SMALL)}
"""By name, as the command line knows them."""
