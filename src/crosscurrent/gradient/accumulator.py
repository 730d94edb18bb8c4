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
from crosscurrent.gradient.shadow import ShadowParameters
from crosscurrent.gradient.traffic import Traffic
from crosscurrent.gradient.windows import Windows, advance_column, attend_column, pass_column
from crosscurrent.kvcache.buffers import PlainKVBuffer
from crosscurrent.kvcache.replay_log import unpack
from crosscurrent.model.rope import Angles
from crosscurrent.model.transformer import Block, Transformer


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


class _Embedding(nn.Module):
    """`embed` as a module, for the same reason."""

    def __init__(self, gpt_model: Transformer) -> None:
        super().__init__()
        self.gpt_model = gpt_model

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.gpt_model.embed(ids_BT)


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
        with self.shadows.summing(cell, call.graphs) as leaves:
            for column in reversed(columns):
                self._cell(row, column, caches, partial(functional_call, cell, leaves, tie_weights=False))

    def _cell(
        self, row: Row, column: Column, caches: Sequence[PlainKVBuffer], cell: Callable[..., Tensor]
    ) -> None:
        call = self.call
        slot, gradient_BTE = self.traffic.receive_cell(caches, row, column, self.scratch)
        x_BTE, windows = self._unpack_record(row, column, slot)
        if gradient_BTE is None:
            gradient_BTE = torch.zeros_like(x_BTE)
        passes_down = row.index > call.first_row or call.embedding_trains

        def work(
            x_BTE: Tensor, gradient_BTE: Tensor, cos: Tensor, sin: Tensor, *rows: Tensor
        ) -> list[Tensor]:
            x_BTE = x_BTE.detach().requires_grad_(passes_down)
            lists = iter(rows)
            seen_here = [seen.with_rows(lists) for seen in windows]
            with torch.enable_grad():
                top_BTE = cell((x_BTE, (cos, sin), caches, seen_here))
            torch.autograd.backward(top_BTE, gradient_BTE)
            return [] if x_BTE.grad is None else [x_BTE.grad]

        rows = [rows for seen in windows for rows in seen.rows]
        inputs = x_BTE, gradient_BTE, *call.angles(column), *rows
        bottom = call.graphs.call(call.work_key("cell", row, column), work, *inputs)
        del x_BTE, gradient_BTE, inputs
        self.traffic.release_cell(row, column)
        if bottom:
            self._pass_down(row, column, bottom[0])

    def _replay(self, row: Row, column: Column, caches: Sequence[PlainKVBuffer]) -> None:
        """Advance the caches over a column and keep them for the cell to the right of it."""
        call = self.call
        x_BTE, windows = self._unpack_record(row, column, self.traffic.receive_replay())

        def work(x_BTE: Tensor, cos: Tensor, sin: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
            lists = iter(rows)
            seen_here = [seen.with_rows(lists) for seen in windows]
            *lower, last = row.layers
            for layer, cache, seen in zip(lower, caches, seen_here, strict=False):
                block = call.setup.block(layer)
                x_BTE = block.finish(x_BTE, pass_column(*block.project(x_BTE, (cos, sin)), cache, seen))
            keys_values = call.setup.block(last).project_kv(x_BTE, (cos, sin))
            advance_column(*keys_values, caches[-1], seen_here[-1])
            return ()

        rows = [rows for seen in windows for rows in seen.rows]
        key = call.work_key("replay", row, column)
        call.graphs.call(key, work, x_BTE, *call.angles(column), *rows)
        self.traffic.release_replay()
        self.traffic.send_caches(caches, row, call.plan.columns[column.index + 1], self.scratch)

    def _unpack_record(self, row: Row, column: Column, slot: Tensor) -> tuple[Tensor, list[Windows]]:
        """A cell's input, and what its chunks see in each layer."""
        fmt = self.call.fmt
        layout = fmt.record(row, column)
        x_BTE = fmt.unpack_input(layout, slot, self.scratch)
        chunks = [chunk.index for chunk in column.chunks]
        evictions = unpack(self.call.log.cell(row.layers, chunks), layout.views(slot)[-1])
        each = len(chunks)
        return x_BTE, [self.call.windows(evictions[i : i + each]) for i in range(0, len(evictions), each)]

    def _pass_down(self, row: Row, column: Column, bottom_BTE: Tensor) -> None:
        """Send the bottom head gradient out for the row below, or give it to the embedding."""
        if row.index > self.call.first_row:
            self.traffic.send_gradient(row.index - 1, column, bottom_BTE)
            return
        gpt_model = self.call.setup.gpt_model
        leaves = {
            f"gpt_model.embedding.{name}": leaf
            for name, leaf in self.shadows.replacing(gpt_model.embedding).items()
        }
        ids_BT = self.call.ids_BT[:, column.start : column.stop]
        with torch.enable_grad():
            embedded_BTE = functional_call(_Embedding(gpt_model), leaves, (ids_BT,), tie_weights=False)
        torch.autograd.backward(embedded_BTE, bottom_BTE)
