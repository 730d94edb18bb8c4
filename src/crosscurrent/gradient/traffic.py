"""All transfers of a backward pass: its double buffers, and what comes in next.

Note [What is brought in when]
    Two sequences of work need checkpoints: the replays of all rows, and the head and the cells of all rows.
    Each has buffers of its own. Cells have double buffers: one slot is computed with, the other is filled. A
    replay may take less time than its copy, so that its input is brought in while the cells of the row before
    are computed, and there are as many slots as that needs: for a row of a few columns it is all of them. A
    fetch is issued as soon as a slot is free and the CPU bytes were sent.
    A replay's record is there since the forward pass. A cell's head gradient and KV checkpoint are not: they
    are sent by the row above, or the head, and by the row's own replay. A fetch that were issued before that
    send would find no event to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from crosscurrent.gradient.call import Call
from crosscurrent.gradient.checkpoints import CellKey, head_gradient_key, kv_key, record_key
from crosscurrent.gradient.plan import Column, Row
from crosscurrent.gradient.store import CheckpointStore
from crosscurrent.gradient.transfer import NUM_SLOTS, Lanes, Rings, make_outgoing
from crosscurrent.kvcache.buffers import PlainKVBuffer
from crosscurrent.operators.copies import copy_all

REPLAY_SLOTS = 3
"""Slots for the inputs of replays."""


class Fetch(NamedTuple):
    """What one piece of work needs, and whether it was sent."""

    is_sent: Callable[[], bool]
    start: Callable[[], None]


class Prefetcher:
    """Starts the fetches of a sequence of work, in order, each as early as it can be."""

    def __init__(self, fetches: Iterable[Fetch], num_slots: int) -> None:
        self._waiting = deque(fetches)
        self._num_slots = num_slots
        self._in_flight = 0
        self.top_up()

    def top_up(self) -> None:
        """Start what can be started. Call it after each send."""
        while self._waiting and self._in_flight < self._num_slots and self._waiting[0].is_sent():
            self._waiting.popleft().start()
            self._in_flight += 1

    def done(self) -> None:
        """The oldest piece of work has released its slots."""
        self._in_flight -= 1
        self.top_up()


class Traffic:
    """The device side of all transfers of a backward pass."""

    def __init__(self, call: Call, lanes: Lanes, store: CheckpointStore) -> None:
        self._call = call
        self._store = store
        fmt, plan = call.fmt, call.plan
        self._rows = list(reversed(plan.rows[call.first_row :]))
        records = max(fmt.record(row, column).num_bytes for row in plan.rows for column in plan.columns)
        gradients = max(fmt.head_gradient(column).num_bytes for column in plan.columns)
        caches = max(
            (fmt.kv(row, column).num_bytes for row in self._rows for column in fmt.kv_columns()), default=0
        )
        rings = [(records, REPLAY_SLOTS), *((size, NUM_SLOTS) for size in (records, gradients, caches))]
        incoming = call.graphs.keep("incoming", Rings).ready(lanes, rings)
        self._replay_records, self._records, self._gradients_in, self._caches_in = incoming
        self._gradients_out, self._caches_out = make_outgoing(lanes, [gradients, caches])
        # The row that a head gradient or a KV checkpoint in CPU memory is for.
        self._sent: dict[CellKey, int] = {}
        # The head's input first: it is needed first.
        self._cells = Prefetcher(self._cell_fetches(), NUM_SLOTS)
        self._replays = Prefetcher(self._replay_fetches(), REPLAY_SLOTS)

    def receive_replay(self) -> Tensor:
        """The bytes of the record for the next column that is replayed."""
        return self._replay_records.receive()

    def release_replay(self) -> None:
        """The work that reads that record has been issued."""
        self._replay_records.release()
        self._replays.done()

    def receive_top(self) -> Tensor:
        """The bytes of the next column's input of the head."""
        return self._records.receive()

    def release_top(self) -> None:
        """The work that reads them has been issued."""
        self._records.release()
        self._cells.done()

    def receive_cell(
        self, caches: Sequence[PlainKVBuffer], row: Row, column: Column, scratch: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The bytes of a cell's record, and its head gradient, or None where that is zero.

        Sets the caches to what they were at the column's left edge, if they are not there already. The head
        gradient is received first, since it was fetched last: one wait on the device then does for all.
        """
        fmt, gradient = self._call.fmt, None
        if self._has_head_gradient(row, column):
            gradient = fmt.head_gradient(column).views(self._gradients_in.receive())[0]
        if column in fmt.kv_columns():
            fmt.unpack_caches(caches, row, column, self._caches_in.receive(), scratch)
            self._caches_in.release()
        return self._records.receive(), gradient

    def release_cell(self, row: Row, column: Column) -> None:
        """The work that reads a cell's record and head gradient has been issued."""
        if self._has_head_gradient(row, column):
            self._gradients_in.release()
        self._records.release()
        self._cells.done()

    def send_gradient(self, row: int, column: Column, gradient_BTE: Tensor) -> None:
        """Send the head gradient of a row's cell out."""
        layout, key = self._call.fmt.head_gradient(column), head_gradient_key(column)
        copy_all(layout.views(self._gradients_out.acquire()), [gradient_BTE])
        self._gradients_out.send(self._store[key], layout.num_bytes)
        self._sent[key] = row
        self._cells.top_up()

    def send_caches(
        self, caches: Sequence[PlainKVBuffer], row: Row, column: Column, scratch: Tensor | None
    ) -> None:
        """Send the caches out as they are, at the left edge of a column, if it has a KV checkpoint."""
        fmt, key = self._call.fmt, kv_key(column)
        if column not in fmt.kv_columns():
            return
        fmt.pack_caches(caches, row, column, self._caches_out.acquire(), scratch)
        self._caches_out.send(self._store[key], fmt.kv(row, column).num_bytes)
        self._sent[key] = row.index
        self._cells.top_up()

    def _has_head_gradient(self, row: Row, column: Column) -> bool:
        """Whether a cell's head gradient comes from CPU memory; without targets it is zero at the top."""
        return row.index < len(self._call.plan.rows) - 1 or self._call.has_targets(column)

    def _replay_fetches(self) -> Iterator[Fetch]:
        for row in self._rows:
            for column in self._call.plan.columns[:-1]:
                yield Fetch(lambda: True, partial(self._fetch_replay, row, column))

    def _cell_fetches(self) -> Iterator[Fetch]:
        for column in self._call.plan.columns:
            if self._call.has_targets(column):
                yield Fetch(lambda: True, partial(self._fetch_top, column))
        for row in self._rows:
            for column in reversed(self._call.plan.columns):
                yield Fetch(partial(self._is_sent, row, column), partial(self._fetch_cell, row, column))

    def _is_sent(self, row: Row, column: Column) -> bool:
        """Whether what a cell needs has been sent, or will never be."""
        keys = [head_gradient_key(column)] if self._has_head_gradient(row, column) else []
        keys += [kv_key(column)] if column in self._call.fmt.kv_columns() else []
        return all(self._sent.get(key) == row.index for key in keys)

    def _fetch_replay(self, row: Row, column: Column) -> None:
        size = self._call.fmt.record(row, column).num_bytes
        self._replay_records.fetch(self._store[record_key(row.index, column)], size)

    def _fetch_top(self, column: Column) -> None:
        key = record_key(len(self._call.plan.rows), column)
        self._records.fetch(self._store[key], self._call.fmt.top(column).num_bytes)

    def _fetch_cell(self, row: Row, column: Column) -> None:
        fmt = self._call.fmt
        self._records.fetch(self._store[record_key(row.index, column)], fmt.record(row, column).num_bytes)
        if column in fmt.kv_columns():
            self._caches_in.fetch(self._store[kv_key(column)], fmt.kv(row, column).num_bytes)
        if self._has_head_gradient(row, column):
            size = fmt.head_gradient(column).num_bytes
            self._gradients_in.fetch(self._store[head_gradient_key(column)], size)
