"""Whether the flag changed a bit: losses and gradients of two steps, byte for byte.

A value that is not finite is a failure of its own: two gradients that went wrong in the same way are no proof
of anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscurrent.bits import same_bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Loss and gradients of one step."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What two steps have in common."""

    loss_off: float
    loss_on: float
    same_loss: bool
    num_gradients: int
    different: tuple[str, ...]
    """Parameters whose gradients differ, or are missing in one of the two."""
    not_finite: tuple[str, ...]
    """Parameters whose gradient holds NaN or infinity in either; ``loss`` for the loss."""

    @property
    def is_right(self) -> bool:
        """Whether everything is finite and the same, and there was something to compare."""
        return bool(self.same_loss and self.num_gradients and not self.different and not self.not_finite)

    def sentence(self) -> str:
        """The verdict in words."""
        if self.is_right:
            return f"off and on agree bit for bit: the loss and all {self.num_gradients} gradients"
        faults = [] if self.same_loss else [f"the losses differ ({self.loss_off!r} off, {self.loss_on!r} on)"]
        if self.different:
            faults.append(
                f"{len(self.different)} of {self.num_gradients} gradients differ, first {self.different[0]}"
            )
        if self.not_finite:
            faults.append(f"not finite: {len(self.not_finite)}, first {self.not_finite[0]}")
        if not self.num_gradients:
            faults.append("there is no gradient")
        return "WRONG: " + "; ".join(faults)


def compare(off: Outcome, on: Outcome) -> Comparison:
    """Compare two steps; waits for the device."""
    names = sorted(off.gradients.keys() | on.gradients.keys())
    outcomes = (off, on)
    return Comparison(
        loss_off=off.loss.item(),
        loss_on=on.loss.item(),
        same_loss=same_bits(off.loss, on.loss),
        num_gradients=len(names),
        different=tuple(
            name
            for name in names
            if name not in off.gradients
            or name not in on.gradients
            or not same_bits(off.gradients[name], on.gradients[name])
        ),
        not_finite=tuple(
            name
            for name in ("loss", *names)
            if any(not _is_finite(o.loss if name == "loss" else o.gradients.get(name)) for o in outcomes)
        ),
    )


def _is_finite(x: Tensor | None) -> bool:
    return x is None or bool(torch.isfinite(x).all().item())
