"""The forward pass: column by column, layer by layer, checkpoints on their way to the CPU.

What does not look across tokens runs once per layer and column; only the cache and the attention go
chunk by chunk. Nothing as long as the sequence is kept on the device but the token ids.

Legend: B batch, T tokens, E hidden size, H query heads, G query groups, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from crosscurrent.gradient.call import Call
from crosscurrent.gradient.checkpoints import Layout, record_key
from crosscurrent.gradient.plan import Column, Row
from crosscurrent.gradient.store import CheckpointStore
from crosscurrent.gradient.transfer import HostBuffer, Lanes, Outgoing, make_outgoing
from crosscurrent.gradient.windows import join_tokens, pass_column
from crosscurrent.kvcache.placement import Eviction
from crosscurrent.kvcache.policies import Policy, make_policy
from crosscurrent.kvcache.replay_log import joined_slots, pack_, unpack
from crosscurrent.model.attention import attend, summed_weights


class ForwardPass:
    """Computes the loss of one call and, given a store, leaves there what its backward pass needs."""

    def __init__(self, call: Call, lanes: Lanes, store: CheckpointStore | None) -> None:
        self._call = call
        self._store = store
        plan, shapes = call.plan, call.fmt.shapes
        self._out: Outgoing | None = None
        if store is not None:
            records = [call.fmt.record(row, column) for row in plan.rows for column in plan.columns]
            (self._out,) = make_outgoing(lanes, [max(layout.num_bytes for layout in records)])
        self._scratch = call.fmt.make_scratch(call.device)
        layers = range(call.setup.num_layers)
        self._caches = [call.forward_cache(layer) for layer in layers]
        self._policies = [
            call.graphs.keep(("policy", layer), partial(make_policy, call.setup.cache, layer))
            for layer in layers
        ]
        for policy in self._policies:
            policy.reset(shapes.batch_size, shapes.num_groups, call.device)

    def run(self) -> Tensor:
        """The loss: a scalar in float32, or float64 for a float64 model."""
        call = self._call
        total = torch.zeros((), dtype=call.count.dtype, device=call.device)
        for column in call.plan.columns:
            x_BTE = self._through_layers(column)
            if call.has_targets(column):
                self._keep_input(len(call.plan.rows), column, x_BTE)
                self._add_losses(total, column, x_BTE)
        return total / call.count

    def _through_layers(self, column: Column) -> Tensor:
        call = self._call
        x_BTE = call.setup.gpt_model.embed(call.ids_BT[:, column.start : column.stop])
        position = call.position(column)
        decided = _Decided(self._policies, column)
        for row in call.plan.rows:
            # Below the first row that trains nothing will be computed again, and evictions are only told.
            again = row.index >= call.first_row
            layout = call.fmt.record(row, column) if again else call.fmt.slots(row, column)
            if again:
                self._pack_input(layout, x_BTE)
            if any(self._policies[layer].needs_weights for layer in row.layers):
                x_BTE, evictions = self._row_by_chunk(row, column, x_BTE, position)
            else:
                evictions = [decided.of(layer, call.fmt.shapes.cache_lengths[layer]) for layer in row.layers]
                x_BTE = self._row_at_once(row, column, x_BTE, position, evictions)
            if self._store is not None:
                for layer, placed in zip(row.layers, evictions, strict=True):
                    for eviction in placed:
                        call.log.append(layer, eviction)
                self._send_record(row, column, layout, self._store[record_key(row.index, column)])
        return x_BTE

    def _row_at_once(
        self,
        row: Row,
        column: Column,
        x_BTE: Tensor,
        position: Tensor,
        evictions: Sequence[Sequence[Eviction]],
    ) -> Tensor:
        """For policies that do not look at attention: all evictions of the column are known beforehand."""
        call = self._call

        def work(x_BTE: Tensor, position: Tensor, slots: Tensor) -> tuple[Tensor]:
            angles = call.setup.gpt_model.angles(position, column.length)
            for layer, windows in zip(row.layers, call.windows(row, column, slots), strict=True):
                block = call.setup.block(layer)
                q_k_v = block.project(x_BTE, angles)
                x_BTE = block.finish(x_BTE, pass_column(*q_k_v, self._caches[layer], windows))
            return (x_BTE,)

        slots = call.shared_slots(itertools.chain(*evictions))
        (x_BTE,) = call.graphs.call(call.work_key("forward", row, column), work, x_BTE, position, slots)
        return x_BTE

    def _row_by_chunk(
        self, row: Row, column: Column, x_BTE: Tensor, position: Tensor
    ) -> tuple[Tensor, list[list[Eviction]]]:
        """For policies that decide by the attention of the chunks before."""
        call = self._call

        def work(x_BTE: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            angles = call.setup.gpt_model.angles(position, column.length)
            evictions: list[Eviction] = []
            for layer in row.layers:
                block = call.setup.block(layer)
                attended_BHTD, placed = self._attend_by_chunk(layer, column, *block.project(x_BTE, angles))
                evictions += placed
                x_BTE = block.finish(x_BTE, attended_BHTD)
            return x_BTE, joined_slots(evictions, like=x_BTE)

        x_BTE, slots = call.graphs.call(call.work_key("forward", row, column), work, x_BTE, position)
        return x_BTE, call.evictions(row, column, slots)

    def _attend_by_chunk(
        self, layer: int, column: Column, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor
    ) -> tuple[Tensor, list[Eviction]]:
        policy = self._policies[layer]
        policy.filled = min(column.start, self._call.fmt.shapes.cache_lengths[layer])
        opened = self._caches[layer].open(k_BGTD, v_BGTD, policy.filled)
        outs, evictions = [], []
        for chunk in column.chunks:
            tokens = slice(chunk.start - column.start, chunk.stop - column.start)
            eviction = policy.place(chunk.length)
            keys_BGSD, values_BGSD = opened.place(eviction, tokens)
            out_BHCD, lse_BHC = attend(q_BHTD[:, :, tokens], keys_BGSD, values_BGSD)
            policy.observe(eviction, summed_weights(q_BHTD[:, :, tokens], keys_BGSD, lse_BHC))
            outs.append(out_BHCD)
            evictions.append(eviction)
        return join_tokens(outs), evictions

    def _pack_input(self, layout: Layout, x_BTE: Tensor) -> None:
        if self._out is None:
            return
        self._call.fmt.pack_input(x_BTE, layout, self._out.acquire(), self._scratch)

    def _send_record(self, row: Row, column: Column, layout: Layout, target: HostBuffer) -> None:
        """Send a row's input, and behind it the evictions of its layers, which are known by now."""
        if self._out is None or not layout.num_bytes:
            return
        log = self._call.log
        chunks = [chunk.index for chunk in column.chunks]
        evictions = log.cell(row.layers, chunks)
        pack_(evictions, layout.views(self._out.acquire())[-1])
        self._out.send(target, layout.num_bytes)
        # From here on the log's slots are in CPU memory, and what was on the device is free.
        log.replace(row.layers, chunks, unpack(evictions, layout.views(target.bytes)[-1]))

    def _keep_input(self, row: int, column: Column, x_BTE: Tensor) -> None:
        if self._store is None or self._out is None:
            return
        layout = self._call.fmt.top(column)
        self._pack_input(layout, x_BTE)
        self._out.send(self._store[record_key(row, column)], layout.num_bytes)

    def _add_losses(self, total: Tensor, column: Column, x_BTE: Tensor) -> None:
        call = self._call
        for tokens in call.head_slices(column):
            local = slice(tokens.start - column.start, tokens.stop - column.start)
            total += call.setup.head_model.loss_sum(x_BTE[:, local], call.targets_BT[:, tokens])


class _Decided:
    """The evictions of one column by policies that need no weights.

    One layer decides for all whose caches are as long: their policies would say the same.
    """

    def __init__(self, policies: Sequence[Policy], column: Column) -> None:
        self._policies = policies
        self._column = column
        self._by_length: dict[int, list[Eviction]] = {}

    def of(self, layer: int, cache_length: int) -> list[Eviction]:
        """Those of one layer."""
        if cache_length not in self._by_length:
            policy = self._policies[layer]
            self._by_length[cache_length] = [policy.place(chunk.length) for chunk in self._column.chunks]
        return self._by_length[cache_length]
