"""Finds NaN and infinity in parameters and gradients.

The flags are computed on the device and copied to the host behind an event, which the host waits for: those
of the parameters before a forward pass changes anything, those of the gradients before `p.grad` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crosscurrent.gradient.transfer import Readback


@dataclass(frozen=True, kw_only=True, slots=True)
class NanGuard:
    """Names of tensors, and whether each is finite, on its way to the host."""

    what: str
    names: Sequence[str]
    finite: Readback
    advice: str

    def check(self) -> None:
        """Wait for the flags; raise FloatingPointError if some tensor is not finite."""
        bad = [name for name, good in zip(self.names, self.finite.read().tolist(), strict=True) if not good]
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            raise FloatingPointError(
                f"expected finite {self.what}, but there is NaN or infinity in {', '.join(bad[:3])}{more}; "
                f"{self.advice}"
            )


def watch_parameters(model: nn.Module) -> NanGuard:
    """Start to look at all parameters of a model."""
    named = dict(model.named_parameters())
    return NanGuard(
        what="parameters",
        names=list(named),
        finite=_all_finite(named.values()),
        advice="nothing was changed; go back to a checkpoint from before it appeared",
    )


def watch_gradients(
    model: nn.Module, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]
) -> NanGuard:
    """Start to look at gradients that no `p.grad` holds yet."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    return NanGuard(
        what="gradients",
        names=[names[id(parameter)] for parameter, _ in pairs],
        finite=_all_finite(gradient for _, gradient in pairs),
        advice="no p.grad was changed; skip this batch, or lower the loss scale or the learning rate",
    )


def _all_finite(tensors: Iterable[Tensor]) -> Readback:
    with torch.no_grad():
        return Readback(torch.stack([tensor.isfinite().all() for tensor in tensors]))
