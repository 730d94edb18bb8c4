"""Device memory does not grow with the sequence, token ids aside."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from crosscurrent.gradient import LongContextGradientModel

Build = Callable[..., LongContextGradientModel]
Batch = Callable[..., tuple[Tensor, Tensor]]

ASYNC = {"layercp_pin_memory": True, "cachecp_pin_memory": True, "async_cpu_transfer": True, "chunk_size": 8}


def peak(step: Callable[[], Tensor]) -> int:
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peaks(model: LongContextGradientModel, batch: Batch, *, plain: bool = False) -> list[int]:
    """For 4, 8 and 16 times the cache, less the ids and targets that the model holds in int64."""
    model.to("cuda")
    model(*batch(64)).backward()
    found = []
    for length in (64, 128, 256):
        ids, targets = (t.to("cuda") for t in batch(length, num_targets=length))
        if plain:
            found.append(peak(lambda: model.head_model.loss_sum(model.gpt_model(ids), targets)))  # noqa: B023
        else:
            found.append(peak(lambda: model(ids, targets)) - 2 * 8 * ids.numel())  # noqa: B023
    return found


@pytest.mark.parametrize("cache", ["lastrec", "h2o"])
def test_the_peak_is_flat(build: Build, batch: Batch, cuda: torch.device, cache: str) -> None:
    """To within 5 percent: what is left over are flags of the ids' range, a byte each, for a moment."""
    found = peaks(build(cache=cache, cache_length=16, num_layers=2, grad=ASYNC), batch)
    assert max(found) <= 1.05 * min(found)


def test_plain_autograd_grows(build: Build, batch: Batch, cuda: torch.device) -> None:
    """The bad twin: the same measure sees memory that grows."""
    found = peaks(build(cache_length=16, num_layers=2, grad=ASYNC), batch, plain=True)
    assert found[2] > 3 * found[0]
