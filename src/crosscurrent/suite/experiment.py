"""The small model, the batches and the measurement that the layers share.

Everything is unequal on purpose: rows of two layers and of one, caches of different length, a last
chunk of a single token, batches of different length, targets shorter than their inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscurrent.bits import difference
from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.kvcache.names import BufferKind, CacheConfig, PolicyKind
from crosscurrent.kvcache.replay_log import ReplayLog
from crosscurrent.model.config import ModelConfig
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.suite.scenario import CHECKPOINTS, Scenario

MODEL = ModelConfig(vocab_size=48, num_layers=3, embed_size=32, num_heads=4, num_groups=2)
BATCH_SIZE = 2
LENGTHS = (77, 50)
"""Tokens of the two batches."""
CACHE_LENGTHS = (16, 20, 16)
"""For each layer: a batch is several caches long."""
DENSE_CACHE_LENGTHS = (80, 84, 80)
GRACE_PERIOD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What the gradient of one batch came out as."""

    loss: Tensor
    gradients: dict[str, Tensor]
    replay_log: ReplayLog

    @property
    def values(self) -> dict[str, Tensor]:
        """The loss and the gradients."""
        return {"loss": self.loss, **self.gradients}


def cache_config(scenario: Scenario, *, quantized: bool = False) -> CacheConfig:
    """The caches of a scenario; ``quantized``: their entries, too, are stored with its quantizer."""
    policy = PolicyKind(scenario.policy)
    return CacheConfig(
        policy=policy,
        buffer=BufferKind.parse(scenario.quantizer) if quantized else BufferKind.DEFAULT,
        cache_length=DENSE_CACHE_LENGTHS if policy is PolicyKind.DENSE else CACHE_LENGTHS,
        grace_period=GRACE_PERIOD if policy is PolicyKind.H2O else 0,
    )


def gradient_args(
    *,
    quantizer: str = "default",
    stored: Collection[str] = CHECKPOINTS,
    pinned: bool = False,
    flag: bool = False,
    graphs: bool = False,
) -> GradientArgs:
    """How the lattice is cut, and what the quantizer stores."""
    return GradientArgs(
        layers_per_cell=2,
        chunk_size=6,
        layercp_qname=quantizer if "layer_inputs" in stored else "default",
        cachecp_qname=quantizer if "kv_checkpoints" in stored else "default",
        layercp_pin_memory=pinned,
        cachecp_pin_memory=pinned,
        async_cpu_transfer=flag,
        cuda_graphs=graphs,
    )


def make_parts(*, dtype: torch.dtype, device: str) -> tuple[Transformer, Head]:
    """The model and its head; always the same parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model, head = Transformer(MODEL), Head(MODEL)
        # The usual small initial values make attention uniform, which would hide much: use larger ones.
        with torch.no_grad():
            for parameter in (*model.parameters(), *head.parameters()):
                parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model.to(device, dtype), head.to(device, dtype)


def make_model(
    scenario: Scenario,
    *,
    flag: bool = True,
    stored: Collection[str] = CHECKPOINTS,
    dtype: torch.dtype = torch.float32,
) -> LongContextGradientModel:
    """The model of a scenario on the device, with pinned checkpoints; its quantizer stores these kinds."""
    return LongContextGradientModel(
        *make_parts(dtype=dtype, device="cuda"),
        cache=cache_config(scenario),
        grad=gradient_args(
            quantizer=scenario.quantizer,
            stored=stored,
            pinned=True,
            flag=flag,
            graphs=flag and scenario.graphs,
        ),
    )


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Token ids and targets, in CPU memory; always the same."""
    draw = torch.Generator().manual_seed(1)
    batches = []
    for length in LENGTHS:
        ids = torch.randint(0, MODEL.vocab_size, (BATCH_SIZE, length), generator=draw)
        targets = torch.randint(0, MODEL.vocab_size, (BATCH_SIZE, length - 3), generator=draw)
        batches.append((ids, targets))
    return batches


def measure(model: LongContextGradientModel, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Measurement]:
    """Loss, gradients and replay log of one batch after the other, from the same model."""
    measured = []
    for ids, targets in batches:
        model.zero_grad(set_to_none=True)
        loss = model(ids, targets)
        loss.backward()
        gradients = {
            name: parameter.grad.detach().cpu()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        measured.append(
            Measurement(loss=loss.detach().cpu(), gradients=gradients, replay_log=model.replay_log())
        )
    return measured


def differences(off: Mapping[str, Tensor], on: Mapping[str, Tensor]) -> list[str]:
    """What has other bits with the flag off and on, or is not finite, in words; [] if nothing is.

    Two values that went wrong in the same way are no proof of anything.
    """
    if odd := off.keys() ^ on.keys():
        return [f"only one side has {', '.join(sorted(odd))}"]
    said = {
        name: difference(value, on[name]) or ("" if value.isfinite().all() else "not finite")
        for name, value in off.items()
    }
    return [f"{name}: {what}" for name, what in said.items() if what]
