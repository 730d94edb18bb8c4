"""The backward pass: head first, then the rows from the top, the embedding with the lowest row.

The head is computed again slice by slice, in place of keeping logits. Its input gradient goes to CPU
memory, where the topmost row finds it as its head gradient.

Legend: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from crosscurrent.gradient.accumulator import GradientAccumulator
from crosscurrent.gradient.call import Call
from crosscurrent.gradient.plan import Column
from crosscurrent.gradient.shadow import ShadowParameters
from crosscurrent.gradient.store import CheckpointStore
from crosscurrent.gradient.traffic import Traffic
from crosscurrent.gradient.transfer import Lanes
from crosscurrent.model.transformer import Head


class _HeadLoss(nn.Module):
    """The head's loss as a module, so that its parameters can be replaced."""

    def __init__(self, head_model: Head) -> None:
        super().__init__()
        self.head_model = head_model

    def forward(self, x_BTE: Tensor, targets_BT: Tensor) -> Tensor:
        return self.head_model.loss_sum(x_BTE, targets_BT)


class BackwardPass:
    """Computes the gradients of one call from the checkpoints that its forward pass left."""

    def __init__(
        self, call: Call, lanes: Lanes, store: CheckpointStore, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._call = call
        self._traffic = Traffic(call, lanes, store)
        self._scratch = call.fmt.make_scratch(call.device)
        self._shadows = ShadowParameters(parameters)
        self._rows = list(reversed(call.plan.rows[call.first_row :]))

    def run(self, grad_loss: Tensor) -> list[Tensor | None]:
        """The gradients of the parameters, in their order."""
        seed = grad_loss / self._call.count
        for column in self._call.plan.columns:
            if self._call.has_targets(column):
                self._head(column, seed)
        accumulator = GradientAccumulator(
            call=self._call, shadows=self._shadows, traffic=self._traffic, scratch=self._scratch
        )
        for row in self._rows:
            accumulator.run(row)
        return self._shadows.gradients()

    def _head(self, column: Column, seed: Tensor) -> None:
        call, fmt = self._call, self._call.fmt
        x_BTE = fmt.unpack_input(fmt.top(column), self._traffic.receive_top(), self._scratch)
        head = _HeadLoss(call.setup.head_model)
        leaves = self._shadows.replacing(head)
        gradient_BTE = torch.zeros_like(x_BTE)
        for tokens in call.head_slices(column):
            local = slice(tokens.start - column.start, tokens.stop - column.start)
            x_slice = x_BTE[:, local].detach().requires_grad_(bool(self._rows))
            with torch.enable_grad():
                arguments = (x_slice, call.targets_BT[:, tokens])
                loss = functional_call(head, leaves, arguments, tie_weights=False)
            torch.autograd.backward(loss, seed)
            if x_slice.grad is not None:
                gradient_BTE[:, local] = x_slice.grad
        self._traffic.release_top()
        if self._rows:
            self._traffic.send_gradient(len(call.plan.rows) - 1, column, gradient_BTE)
