"""Model, caches and quantizers run unchanged on simulated CUDA, and give the bits that they give on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import crosscurrent
from crosscurrent.kvcache.buffers import make_buffer
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.kvcache.policies import make_policy
from crosscurrent.model.attention import attend, summed_weights
from crosscurrent.model.config import ModelConfig
from crosscurrent.model.transformer import Head, Transformer

pytestmark = pytest.mark.simulation

CHUNKS = [(0, 6), (6, 9), (9, 10)]


def run(name: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """A loss, a gradient, and a layer's output chunk by chunk through a cache."""
    torch.manual_seed(0)
    config = ModelConfig.named("tiny", num_layers=1)
    ids = torch.randint(config.vocab_size, (2, 10)).to(device)
    model, head = Transformer(config).to(dtype).to(device), Head(config).to(dtype).to(device)
    loss = head.loss_sum(model(ids), ids)
    loss.backward()
    block = model.layers[0]
    results = [loss.detach().cpu(), block.attention.q.weight.grad.cpu()]
    cache = CacheConfig.from_name(name, cache_length=8)
    policy = make_policy(cache, 0)
    policy.reset(2, config.groups, torch.device(device))
    shape = (2, config.groups, 8, config.head_dim)
    buffer = make_buffer(cache.buffer, shape, dtype=dtype, device=torch.device(device))
    with torch.no_grad():
        x = model.embed(ids)
        for start, stop in CHUNKS:
            q, k, v = block.project(x[:, start:stop], model.angles(model.position(start), stop - start))
            eviction = policy.place(stop - start)
            column = buffer.open(k, v, eviction.filled_before)
            keys, values = column.place(eviction, slice(None))
            out, lse = attend(q, keys, values)
            policy.observe(eviction, summed_weights(q, keys, lse))
            results.append(out.cpu())
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["lastrec-default", "h2o-torch-quantized8", "h2o-torch-quantized4"])
def test_the_same_bits_as_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    expected = run(name, dtype, "cpu")
    with crosscurrent.simulate():
        got = run(name, dtype, "cuda")
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
