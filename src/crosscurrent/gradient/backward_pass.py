"""The backward pass: head first, then the rows from the top, the embedding with the lowest row.

The head is computed again slice by slice, in place of keeping logits. Its input gradient goes to CPU
memory, where the topmost row finds it as its head gradient.

Legend: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from crosscurrent.gradient.accumulator import (
    DoubleBuffers,
    Fetch,
    GradientAccumulator,
    Prefetcher,
    row_fetches,
    send_head_gradient,
)
from crosscurrent.gradient.call import Call
from crosscurrent.gradient.checkpoints import record_key
from crosscurrent.gradient.plan import Column
from crosscurrent.gradient.shadow import ShadowParameters
from crosscurrent.gradient.store import CheckpointStore
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
        self._store = store
        self._buffers = DoubleBuffers(call, lanes)
        self._scratch = call.fmt.make_scratch(call.device)
        self._shadows = ShadowParameters(parameters)
        self._rows = list(reversed(call.plan.rows[call.first_row :]))
        # With a single column a row's head gradient is what the row above is about to send, so nothing can
        # come in ahead of it.
        self._lookahead = 1 if len(call.plan.columns) > 1 else 0
        self._head_columns = [column for column in call.plan.columns if call.has_targets(column)]

    def run(self, grad_loss: Tensor) -> list[Tensor | None]:
        """The gradients of the parameters, in their order."""
        prefetcher = Prefetcher(list(self._fetches()), lookahead=self._lookahead)
        seed = grad_loss / self._call.count
        for column in self._head_columns:
            prefetcher.advance()
            self._head(column, seed)
        accumulator = GradientAccumulator(
            call=self._call,
            store=self._store,
            shadows=self._shadows,
            buffers=self._buffers,
            prefetcher=prefetcher,
            scratch=self._scratch,
        )
        for row in self._rows:
            accumulator.run(row)
        return self._shadows.gradients()

    def _fetches(self) -> Iterator[Fetch]:
        def fetch_top(column: Column) -> None:
            key = record_key(len(self._call.plan.rows), column)
            self._buffers.records.fetch(self._store[key], self._call.fmt.top(column).num_bytes)

        for column in self._head_columns:
            yield partial(fetch_top, column)
        for row in self._rows:
            yield from row_fetches(self._call, self._store, self._buffers, row)

    def _head(self, column: Column, seed: Tensor) -> None:
        call, fmt = self._call, self._call.fmt
        x_BTE = fmt.unpack_input(fmt.top(column), self._buffers.records.receive(), self._scratch)
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
        self._buffers.records.release()
        if self._rows:
            send_head_gradient(call, self._store, self._buffers, column, gradient_BTE)
