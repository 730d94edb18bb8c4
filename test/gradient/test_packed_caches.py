"""Packed caches in the whole model: the bytes are saved, and the values are those of one quantization."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from crosscurrent.gradient import LongContextGradientModel
from crosscurrent.gradient.call import Call
from crosscurrent.kvcache.buffers import PlainKVBuffer
from crosscurrent.kvcache.names import BufferKind
from crosscurrent.kvcache.quantize import make_quantizer, packed_bytes
from crosscurrent.kvcache.replay_log import ReplayLog

Build = Callable[..., LongContextGradientModel]
Batch = Callable[..., tuple[Tensor, Tensor]]
Grads = Callable[[torch.nn.Module], dict[str, Tensor]]

PACKED = pytest.mark.parametrize(
    "kind", [BufferKind.QUANTIZED8, BufferKind.QUANTIZED4], ids=lambda k: k.value
)


def plain_forward_cache(call: Call, layer: int) -> PlainKVBuffer:
    """In place of a packed cache: entries as they are, after one time through the quantizer."""
    shapes = call.fmt.shapes
    return PlainKVBuffer.empty(
        (shapes.batch_size, shapes.num_groups, shapes.cache_lengths[layer], shapes.head_size),
        dtype=shapes.dtype,
        device=call.device,
        quantizer=make_quantizer(call.setup.cache.buffer),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
@PACKED
def test_losses_and_gradients_are_those_of_entries_quantized_once(
    build: Build,
    batch: Batch,
    grads: Grads,
    monkeypatch: pytest.MonkeyPatch,
    kind: BufferKind,
    policy: str,
    dtype: torch.dtype,
) -> None:
    """To the bit, in all that can be seen."""
    # Rows of 16 values: those of two come back nearly exactly.
    settings = {"cache_length": (8, 10, 9), "dtype": dtype, "embed_size": 64}
    ids, targets = batch(37)

    def step(name: str) -> tuple[Tensor, dict[str, Tensor], ReplayLog]:
        model = build(cache=name, **settings)
        loss = model(ids, targets)
        loss.backward()
        return loss.detach(), grads(model), model.replay_log()

    loss, gradients, log = step(f"{policy}-{kind.value}")
    with monkeypatch.context() as patch:
        patch.setattr(Call, "forward_cache", plain_forward_cache)
        plain_loss, plain_gradients, plain_log = step(f"{policy}-{kind.value}")
    assert torch.equal(loss, plain_loss)
    assert gradients.keys() == plain_gradients.keys()
    assert all(torch.equal(gradients[name], plain_gradients[name]) for name in gradients)
    assert log.same_as(plain_log)
    # The bad twin: with no quantizer the gradients are others.
    _, exact_gradients, _ = step(policy)
    assert not any(torch.equal(gradients[name], exact_gradients[name]) for name in gradients)


def forward_peak(model: LongContextGradientModel, ids: Tensor, targets: Tensor) -> int:
    """Device bytes of a forward pass, above what there was before."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(ids, targets)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
@pytest.mark.parametrize("kind", list(BufferKind), ids=lambda k: k.value)
def test_a_layer_costs_the_forward_pass_its_packed_bytes(
    build: Build, batch: Batch, cuda: torch.device, kind: BufferKind, policy: str
) -> None:
    """Exactly, whatever attention needs: that memory is the same for one layer and for many."""
    batch_size, length = 2, 32
    few, many = 2, 7

    def peak(num_layers: int) -> int:
        model = build(
            cache=f"{policy}-{kind.value}",
            cache_length=length,
            num_layers=num_layers,
            embed_size=64,
            dtype=torch.bfloat16,
        ).to(cuda)
        ids, targets = (t.to(cuda) for t in batch(4 * length, batch_size=batch_size))
        forward_peak(model, ids, targets)
        return forward_peak(model, ids, targets)

    groups, size = 2, 16
    shape = 2 * batch_size, groups, length, size
    expected = packed_bytes(make_quantizer(kind), shape, torch.bfloat16)
    if policy == "h2o":
        # The scores, in float64.
        expected += batch_size * groups * length * 8
    assert peak(many) - peak(few) == (many - few) * expected
