"""The backward pass of one row: replay it once, then its cells from right to left.

Note [What a cell needs]
    The replay runs the row forward without autograd, for the caches only: it leaves a KV checkpoint at
    the left edges that need one. Its last layer computes keys and values, no attention and no MLP. A cell
    then needs its input, the evictions of its layers, the gradient at its top, the caches at its left
    edge, and the gradient of the caches at its right edge, which the cell to the right left on the device
    (Note [Reversible cache]). It adds to the gradients of the parameters, and yields the gradient at its
    bottom, and that of the caches at its left edge.

Legend: B batch, T tokens of a column, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from crosscurrent.gradient.call import Call
from crosscurrent.gradient.checkpoints import head_gradient_key, kv_key, record_key
from crosscurrent.gradient.plan import Column, Row
from crosscurrent.gradient.reversible import LayerCache, advance_column, attend_column, for_keys_and_values
from crosscurrent.gradient.shadow import ShadowParameters
from crosscurrent.gradient.store import CheckpointStore
from crosscurrent.gradient.transfer import Incoming, Lanes, Outgoing, make_incoming, make_outgoing
from crosscurrent.kvcache.placement import Eviction
from crosscurrent.kvcache.replay_log import unpack
from crosscurrent.model.transformer import Block, Transformer

Fetch = Callable[[], None]


class Prefetcher:
    """Starts to bring in what the next piece of work needs while the current one is computed."""

    def __init__(self, fetches: Sequence[Fetch], *, lookahead: int) -> None:
        self._fetches = iter(fetches)
        for _ in range(lookahead):
            self.advance()

    def advance(self) -> None:
        """Call it before each piece of work."""
        fetch = next(self._fetches, None)
        if fetch is not None:
            fetch()


class DoubleBuffers:
    """The device side of all transfers of a backward pass."""

    def __init__(self, call: Call, lanes: Lanes) -> None:
        fmt, plan = call.fmt, call.plan
        rows = plan.rows[call.first_row :]
        records = max(fmt.record(row, column).num_bytes for row in plan.rows for column in plan.columns)
        gradients = max(fmt.head_gradient(column).num_bytes for column in plan.columns)
        caches = max(
            (fmt.kv(row, column).num_bytes for row in rows for column in fmt.kv_columns()), default=0
        )
        self.records: Incoming
        self.records, self.gradients_in, self.caches_in = make_incoming(lanes, [records, gradients, caches])
        self.gradients_out: Outgoing
        self.gradients_out, self.caches_out = make_outgoing(lanes, [gradients, caches])


class _Cell(nn.Module):
    """The layers of a row as one module, so that all parameters can be replaced in one call."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self, x_BTE: Tensor, start: int, caches: Sequence[LayerCache], evictions: Sequence[Sequence[Eviction]]
    ) -> Tensor:
        for block, cache, placed in zip(self.blocks, caches, evictions, strict=True):
            assert isinstance(block, Block)
            x_BTE = block.finish(x_BTE, attend_column(*block.project(x_BTE, start), cache, placed))
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
    store: CheckpointStore
    shadows: ShadowParameters
    buffers: DoubleBuffers
    prefetcher: Prefetcher
    scratch: Tensor | None

    def run(self, row: Row) -> None:
        """Replay a row, then compute its cells from right to left."""
        columns = self.call.plan.columns
        caches = [self.call.make_cache(layer, with_gradient=True) for layer in row.layers]
        for column in columns[:-1]:
            self._replay(row, column, caches)
        cell = _Cell([self.call.setup.block(layer) for layer in row.layers])
        leaves = self.shadows.replacing(cell)
        for column in reversed(columns):
            self.prefetcher.advance()
            gradient_BTE = self._receive_gradient(row, column)
            self._restore(row, column, caches)
            x_BTE, evictions = self._receive_record(row, column)
            x_BTE = x_BTE.detach().requires_grad_(
                row.index > self.call.first_row or self.call.embedding_trains
            )
            with torch.enable_grad():
                arguments = (x_BTE, column.start, caches, evictions)
                top_BTE = functional_call(cell, leaves, arguments, tie_weights=False)
            if gradient_BTE is None:
                torch.autograd.backward(top_BTE, torch.zeros_like(top_BTE))
            else:
                torch.autograd.backward(top_BTE, gradient_BTE)
                self.buffers.gradients_in.release()
            self.buffers.records.release()
            del top_BTE, gradient_BTE
            if x_BTE.grad is not None:
                self._pass_down(row, column, x_BTE.grad)

    def _replay(self, row: Row, column: Column, caches: Sequence[LayerCache]) -> None:
        """Advance the caches over a column and keep them for the cell to the right of it."""
        self.prefetcher.advance()
        x_BTE, evictions = self._receive_record(row, column)
        *lower, last = row.layers
        for layer, cache, placed in zip(lower, caches, evictions, strict=False):
            block = self.call.setup.block(layer)
            x_BTE = block.finish(x_BTE, attend_column(*block.project(x_BTE, column.start), cache, placed))
        keys_values = self.call.setup.block(last).project_kv(x_BTE, column.start)
        advance_column(*keys_values, caches[-1], evictions[-1])
        self.buffers.records.release()
        following = self.call.plan.columns[column.index + 1]
        if following in self.call.fmt.kv_columns():
            out = self.buffers.caches_out
            self.call.fmt.pack_caches(caches, row, following, out.acquire(), self.scratch)
            out.send(self.store[kv_key(following)], self.call.fmt.kv(row, following).num_bytes)

    def _receive_gradient(self, row: Row, column: Column) -> Tensor | None:
        """A cell's head gradient, or None if it is zero.

        It is received first, since it was fetched last: one wait on the device then does for all.
        """
        if not has_head_gradient(self.call, row, column):
            return None
        return self.call.fmt.head_gradient(column).views(self.buffers.gradients_in.receive())[0]

    def _receive_record(self, row: Row, column: Column) -> tuple[Tensor, list[list[Eviction]]]:
        """A cell's input, and its evictions by layer and chunk, ready for keys and values."""
        fmt = self.call.fmt
        layout, slot = fmt.record(row, column), self.buffers.records.receive()
        x_BTE = fmt.unpack_input(layout, slot, self.scratch)
        chunks = [chunk.index for chunk in column.chunks]
        slots = layout.views(slot)[-1].long()
        evictions = unpack(self.call.log.cell(row.layers, chunks), slots)
        placed = [for_keys_and_values(eviction) for eviction in evictions]
        each = len(chunks)
        return x_BTE, [placed[i : i + each] for i in range(0, len(placed), each)]

    def _restore(self, row: Row, column: Column, caches: Sequence[LayerCache]) -> None:
        """Set the caches to the column's left edge, if they are not there already."""
        if column in self.call.fmt.kv_columns():
            slot = self.buffers.caches_in.receive()
            self.call.fmt.unpack_caches(caches, row, column, slot, self.scratch)
            self.buffers.caches_in.release()

    def _pass_down(self, row: Row, column: Column, bottom_BTE: Tensor) -> None:
        """Send the bottom head gradient out for the row below, or give it to the embedding."""
        if row.index > self.call.first_row:
            send_head_gradient(self.call, self.store, self.buffers, column, bottom_BTE)
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


def has_head_gradient(call: Call, row: Row, column: Column) -> bool:
    """Whether a cell's head gradient comes from CPU memory; without targets it is zero at the top."""
    return row.index < len(call.plan.rows) - 1 or call.has_targets(column)


def send_head_gradient(
    call: Call, store: CheckpointStore, buffers: DoubleBuffers, column: Column, gradient_BTE: Tensor
) -> None:
    """Send a gradient out to where the row below will find it."""
    layout = call.fmt.head_gradient(column)
    layout.views(buffers.gradients_out.acquire())[0].copy_(gradient_BTE)
    buffers.gradients_out.send(store[head_gradient_key(column)], layout.num_bytes)


def row_fetches(call: Call, store: CheckpointStore, buffers: DoubleBuffers, row: Row) -> Iterator[Fetch]:
    """What `GradientAccumulator.run` receives for a row, in its order."""
    columns = call.plan.columns
    kv_columns = call.fmt.kv_columns()

    def fetch(column: Column, *, replay: bool) -> None:
        record = call.fmt.record(row, column)
        buffers.records.fetch(store[record_key(row.index, column)], record.num_bytes)
        if replay:
            return
        if column in kv_columns:
            buffers.caches_in.fetch(store[kv_key(column)], call.fmt.kv(row, column).num_bytes)
        if has_head_gradient(call, row, column):
            size = call.fmt.head_gradient(column).num_bytes
            buffers.gradients_in.fetch(store[head_gradient_key(column)], size)

    for column in columns[:-1]:
        yield partial(fetch, column, replay=True)
    for column in reversed(columns):
        yield partial(fetch, column, replay=False)
