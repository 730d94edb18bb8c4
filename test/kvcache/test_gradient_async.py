"""The flag changes when bytes move and never which arithmetic is done: off and on agree to the bit.

On a real GPU under deterministic algorithms, since the fused attention backward adds with atomics otherwise.
Where there is no GPU, on simulated CUDA: there the order of the host's program decides the values, so that
these tests see errors of bookkeeping, and the detector sees those of ordering.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from crosscurrent.gradient import GradientArgs, LongContextGradientModel
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.kvcache.replay_log import ReplayLog
from crosscurrent.model.config import LoRAConfig, ModelConfig
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.trace.simulate import simulate

# Deterministic matrix products need it, and cuBLAS reads it when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

VOCABULARY = 17
LENGTHS = (61, 38)
QUANTIZERS = ("default", "torch-quantized8")


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        with simulate():
            yield torch.device("cuda")
        return
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield torch.device("cuda")
    torch.use_deterministic_algorithms(was)


@dataclass(frozen=True)
class Seen:
    """What a run shows to the outside."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    logs: list[ReplayLog]


def make_model(
    device: torch.device, *, policy: str, asynchronous: bool, lora: LoRAConfig | None = None, **names: str
) -> LongContextGradientModel:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCABULARY, num_layers=3, embed_size=16, num_heads=4, num_groups=2, mlp_size=24, lora=lora
    )
    gpt, head = Transformer(config), Head(config)
    for parameter in [*gpt.parameters(), *head.parameters()]:
        torch.nn.init.normal_(parameter, std=0.3)
    return LongContextGradientModel(
        gpt.to(device),
        head.to(device),
        cache=CacheConfig.from_name(policy, cache_length=(12, 10, 11)),
        grad=GradientArgs(
            chunk_size=4,
            layers_per_cell=2,
            layercp_pin_memory=True,
            cachecp_pin_memory=True,
            async_cpu_transfer=asynchronous,
            **names,
        ),
    )


def make_batch(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(VOCABULARY, (2, length), generator=generator)
    targets = torch.randint(VOCABULARY, (2, length - 15), generator=generator)
    return ids.to(device), targets.to(device)


def run(model: LongContextGradientModel, device: torch.device) -> Seen:
    """Two batches of different length, one after the other; nothing is read before both are through."""
    losses, gradients, logs = [], [], []
    for length in LENGTHS:
        model.zero_grad()
        loss = model(*make_batch(length, device))
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        if length == LENGTHS[-1]:
            logs.append(model.replay_log())
    return Seen(
        losses=[loss.item() for loss in losses],
        gradients=[{name: g.cpu() for name, g in by_name.items()} for by_name in gradients],
        logs=logs,
    )


def assert_same(off: Seen, on: Seen) -> None:
    assert off.losses == on.losses
    for of_off, of_on in zip(off.gradients, on.gradients, strict=True):
        assert of_off.keys() == of_on.keys()
        for name in of_off:
            assert of_off[name].isfinite().all(), name
            assert torch.equal(of_off[name], of_on[name]), name
    assert all(a.same_as(b) for a, b in zip(off.logs, on.logs, strict=True))


@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("kind", ["cachecp_qname", "layercp_qname"])
def test_off_and_on_agree_to_the_bit(cuda: torch.device, policy: str, name: str, kind: str) -> None:
    off = run(make_model(cuda, policy=policy, asynchronous=False, **{kind: name}), cuda)
    on = run(make_model(cuda, policy=policy, asynchronous=True, **{kind: name}), cuda)
    assert_same(off, on)


@pytest.mark.parametrize("cache", ["lastrec-torch-quantized4", "h2o-torch-quantized8"])
def test_with_packed_caches_too(cuda: torch.device, cache: str) -> None:
    off = run(make_model(cuda, policy=cache, asynchronous=False), cuda)
    on = run(make_model(cuda, policy=cache, asynchronous=True), cuda)
    assert_same(off, on)


def test_the_comparison_notices_one_bit(cuda: torch.device) -> None:
    """The bad twin: the same run with the last bit of one weight changed."""
    off = run(make_model(cuda, policy="h2o", asynchronous=False), cuda)
    model = make_model(cuda, policy="h2o", asynchronous=True)
    with torch.no_grad():
        weight = model.gpt_model.layers[0].attention.v.weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.full_like(weight[0, 0], torch.inf))
    with pytest.raises(AssertionError):
        assert_same(off, run(model, cuda))


def test_lora_h2o_and_adamw_for_several_steps(cuda: torch.device) -> None:
    def losses(*, asynchronous: bool) -> list[float]:
        model = make_model(
            cuda,
            policy="h2o",
            asynchronous=asynchronous,
            lora=LoRAConfig(rank=4),
            cachecp_qname=QUANTIZERS[1],
        )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(*make_batch(LENGTHS[step % 2], cuda))
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        assert all(p.isfinite().all() for p in model.parameters())
        return [loss.item() for loss in found]

    off, on = losses(asynchronous=False), losses(asynchronous=True)
    assert off == on
    assert on[2] < on[0]
    assert on[3] < on[1]


def test_ids_in_cpu_memory_give_the_same(cuda: torch.device) -> None:
    model = make_model(cuda, policy="h2o", asynchronous=True)
    on_device = model(*make_batch(LENGTHS[0], cuda))
    from_cpu = model(*make_batch(LENGTHS[0], torch.device("cpu")))
    assert on_device.item() == from_cpu.item()


@pytest.mark.parametrize(("position", "bad"), [(0, VOCABULARY), (60, -1), (30, -100)])
def test_an_id_out_of_range_on_the_gpu_turns_everything_into_nan(
    cuda: torch.device, position: int, bad: int
) -> None:
    """The host cannot check it without a wait. It may not pass unseen, nor read out of bounds."""
    model = make_model(cuda, policy="lastrec", asynchronous=True)
    ids, targets = make_batch(61, cuda)
    ids[1, position] = bad
    loss = model(ids, targets)
    loss.backward()
    assert loss.isnan()
    assert all(p.grad is not None and p.grad.isnan().any() for p in model.parameters())
    ids[1, position] = 0
    model.zero_grad()
    model(ids, targets).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("layercp", "cachecp"), [(False, True), (True, False), (False, False)], ids=["layer", "cache", "both"]
)
def test_the_flag_needs_both_pinned_memories(cuda: torch.device, layercp: bool, cachecp: bool) -> None:
    with pytest.raises(ValueError, match=r"grad\.async_cpu_transfer"):
        GradientArgs(async_cpu_transfer=True, layercp_pin_memory=layercp, cachecp_pin_memory=cachecp)
    GradientArgs(async_cpu_transfer=True, layercp_pin_memory=True, cachecp_pin_memory=True)
