"""Puts a run together from its settings, and says what the run is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum

import torch

from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.kvcache.names import CacheConfig
from crosscurrent.model.config import ModelConfig
from crosscurrent.model.transformer import Head, Transformer
from crosscurrent.train.corpus import Corpus
from crosscurrent.train.settings import OptimizerArgs, RunArgs
from crosscurrent.train.trainer import Trainer

_CHANGES_NO_RESULT = (
    "layercp_pin_memory",
    "cachecp_pin_memory",
    "async_cpu_transfer",
    "cuda_graphs",
    "nan_guard",
)
"""The gradient's knobs that change when bytes move or how work is issued: a run may go on with others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything that decides what a run computes, and on which device."""

    model: ModelConfig
    cache: CacheConfig
    grad: GradientArgs
    optimizer: OptimizerArgs
    run: RunArgs
    device: torch.device

    def identity(self, corpus: Corpus) -> dict[str, str]:
        """What has to be the same for a run to go on, by the names of the command line."""
        # Another device rounds otherwise.
        named: dict[str, str] = {"text": corpus.fingerprint(), "device": self.device.type}
        for group, config in (
            ("model", self.model),
            ("kv_cache", self.cache),
            ("grad", self.grad),
            ("optimizer", self.optimizer),
            ("run", self.run),
        ):
            for name, value in asdict(config).items():
                if name not in _CHANGES_NO_RESULT:
                    named[f"{group}.{name}"] = _readable(value)
        return named


def build_model(config: TrainConfig) -> LongContextGradientModel:
    """A model with fresh parameters, which depend on the seed only."""
    torch.manual_seed(config.run.seed)
    gpt_model = Transformer(config.model)
    head_model = Head(config.model, gpt_model if config.model.tie_embeddings else None)
    place = {"device": config.device, "dtype": getattr(torch, config.run.dtype)}
    return LongContextGradientModel(
        gpt_model.to(**place), head_model.to(**place), cache=config.cache, grad=config.grad
    )


def build_trainer(config: TrainConfig, corpus: Corpus) -> Trainer:
    """A run before its first step."""
    return Trainer(
        build_model(config), corpus=corpus, run=config.run, optimizer=config.optimizer, device=config.device
    )


def _readable(value: object) -> str:
    return json.dumps(value, default=lambda other: other.value if isinstance(other, Enum) else str(other))
