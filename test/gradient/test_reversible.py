"""The backward of a column walks its cache and the cache's gradient back in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crosscurrent.gradient.reversible import (
    LayerCache,
    advance_column,
    attend_column,
    for_keys_and_values,
    make_cache,
)
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.kvcache.placement import Eviction
from crosscurrent.kvcache.policies import make_policy

BATCH, HEADS, GROUPS, LENGTH, SIZE = 2, 4, 2, 7, 4
CPU = torch.device("cpu")


def evictions(policy_name: str, chunks: list[int]) -> list[Eviction]:
    policy = make_policy(CacheConfig.from_name(policy_name, cache_length=LENGTH), 0)
    policy.reset(BATCH, GROUPS, CPU)
    placed = []
    for length in chunks:
        eviction = policy.place(length)
        if policy.needs_weights:
            policy.observe(eviction, torch.rand(BATCH, GROUPS, eviction.filled_after, dtype=torch.float64))
        placed.append(for_keys_and_values(eviction))
    return placed


def entries(heads: int, tokens: int) -> Tensor:
    return torch.randn(BATCH, heads, tokens, SIZE, dtype=torch.float64)


def cache(*, with_gradient: bool = True) -> LayerCache:
    shape = BATCH, GROUPS, LENGTH, SIZE
    return make_cache(shape, dtype=torch.float64, device=CPU, with_gradient=with_gradient)


@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
def test_the_cache_is_back_to_the_bit_and_the_gradient_is_used_up(policy: str) -> None:
    torch.manual_seed(0)
    chunks = [7, 3, 3, 2, 1]
    placed = evictions(policy, chunks)
    live = cache()
    assert live.grads_NGLD is not None
    first, rest = placed[:1], placed[1:]
    advance_column(entries(GROUPS, 7), entries(GROUPS, 7), live, first)
    before = live.entries_NGLD.clone()
    tokens = sum(chunks[1:])
    q, k, v = (entries(heads, tokens).requires_grad_() for heads in (HEADS, GROUPS, GROUPS))
    out = attend_column(q, k, v, live, rest)
    assert not torch.equal(live.entries_NGLD, before)
    out.backward(torch.randn_like(out))
    assert torch.equal(live.entries_NGLD, before)
    assert live.grads_NGLD.abs().sum() > 0
    # The first chunk's entries are the only ones left: their gradient is taken out by its own column.
    q, k, v = (entries(heads, 7).requires_grad_() for heads in (HEADS, GROUPS, GROUPS))
    attend_column(q, k, v, live, first).sum().backward()
    assert not live.grads_NGLD.any()


@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
def test_with_and_without_autograd_it_computes_the_same(policy: str) -> None:
    torch.manual_seed(0)
    placed = evictions(policy, [7, 3, 1])
    q, k, v = entries(HEADS, 11), entries(GROUPS, 11), entries(GROUPS, 11)
    plain, recorded, advanced = cache(), cache(), cache(with_gradient=False)
    expected = attend_column(q, k, v, plain, placed)
    found = attend_column(q.requires_grad_(), k, v, recorded, placed)
    advance_column(k, v, advanced, placed)
    assert torch.equal(expected, found)
    assert torch.equal(plain.entries_NGLD, recorded.entries_NGLD)
    assert torch.equal(plain.entries_NGLD, advanced.entries_NGLD)


def test_half_precision_adds_its_cache_gradients_in_float32() -> None:
    shape = BATCH, GROUPS, LENGTH, SIZE
    live = make_cache(shape, dtype=torch.bfloat16, device=CPU, with_gradient=True)
    assert live.grads_NGLD is not None
    assert live.grads_NGLD.dtype == torch.float32
    q, k, v = (entries(heads, 8).bfloat16().requires_grad_() for heads in (HEADS, GROUPS, GROUPS))
    attend_column(q, k, v, live, evictions("lastrec", [7, 1])).sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.bfloat16
