"""Leaves that stand in for a model's parameters while its gradient is computed piece by piece.

A gradient that is made in many small backward passes must not show before it is whole: hooks of the
parameters would see the pieces, and an exception in the middle would leave some of them in `p.grad`. So
the pieces are computed with respect to leaves that share the parameters' memory, and add up in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from crosscurrent.gradient.graphs import Graphs
from crosscurrent.model.lora import Linear


class ShadowParameters:
    """One leaf for each parameter that trains. Parameters that do not are used as they are."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._leaves = {id(p): p.detach().requires_grad_() for p in parameters}

    def replacing(self, module: nn.Module) -> dict[str, Tensor]:
        """The leaves by the names of a module's parameters, as `functional_call` wants them."""
        return {
            name: self._leaves[id(parameter)]
            # A tied parameter has several names, and all of them must be replaced.
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in self._leaves
        }

    def gradient(self, parameter: Tensor) -> Tensor:
        """The gradient of one parameter so far, to add to."""
        leaf = self._leaves[id(parameter)]
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(parameter)
        return leaf.grad

    def gradients(self) -> list[Tensor | None]:
        """What was collected, in the order of the parameters; None for one that was not used."""
        return [self._leaves[id(p)].grad for p in self._parameters]


class RowSums:
    """The leaves of a row's layers, whose gradients add up in one place until the row is done."""

    def __init__(self, shadows: ShadowParameters, row: nn.Module, graphs: Graphs) -> None:
        self.leaves = shadows.replacing(row)
        self._graphs = graphs
        self._places = [
            graphs.keep(("gradient", name, leaf.shape), partial(torch.empty_like, leaf.detach()))
            for name, leaf in self.leaves.items()
        ]
        if self._places:
            torch._foreach_zero_(self._places)
        linear = {f"{name}.weight" for name, module in row.named_modules() if isinstance(module, Linear)}
        for (name, leaf), place in zip(self.leaves.items(), self._places, strict=True):
            # A parameter that two modules share has a gradient already.
            leaf.grad = place if leaf.grad is None else place.copy_(leaf.grad)
            if name in linear:
                leaf.gradient_sink = partial(_add_product, place)  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Nothing will be added any more: the next row uses the places."""
        for leaf, total in zip(self.leaves.values(), self._graphs.taken(self._places), strict=True):
            leaf.grad = total


def _add_product(total_OI: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    """Add a weight's gradient in the product that makes it."""
    total_OI.addmm_(grad_NO.mT, x_NI)
