"""A linear map without bias, with an optional low-rank update.

Usage: `Linear(in_size, out_size, lora=config.lora)` has parameters `weight`, `lora_a` and `lora_b`.

Who adds up gradients from many small backward passes can say where: what stands in for a weight may have a
`gradient_sink`, a function that is called with the gradient of the output [N, O] and the input [N, I], and
adds the product of the two to the gradient itself. Autograd then has none for the weight.

y = x W^T + (alpha / rank) dropout(x) A^T B^T, Hu et al. 2021, arXiv:2106.09685: A starts random, B at
zero, so that training starts from the map as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from crosscurrent.model.config import LoRAConfig

GradientSink = Callable[[Tensor, Tensor], None]


class _SummedLinear(torch.autograd.Function):
    """x W^T, whose weight's gradient goes to a sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sink: GradientSink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return functional.linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.sink(grad.flatten(0, -2), x.flatten(0, -2))
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    sink: GradientSink | None = getattr(weight, "gradient_sink", None)
    if sink is None:
        return functional.linear(x, weight)
    return _SummedLinear.apply(x, weight, sink)  # type: ignore[no-any-return, no-untyped-call]


class Linear(nn.Module):
    """y = x W^T, plus a low-rank update if `lora` is given."""

    def __init__(self, in_size: int, out_size: int, *, lora: LoRAConfig | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.lora = lora
        if lora is not None:
            self.lora_a = nn.Parameter(torch.empty(lora.rank, in_size))
            self.lora_b = nn.Parameter(torch.zeros(out_size, lora.rank))
            nn.init.uniform_(self.lora_a, -math.sqrt(3 / in_size), math.sqrt(3 / in_size))

    def forward(self, x: Tensor) -> Tensor:
        if self.lora is None:
            return _linear(x, self.weight)
        x_NI = x.flatten(0, -2)
        y_NO = functional.linear(x_NI, self.weight)
        low_NR = functional.linear(functional.dropout(x_NI, self.lora.dropout, self.training), self.lora_a)
        # In place: the product above is fresh, and its backward does not read it.
        y_NO.addmm_(low_NR, self.lora_b.mT, alpha=self.lora.alpha / self.lora.rank)
        return y_NO.view(*x.shape[:-1], -1)
