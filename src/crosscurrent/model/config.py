"""The shape of a model, as frozen dataclasses with a few named sizes.

Usage:

    config = ModelConfig.named("tiny", vocab_size=256, lora=LoRAConfig(rank=8))
    config = ModelConfig(vocab_size=256, num_layers=4, embed_size=128, num_heads=8, num_groups=2)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class MLPKind(enum.Enum):
    """The part of a layer that looks at one token at a time."""

    SWIGLU = "swiglu"
    """down(silu(gate(x)) * up(x)), Shazeer 2020, arXiv:2002.05202."""
    GELU = "gelu"
    """down(gelu(up(x)))."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAConfig:
    """Low-rank updates of the attention projections (Hu et al. 2021, arXiv:2106.09685).

    With it every other parameter of the model is frozen.
    """

    rank: int = 8
    alpha: float = 16.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """On the input of the update, in training mode. Gradients that recompute a forward need 0."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank must be at least 1, got {self.rank}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"lora.dropout must be in [0, 1), got {self.dropout}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that fixes the parameters of a model."""

    vocab_size: int
    num_layers: int
    embed_size: int
    num_heads: int
    num_groups: int | None = None
    """Key/value heads, each shared by num_heads // num_groups query heads; None: num_heads."""
    head_size: int | None = None
    """None: embed_size // num_heads. Even, since rotary positions turn pairs."""
    mlp_kind: MLPKind = MLPKind.SWIGLU
    mlp_size: int | None = None
    """None: 4 * embed_size, or about 8/3 of it, in multiples of 64, for swiglu's three matrices."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    lora: LoRAConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "embed_size", "num_heads", "groups", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.groups:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_groups {self.groups}")
        if self.head_size is None and self.embed_size % self.num_heads:
            sizes = f"embed_size {self.embed_size} is no multiple of num_heads {self.num_heads}"
            raise ValueError(f"{sizes}: change one of them, or set head_size")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_size must be even and at least 2, got {self.head_dim}")

    @property
    def groups(self) -> int:
        """Query groups, resolved."""
        return self.num_heads if self.num_groups is None else self.num_groups

    @property
    def head_dim(self) -> int:
        """Head size, resolved."""
        return self.embed_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def hidden_size(self) -> int:
        """MLP size, resolved."""
        if self.mlp_size is not None:
            return self.mlp_size
        if self.mlp_kind is MLPKind.GELU:
            return 4 * self.embed_size
        return 64 * -(-8 * self.embed_size // (3 * 64))

    @staticmethod
    def named(name: str, **overrides: Any) -> ModelConfig:
        """A named size, with any field overridden."""
        if name not in SIZES:
            raise ValueError(f"unknown model size {name!r}; known are {', '.join(SIZES)}")
        return ModelConfig(**{**SIZES[name], **overrides})


def _size(num_layers: int, embed_size: int, num_heads: int, num_groups: int, **others: Any) -> dict[str, Any]:
    shape = {"num_layers": num_layers, "embed_size": embed_size, "num_heads": num_heads}
    return {"vocab_size": 256, **shape, "num_groups": num_groups, **others}


# Bytes as tokens. The last two have the shapes of common open models of 1 and 8 billion parameters.
SIZES = {
    "tiny": _size(4, 64, 4, 2),
    "small": _size(8, 256, 8, 2),
    "medium": _size(16, 1024, 16, 4),
    "large": _size(16, 2048, 32, 8, mlp_size=8192, rope_theta=500_000.0),
    "xlarge": _size(32, 4096, 32, 8, mlp_size=14336, rope_theta=500_000.0),
}
