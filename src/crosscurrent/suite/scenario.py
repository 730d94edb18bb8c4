"""What the layers of the verification are run over: cache policies times quantizers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

POLICIES = ("lastrec", "h2o")
QUANTIZERS = ("default", "torch-quantized8")
ALL_POLICIES = ("dense", *POLICIES)
ALL_QUANTIZERS = (*QUANTIZERS, "torch-quantized4")
CHECKPOINTS = ("kv_checkpoints", "layer_inputs")
"""What a scenario's quantizer may store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One way to run the gradient."""

    policy: str
    """How the cache decides what to forget."""
    quantizer: str
    """How checkpoints (and, where a layer says so, the cache itself) are stored."""
    graphs: bool = False
    """Whether the work of a row's layers is issued as CUDA graphs."""

    @property
    def name(self) -> str:
        """What people read in a table."""
        return f"{self.policy}, {self.quantizer}{', graphs' if self.graphs else ''}"


WITH_GRAPHS = tuple(Scenario(policy=policy, quantizer="default", graphs=True) for policy in POLICIES)
"""What a run over everything asks in addition, of the layers that look at graphs. Graphs are made of what a
row's layers compute, which is the same with every quantizer of checkpoints."""


def scenarios(*, everything: bool = False) -> tuple[Scenario, ...]:
    """The scenarios of an ordinary run, or of a run over everything that there is."""
    policies, quantizers = (ALL_POLICIES, ALL_QUANTIZERS) if everything else (POLICIES, QUANTIZERS)
    return tuple(
        Scenario(policy=policy, quantizer=quantizer)
        for policy, quantizer in itertools.product(policies, quantizers)
    )
