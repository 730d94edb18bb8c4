"""The backward pass of one row: replay it once, then its cells from right to left.

Note [What a cell needs]
    The replay runs the row forward without autograd, for the caches only: it leaves a KV checkpoint at
    the left edges that need one. Its last layer computes keys and values, no attention and no MLP. A cell
    then needs its input, the evictions of its layers, the gradient at its top, the caches at its left
    edge, and the gradient of the caches at its right edge, which the cell to the right left on the device
    (Note [Versions of a cache are lists of rows]). It adds to the gradients of the parameters, and yields
    the gradient at its bottom, and that of the caches at its left edge.

Legend: B batch, T tokens of a column, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from crosscurrent.gradient.call import Call
from crosscurrent.gradient.plan import Column, Row
from crosscurrent.gradient.shadow import RowSums, ShadowParameters
from crosscurrent.gradient.traffic import Traffic
from crosscurrent.gradient.windows import Windows, advance_column, attend_column, pass_column
from crosscurrent.kvcache.buffers import PlainKVBuffer
from crosscurrent.model.rope import Angles
from crosscurrent.model.transformer import Block
from crosscurrent.operators.rows import add_at_


class _Cell(nn.Module):
    """The layers of a row as one module, so that all parameters can be replaced in one call."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self,
        x_BTE: Tensor,
        angles: Angles,
        caches: Sequence[PlainKVBuffer],
        windows: Sequence[Windows],
    ) -> Tensor:
        for block, cache, seen in zip(self.blocks, caches, windows, strict=True):
            assert isinstance(block, Block)
            x_BTE = block.finish(x_BTE, attend_column(*block.project(x_BTE, angles), cache, seen))
        return x_BTE


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientAccumulator:
    """Adds the gradients of one row after the other to the shadow parameters."""

    call: Call
    shadows: ShadowParameters
    traffic: Traffic
    scratch: Tensor | None

    def run(self, row: Row) -> None:
        """Replay a row, then compute its cells from right to left."""
        call, columns = self.call, self.call.plan.columns
        caches = [call.gradient_cache(row, layer) for layer in row.layers]
        for cache in caches:
            assert cache.grads_NGLD is not None
            # What is right of the last column: nothing.
            cache.grads_NGLD.zero_()
        for column in columns[:-1]:
            self._replay(row, column, caches)
        cell = _Cell([call.setup.block(layer) for layer in row.layers])
        sums = RowSums(self.shadows, cell, call.graphs)
        for column in reversed(columns):
            self._cell(row, column, caches, partial(functional_call, cell, sums.leaves, tie_weights=False))
        sums.finish()

    def _cell(
        self, row: Row, column: Column, caches: Sequence[PlainKVBuffer], cell: Callable[..., Tensor]
    ) -> None:
        call = self.call
        slot, gradient_BTE = self.traffic.receive_cell(caches, row, column, self.scratch)
        x_BTE, slots = self._unpack_record(row, column, slot)
        if gradient_BTE is None:
            gradient_BTE = torch.zeros_like(x_BTE)
        passes_down = row.index > call.first_row or call.embedding_trains

        def work(x_BTE: Tensor, gradient_BTE: Tensor, position: Tensor, slots: Tensor) -> list[Tensor]:
            x_BTE = x_BTE.detach().requires_grad_(passes_down)
            angles = call.setup.gpt_model.angles(position, column.length)
            with torch.enable_grad():
                top_BTE = cell((x_BTE, angles, caches, call.windows(row, column, slots, backward=True)))
            torch.autograd.backward(top_BTE, gradient_BTE)
            return [] if x_BTE.grad is None else [x_BTE.grad]

        inputs = x_BTE, gradient_BTE, call.position(column), slots
        release = partial(self.traffic.release_cell, row, column)
        bottom = call.graphs.call(call.work_key("cell", row, column), work, *inputs, when_read=release)
        del x_BTE, gradient_BTE, inputs
        if bottom:
            self._pass_down(row, column, bottom[0])

    def _replay(self, row: Row, column: Column, caches: Sequence[PlainKVBuffer]) -> None:
        """Advance the caches over a column and keep them for the cell to the right of it."""
        call = self.call
        x_BTE, slots = self._unpack_record(row, column, self.traffic.receive_replay())

        def work(x_BTE: Tensor, position: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
            angles = call.setup.gpt_model.angles(position, column.length)
            windows = call.windows(row, column, slots)
            *lower, last = row.layers
            for layer, cache, seen in zip(lower, caches, windows, strict=False):
                block = call.setup.block(layer)
                x_BTE = block.finish(x_BTE, pass_column(*block.project(x_BTE, angles), cache, seen))
            keys_values = call.setup.block(last).project_kv(x_BTE, angles)
            advance_column(*keys_values, caches[-1], windows[-1])
            return ()

        inputs = x_BTE, call.position(column), slots
        key = call.work_key("replay", row, column)
        call.graphs.call(key, work, *inputs, when_read=self.traffic.release_replay)
        self.traffic.send_caches(caches, row, call.plan.columns[column.index + 1], self.scratch)

    def _unpack_record(self, row: Row, column: Column, slot: Tensor) -> tuple[Tensor, Tensor]:
        """A cell's input, and the slots of its evictions, layer by layer and chunk by chunk."""
        fmt, call = self.call.fmt, self.call
        layout = fmt.record(row, column)
        x_BTE = fmt.unpack_input(layout, slot, self.scratch)
        if fmt.logs_slots:
            return x_BTE, layout.views(slot)[-1]
        return x_BTE, call.shared_slots(call.log.cell(row.layers, [chunk.index for chunk in column.chunks]))

    def _pass_down(self, row: Row, column: Column, bottom_BTE: Tensor) -> None:
        """Send the bottom head gradient out for the row below, or give it to the embedding."""
        if row.index > self.call.first_row:
            self.traffic.send_gradient(row.index - 1, column, bottom_BTE)
            return
        # By hand: autograd would make a second gradient of the whole embedding, to add it.
        total_VE = self.shadows.gradient(self.call.setup.gpt_model.embedding.weight)
        ids_BT = self.call.ids_BT[:, column.start : column.stop]
        add_at_(total_VE, ids_BT.flatten(), bottom_BTE.flatten(0, 1))
