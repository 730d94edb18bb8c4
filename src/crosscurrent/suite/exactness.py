"""The exactness layer: the gradient against plain autograd through an explicit cache, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from crosscurrent.bits import deterministic
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.kvcache.names import BufferKind
from crosscurrent.kvcache.quantize import make_quantizer, round_trip
from crosscurrent.suite.experiment import (
    Measurement,
    cache_config,
    gradient_args,
    make_batches,
    make_parts,
    measure,
)
from crosscurrent.suite.layer import Outcome
from crosscurrent.suite.reference import ReferenceCache, reference_loss
from crosscurrent.suite.scenario import Scenario

TOLERANCE = 1e-9
"""Relative to the largest entry of a parameter's gradient. Both sides do the same 64-bit arithmetic in
another order: sums of up to about 1e4 terms over 3 layers, each rounded by 1.1e-16, stay below 1e-11. A
wrong term, such as one token too many, is off by 1e-3 and more."""


@dataclass(frozen=True)
class Exactness:
    """Loss and gradients are those of the explicit cache. The scenario's quantizer stores the cache's
    entries; checkpoints keep every bit, since a quantized checkpoint is an approximation by design."""

    name: str = "exactness"
    claim: str = f"loss and gradients agree with plain autograd through an explicit cache to {TOLERANCE:g}"
    needs_cuda: bool = False
    needs_quiet: bool = False

    def takes(self, scenario: Scenario) -> bool:
        """Without graphs: nothing that is asked here is another with them."""
        return not scenario.graphs

    def check(self, scenario: Scenario) -> Outcome:
        """Compare both batches, on the GPU if there is one."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with deterministic():
            found = self._found(scenario, device)
            expected = [self._expected(scenario, device, *batch) for batch in make_batches()]
        return compare(found, expected)

    def _found(self, scenario: Scenario, device: str) -> list[Measurement]:
        model = LongContextGradientModel(
            *make_parts(dtype=torch.float64, device=device),
            cache=cache_config(scenario, quantized=True),
            grad=gradient_args(),
        )
        return measure(model, make_batches())

    def _expected(
        self, scenario: Scenario, device: str, ids: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        model, head = make_parts(dtype=torch.float64, device=device)
        config = cache_config(scenario)
        quantizer = make_quantizer(BufferKind.parse(scenario.quantizer))
        cache = ReferenceCache(
            policy=scenario.policy,
            lengths=tuple(config.length(layer) for layer in range(len(model.layers))),
            grace_period=config.grace_period,
            stored=lambda rows: round_trip(quantizer, rows),
        )
        chunk_size = gradient_args().chunk_size
        loss = reference_loss(
            model, head, ids.to(device), targets.to(device), cache=cache, chunk_size=chunk_size
        )
        parts = {"gpt_model": model, "head_model": head}
        named = {
            f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()
        }
        gradients = torch.autograd.grad(loss, list(named.values()))
        return loss.detach().cpu(), dict(zip(named, (g.cpu() for g in gradients), strict=True))


def compare(found: list[Measurement], expected: list[tuple[Tensor, dict[str, Tensor]]]) -> Outcome:
    """Held if every loss and gradient is within ``TOLERANCE``; NaN never is."""
    worst = 0.0
    for index, (measurement, (loss, gradients)) in enumerate(zip(found, expected, strict=True)):
        if measurement.gradients.keys() != gradients.keys():
            missing = sorted(gradients.keys() ^ measurement.gradients.keys())
            return Outcome.failed(f"batch {index}: only one side has a gradient of {', '.join(missing)}")
        pairs = {"loss": (measurement.loss, loss)}
        pairs |= {name: (measurement.gradients[name], gradients[name]) for name in gradients}
        for name, (seen, wanted) in pairs.items():
            error = ((seen - wanted).abs().max() / wanted.abs().max()).item()
            worst = max(worst, error)
            if not error <= TOLERANCE:  # true for NaN, too
                return Outcome.failed(
                    f"{name} of batch {index} is off by {error:.1e} of its largest entry, expected at most "
                    f"{TOLERANCE:g}"
                )
    number = sum(len(gradients) for _, gradients in expected)
    return Outcome.held(f"{number} gradients, off by {worst:.0e} at most")
