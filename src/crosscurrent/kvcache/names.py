"""What a cache is: one string on the command line, types inside.

Usage:

    config = CacheConfig.from_name("h2o-torch-quantized8", cache_length=1024, grace_period=64)
    config.policy, config.buffer            # PolicyKind.H2O, BufferKind.QUANTIZED8
    config.length(layer)                    # cache lengths may differ by layer

A name is a policy, or a policy, a dash and a buffer kind: "lastrec", "h2o-torch-quantized4".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from crosscurrent.checks import flag, whole_number


class PolicyKind(enum.Enum):
    """Who is evicted."""

    DENSE = "dense"
    """Nobody: a sequence longer than the cache is refused."""
    LASTREC = "lastrec"
    """The oldest."""
    H2O = "h2o"
    """Those with the least accumulated attention."""


class BufferKind(enum.Enum):
    """How entries, or checkpoints, are stored."""

    DEFAULT = "default"
    """As they are."""
    QUANTIZED8 = "torch-quantized8"
    """8 bits a value, and two floats a block."""
    QUANTIZED4 = "torch-quantized4"
    """4 bits a value, two to a byte, and two floats a block."""

    @staticmethod
    def parse(name: str) -> BufferKind:
        """The kind of a name such as "torch-quantized8"."""
        return BufferKind(_known("buffer kind", name, BufferKind))


def parse_name(name: str) -> tuple[PolicyKind, BufferKind]:
    """Split "h2o-torch-quantized8" into its policy and its buffer kind."""
    policy, _, buffer = name.partition("-")
    kind = PolicyKind(_known("cache policy", policy, PolicyKind))
    return kind, BufferKind.parse(buffer) if buffer or name.endswith("-") else BufferKind.DEFAULT


def _known(what: str, name: str, kinds: type[enum.Enum]) -> str:
    known = [kind.value for kind in kinds]
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known are {', '.join(known)}")
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """One bounded KV cache per layer."""

    policy: PolicyKind = PolicyKind.LASTREC
    buffer: BufferKind = BufferKind.DEFAULT
    """How the forward pass holds the entries; the backward pass computes with the values that come of it."""
    cache_length: int | tuple[int, ...] = 1024
    """Slots; one number, or one for each layer."""
    init_grace_tokens: int = 0
    """The first tokens of the sequence, which are never evicted."""
    grace_period: int = 0
    """h2o only: the newest tokens, which are not evicted yet."""
    normalize_scores: bool = False
    """h2o only: divide a token's score by the number of queries that could see it."""

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("policy", self.policy, PolicyKind),
            ("buffer", self.buffer, BufferKind),
        ):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name} must be a {kind.__name__}, got {value!r}; CacheConfig.from_name takes names, "
                    "such as 'h2o-torch-quantized8'"
                )
        lengths = self.cache_length if isinstance(self.cache_length, tuple) else (self.cache_length,)
        if not lengths:
            raise ValueError("cache_length must be one number, or a tuple with one for each layer, got ()")
        for length in lengths:
            whole_number("cache_length, in every layer,", length, least=1)
        whole_number("init_grace_tokens", self.init_grace_tokens, least=0)
        whole_number("grace_period", self.grace_period, least=0)
        flag("normalize_scores", self.normalize_scores)
        if self.policy is not PolicyKind.H2O and (self.grace_period or self.normalize_scores):
            raise ValueError(
                f"grace_period={self.grace_period} and normalize_scores={self.normalize_scores} belong to "
                f"h2o, but the policy is {self.policy.value}; drop them or choose h2o"
            )
        if self.policy is PolicyKind.DENSE and self.init_grace_tokens:
            raise ValueError(
                f"dense evicts nothing, so init_grace_tokens={self.init_grace_tokens} has no meaning"
            )
        if self.num_grace >= min(lengths):
            raise ValueError(
                f"grace tokens leave no room: init_grace_tokens={self.init_grace_tokens} plus grace_period="
                f"{self.grace_period} must be less than the cache_length, {min(lengths)}"
            )

    @staticmethod
    def from_name(name: str, **fields: Any) -> CacheConfig:
        """A config from a name such as "h2o-torch-quantized8" and the other fields."""
        policy, buffer = parse_name(name)
        return CacheConfig(policy=policy, buffer=buffer, **fields)

    @property
    def name(self) -> str:
        """The name that parses to this policy and buffer."""
        return f"{self.policy.value}-{self.buffer.value}"

    @property
    def num_grace(self) -> int:
        """Tokens that no chunk may evict. A chunk that follows a full cache has room for the rest."""
        return self.init_grace_tokens + self.grace_period

    def length(self, layer: int) -> int:
        """Slots of a layer's cache."""
        return self.cache_length[layer] if isinstance(self.cache_length, tuple) else self.cache_length
