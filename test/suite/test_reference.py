"""The reference of the exactness layer, against an ordinary transformer and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from crosscurrent.model.config import ModelConfig
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.suite.reference import ReferenceCache, cut, reference_loss

CONFIG = ModelConfig(vocab_size=17, num_layers=2, embed_size=12, num_heads=4, num_groups=2, head_size=4)
LENGTH = 13


def _parts() -> tuple[Transformer, Head, Tensor, Tensor]:
    torch.manual_seed(3)
    model, head = Transformer(CONFIG).double(), Head(CONFIG).double()
    ids = torch.randint(0, 17, (2, LENGTH))
    return model, head, ids, torch.randint(0, 17, (2, LENGTH - 2))


def test_a_cache_that_forgets_nothing_is_full_attention() -> None:
    model, head, ids, targets = _parts()
    logits = head(model(ids)[:, 2:])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    for policy in ("dense", "lastrec", "h2o"):
        cache = ReferenceCache(policy=policy, lengths=(LENGTH, LENGTH + 5))
        loss = reference_loss(model, head, ids, targets, cache=cache, chunk_size=3)
        # Two sums of the same 64-bit terms in another order: far fewer than 1e3 terms of size one.
        torch.testing.assert_close(loss, expected, rtol=1e3 * 2**-53, atol=0)


@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
def test_a_cache_that_forgets_is_not(policy: str) -> None:
    model, head, ids, targets = _parts()
    cache = ReferenceCache(policy=policy, lengths=(6, 6))
    forgetful = reference_loss(model, head, ids, targets, cache=cache, chunk_size=3)
    complete = reference_loss(
        model, head, ids, targets, cache=ReferenceCache(policy=policy, lengths=(13, 13)), chunk_size=3
    )
    assert abs(forgetful - complete) > 1e-6


def test_lastrec_with_chunks_of_one_is_a_sliding_window() -> None:
    model, head, ids, targets = _parts()
    window = 4
    cache = ReferenceCache(policy="lastrec", lengths=(window, window))
    loss = reference_loss(model, head, ids, targets, cache=cache, chunk_size=1)
    x = model.embed(ids)
    place = torch.arange(LENGTH)
    visible = (place <= place[:, None]) & (place > place[:, None] - window)
    for block in model.layers:
        q, k, v = block.project(x, model.angles(model.position(0), LENGTH))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        x = block.finish(x, attended)
    expected = nn.functional.cross_entropy(head(x[:, 2:]).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e3 * 2**-53, atol=0)


def test_chunks_cover_the_sequence() -> None:
    assert cut(5, first=8, other=2) == [(0, 5)]
    assert cut(8, first=8, other=2) == [(0, 8)]
    assert cut(13, first=8, other=2) == [(0, 8), (8, 10), (10, 12), (12, 13)]
