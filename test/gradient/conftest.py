"""A small model under the gradient, and batches for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscurrent.gradient import GradientArgs, LongContextGradientModel
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.model.config import ModelConfig
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.trace.simulate import simulate

VOCABULARY = 13


def build(
    *,
    cache: str = "lastrec",
    cache_length: int | tuple[int, ...] = 8,
    grace_period: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    grad: dict[str, Any] | None = None,
    **config: Any,
) -> LongContextGradientModel:
    """A model of three layers with caches of eight slots, chunks of two."""
    torch.manual_seed(seed)
    sizes = {"num_layers": 3, "embed_size": 8, "num_heads": 4, "num_groups": 2, "mlp_size": 12} | config
    model_config = ModelConfig(vocab_size=VOCABULARY, **sizes)
    gpt = Transformer(model_config)
    head = Head(model_config, gpt) if model_config.tie_embeddings else Head(model_config)
    for parameter in dict.fromkeys([*gpt.parameters(), *head.parameters()]):
        torch.nn.init.normal_(parameter, std=0.4)
    return LongContextGradientModel(
        gpt.to(dtype),
        head.to(dtype),
        cache=CacheConfig.from_name(cache, cache_length=cache_length, grace_period=grace_period),
        grad=GradientArgs(**({"chunk_size": 2} | (grad or {}))),
    )


def batch(
    length: int, *, num_targets: int | None = None, batch_size: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Ids and targets for all but the first four tokens, or as many as said."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (batch_size, length), generator=generator)
    num_targets = max(1, length - 4) if num_targets is None else num_targets
    targets = torch.randint(VOCABULARY, (batch_size, num_targets), generator=generator)
    return ids, targets


def grads(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients that there are, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(name="build")
def build_fixture() -> Callable[..., LongContextGradientModel]:
    return build


@pytest.fixture(name="batch")
def batch_fixture() -> Callable[..., tuple[Tensor, Tensor]]:
    return batch


@pytest.fixture(name="grads")
def grads_fixture() -> Callable[[torch.nn.Module], dict[str, Tensor]]:
    return grads


@pytest.fixture
def emptied() -> Callable[[], None]:
    """Has all memory freed that nobody needs after a pass that failed."""

    def emptied() -> None:
        # The thread of autograd's engine lets go of a pass that failed, and of the error with its traceback,
        # before it takes on another one. On a busy machine it may be late.
        torch.ones(1, device="cuda", requires_grad=True).sum().backward()
        gc.collect()

    return emptied


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A CUDA device: a real one, or a simulated one where there is none."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with simulate():
        yield torch.device("cuda")
