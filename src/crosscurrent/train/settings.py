"""The knobs of a training run that are not the model's, the cache's or the gradient's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import nn

from crosscurrent.bits import deterministic


@contextmanager
def reproducible(run: RunArgs, device: torch.device) -> Iterator[None]:
    """Compute in the way that the settings ask for; afterwards, PyTorch is as it was."""
    num_threads = torch.get_num_threads()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    asked = run.deterministic and device.type == "cuda"
    torch.set_num_threads(run.num_threads)
    # All memory is written before it is read; filling it first would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = filling and not asked  # type: ignore[attr-defined]
    try:
        with deterministic() if asked else nullcontext():
            yield
    finally:
        torch.set_num_threads(num_threads)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


class OptimizerName(Enum):
    """The optimizers that there are."""

    adamw = "adamw"
    sgd = "sgd"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerArgs:
    """How parameters follow their gradients."""

    name: OptimizerName = OptimizerName.adamw
    """AdamW, or plain SGD with momentum beta1."""

    learning_rate: float = 3e-3
    """The rate after the warm-up; it then stays, so that a run can always be made longer."""

    warmup_steps: int = 10
    """Steps over which the rate rises from zero in a straight line."""

    weight_decay: float = 0.01
    """Decay of the matrices; vectors, such as norm weights, are not decayed."""

    beta1: float = 0.9
    """Memory of the mean of the gradients, per step."""

    beta2: float = 0.95
    """Memory of the mean of their squares, per step."""

    max_grad_norm: float = 1.0
    """A gradient longer than this is scaled down to it."""

    def __post_init__(self) -> None:
        """Refuse what no optimizer could use, in the words of the command line."""
        if not self.learning_rate > 0:
            raise ValueError(f"optimizer.learning_rate must be above 0, got {self.learning_rate}")
        if self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps must be 0 or more, got {self.warmup_steps}")
        if not self.weight_decay >= 0:
            raise ValueError(f"optimizer.weight_decay must be 0 or more, got {self.weight_decay}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        if not self.max_grad_norm > 0:
            raise ValueError(f"optimizer.max_grad_norm must be above 0, got {self.max_grad_norm}")

    def rate(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / (self.warmup_steps + 1))

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of those parameters that are trained."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if self.name is OptimizerName.sgd:
            return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.beta1)
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=(self.beta1, self.beta2))


MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArgs:
    """How long a run is, and what one step of it sees."""

    seed: int = 0
    """Decides the initial parameters and the batches."""

    batch_size: int = 4
    """Windows of text in a step."""

    sequence_length: int = 1024
    """Tokens (bytes) in a window. May be many times the cache length."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of parameters and activations. On a GPU, bfloat16 has the fast attention kernels."""

    num_threads: int = 1
    """CPU threads of a step. More helps large models on an idle machine, and changes the last bits."""

    deterministic: bool = True
    """On a GPU, use only kernels that give the same bits each time. Without it steps may be faster, and a
    resumed run goes on from the same state, but not to the same bits."""

    def __post_init__(self) -> None:
        """Refuse what no run could be, in the words of the command line."""
        for name in ("batch_size", "sequence_length", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        # PyTorch dies of far more threads than any machine has.
        if self.num_threads > MOST_THREADS:
            raise ValueError(f"num_threads must be at most {MOST_THREADS}, got {self.num_threads}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be 0 or more, and below 2 to the 64th, got {self.seed}")
