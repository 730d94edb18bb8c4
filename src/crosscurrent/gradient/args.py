"""The knobs of the long-context gradient, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from crosscurrent.checks import flag, whole_number
from crosscurrent.kvcache.names import BufferKind


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientArgs:
    """How a gradient over a long sequence is cut, checkpointed and moved."""

    layers_per_cell: int = 1
    """Layers whose activations are on the device at once. More means fewer layer-input checkpoints in CPU
    memory, and more device memory."""

    chunk_size: int = 512
    """Tokens that enter the caches in one step, after the first chunk, which is as long as the cache."""

    chunks_per_cell_multiplier: float = 1.0
    """A column's tokens, in units of the (shortest) cache length. More means larger products and fewer KV
    checkpoints, and more device memory."""

    layercp_qname: str = "default"
    """How layer-input checkpoints are quantized; `default` keeps every bit."""

    cachecp_qname: str = "default"
    """How KV checkpoints are quantized; `default` keeps every bit."""

    layercp_pin_memory: bool = False
    """Keep layer-input checkpoints, head gradients and replay logs in pinned CPU memory. Means nothing for
    a model in CPU memory."""

    cachecp_pin_memory: bool = False
    """Keep KV checkpoints in pinned CPU memory. Means nothing for a model in CPU memory."""

    async_cpu_transfer: bool = False
    """Move checkpoints on streams of their own while the device computes. Needs both kinds of pinned memory
    and a CUDA device. It changes when bytes move, never what is computed."""

    cuda_graphs: bool = False
    """Issue the work of a row's layers as CUDA graphs, each captured when it comes for the second time: one
    launch in place of a hundred, where the host is what a step waits for. Takes device memory that stays
    from step to step. It changes how work is issued, never what is computed. Hooks of the layers' modules run
    only while work is issued or captured, and under `torch.autograd.detect_anomaly` all of it is issued."""

    nan_guard: bool = False
    """Raise FloatingPointError when a parameter or a gradient holds NaN or infinity. The host then waits for
    the device once per forward and once per backward pass. Parameters in CPU memory are looked at anyway."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, in the words of the command line."""
        for name in ("layers_per_cell", "chunk_size"):
            whole_number(f"grad.{name}", getattr(self, name), least=1)
        for each in fields(self):
            if isinstance(each.default, bool):
                flag(f"grad.{each.name}", getattr(self, each.name))
        multiplier = self.chunks_per_cell_multiplier
        expected = "grad.chunks_per_cell_multiplier must be a finite number above 0"
        if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
            raise TypeError(f"{expected}, got {multiplier!r} ({type(multiplier).__name__})")
        # Neither comparison is true of NaN.
        if not 0 < multiplier < math.inf:
            raise ValueError(f"{expected}, got {multiplier}")
        known = [kind.value for kind in BufferKind]
        for name in ("layercp_qname", "cachecp_qname"):
            if getattr(self, name) not in known:
                raise ValueError(f"grad.{name} is {getattr(self, name)!r}; choose one of {', '.join(known)}")
        if self.async_cpu_transfer:
            self._check_asynchronous()
        if self.cuda_graphs:
            self._check_cuda("cuda_graphs")

    @property
    def layercp_kind(self) -> BufferKind:
        """How layer-input checkpoints are stored."""
        return BufferKind(self.layercp_qname)

    @property
    def cachecp_kind(self) -> BufferKind:
        """How KV checkpoints are stored."""
        return BufferKind(self.cachecp_qname)

    def _check_cuda(self, name: str) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                f"grad.{name} needs a CUDA device, real or simulated, and "
                f"torch.cuda.is_available() is False; set grad.{name} to False"
            )

    def _check_asynchronous(self) -> None:
        pageable = [
            f"grad.{name}" for name in ("layercp_pin_memory", "cachecp_pin_memory") if not getattr(self, name)
        ]
        if pageable:
            raise ValueError(
                "grad.async_cpu_transfer needs pinned CPU memory, since a copy from or to pageable memory "
                f"makes the host wait; set {' and '.join(pageable)} to True, "
                "or grad.async_cpu_transfer to False"
            )
        self._check_cuda("async_cpu_transfer")
