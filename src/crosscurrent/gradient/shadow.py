"""Leaves that stand in for a model's parameters while its gradient is computed piece by piece.

A gradient that is made in many small backward passes must not show before it is whole: hooks of the
parameters would see the pieces, and an exception in the middle would leave some of them in `p.grad`. So
the pieces are computed with respect to leaves that share the parameters' memory, and add up in theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from crosscurrent.gradient.graphs import Graphs


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

    @contextmanager
    def summing(self, module: nn.Module, graphs: Graphs) -> Iterator[dict[str, Tensor]]:
        """The same leaves, whose gradients add up in one place until the end of the block."""
        leaves = self.replacing(module)
        for name, leaf in leaves.items():
            place = graphs.keep(("gradient", name, leaf.shape), partial(torch.empty_like, leaf.detach()))
            # A parameter with two names in two modules has a gradient already.
            leaf.grad = place.zero_() if leaf.grad is None else place.copy_(leaf.grad)
        yield leaves
        for leaf in leaves.values():
            assert leaf.grad is not None
            leaf.grad = graphs.taken(leaf.grad)

    def gradients(self) -> list[Tensor | None]:
        """What was collected, in the order of the parameters; None for one that was not used."""
        return [self._leaves[id(p)].grad for p in self._parameters]
