"""The races of the past, brought back: variants of the gradient, made from outside.

Each is a context in which the gradient has one race again, as told in ``crosscurrent.stress.history``. Where
a race was a missing wait, the wait is dropped at its call site. (The gradient's lanes remember what they
waited for and leave out waits that add nothing; they take a dropped one for made, so no other replaces it.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from crosscurrent.gradient.checkpoints import kv_key
from crosscurrent.gradient.forward_pass import ForwardPass
from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.gradient.traffic import Traffic
from crosscurrent.gradient.transfer import HostBuffer, Incoming, Outgoing, Uploads
from crosscurrent.stress.edges import drop_edge
from crosscurrent.suite.recorded import replaced

Variant = Callable[[], AbstractContextManager[None]]


@contextmanager
def _dropped_while(
    owner: type, method: str, where: str, applies: Callable[..., bool] = lambda *_: True
) -> Iterator[None]:
    """Drop the waits at ``where`` that are made during calls of a method, if ``applies`` to its arguments."""
    depth = 0

    def make(before: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            inside = applies(*args)
            depth += inside
            try:
                return before(*args, **kwargs)
            finally:
                depth -= inside

        return call

    with replaced((owner, method, make)), drop_edge(where, call="wait_event", when=lambda: depth > 0):
        yield


def _waits_of_fetch() -> tuple[str, str]:
    """Where ``Incoming.fetch`` waits for main to be done with the slot, and for the CPU bytes."""
    lines, start = inspect.getsourcelines(Incoming.fetch)
    consumed, written = (start + at for at, line in enumerate(lines) if "wait_event" in line)
    return f"gradient/transfer.py:{consumed}", f"gradient/transfer.py:{written}"


def layer_input_sent_early() -> AbstractContextManager[None]:
    """1: the layer inputs of all rows but the lowest leave without a wait for main."""
    return _dropped_while(ForwardPass, "_send_record", "Outgoing.send", lambda _pass, row, *_: row.index > 0)


def embedding_sent_early() -> AbstractContextManager[None]:
    """2: the embedding's output does."""
    return _dropped_while(ForwardPass, "_send_record", "Outgoing.send", lambda _pass, row, *_: row.index == 0)


def checkpoint_read_while_written() -> AbstractContextManager[None]:
    """3: nobody waits for the forward's last copies when it ends."""
    return _dropped_while(LongContextGradientModel, "_run_forward", "Lanes._join")


def row_start_without_main() -> AbstractContextManager[None]:
    """4: the first fetches of a row do not wait for main to be done with the row above."""
    consumed, _ = _waits_of_fetch()
    return _dropped_while(
        Traffic,
        "_fetch_replay",
        consumed,
        lambda traffic, row, column: row is not traffic._rows[0] and column.index < 2,
    )


def slot_refilled_early() -> AbstractContextManager[None]:
    """5: from a row's third cell on, fetches do not wait for main to be done with the slot."""
    consumed, _ = _waits_of_fetch()
    return _dropped_while(
        Traffic,
        "_fetch_cell",
        consumed,
        lambda traffic, _row, column: column.index < len(traffic._call.plan.columns) - 2,
    )


def head_gradient_sent_early() -> AbstractContextManager[None]:
    """6: the bottom head gradients of cells leave without a wait for main."""
    return _dropped_while(
        Traffic,
        "send_gradient",
        "Outgoing.send",
        lambda traffic, row, *_: row < len(traffic._call.plan.rows) - 1,  # else it is the head's own
    )


def source_freed_while_copied() -> AbstractContextManager[None]:
    """7: what leaves is a copy of the slot, which is freed as soon as the transfer was issued."""

    def make(_: Any) -> Any:
        def send(outgoing: Outgoing, target: HostBuffer, num_bytes: int) -> None:
            index = outgoing._num_sent % len(outgoing._slots)
            outgoing._num_sent += 1
            lanes = outgoing._lanes
            lane = lanes.device_to_host
            source = outgoing._slots[index][:num_bytes].clone()
            if event := lane.behind(lanes.main.record()):
                lane.stream.wait_event(event)
            with lane.issue():
                target.bytes[:num_bytes].copy_(source, non_blocking=True)
            target.written = outgoing._drained[index] = lane.record()

        return send

    return replaced((Outgoing, "send", make))


def scratch_shared() -> AbstractContextManager[None]:
    """8: KV checkpoints are quantized on the lane that takes them out, in main's scratch."""

    def make(_: Any) -> Any:
        def send_caches(traffic: Any, caches: Any, row: Any, column: Any, scratch: Any) -> None:
            fmt, key, out = traffic._call.fmt, kv_key(column), traffic._caches_out
            if column not in fmt.kv_columns():
                return
            lanes = out._lanes
            lane = lanes.device_to_host
            # Copies, so that the caches themselves are main's alone.
            copies = [SimpleNamespace(entries_NGLD=cache.entries_NGLD.clone()) for cache in caches]
            slot = out.acquire()
            if event := lane.behind(lanes.main.record()):
                lane.stream.wait_event(event)
            with lane.issue():
                fmt.pack_caches(copies, row, column, slot, scratch)
            for copy in copies:
                copy.entries_NGLD.record_stream(lane.stream)
            out.send(traffic._store[key], fmt.kv(row, column).num_bytes)
            traffic._sent[key] = row.index
            traffic._cells.top_up()

        return send_caches

    return replaced((Traffic, "send_caches", make))


def head_gradient_overwritten() -> AbstractContextManager[None]:
    """9: main does not wait for the head gradient that comes in. So its CPU slice, which is written again
    after main has computed the cell, may be written before it was read."""
    return _dropped_while(Traffic, "receive_cell", "Incoming.receive")


def last_write_not_awaited() -> AbstractContextManager[None]:
    """10: below the topmost row, fetches do not wait for the last cell's write, which they read."""
    _, written = _waits_of_fetch()
    return _dropped_while(
        Traffic, "_fetch_cell", written, lambda traffic, row, _column: row is not traffic._rows[0]
    )


def second_batch_only() -> AbstractContextManager[None]:
    """11: two staging buffers for token ids take turns; nobody asks whether the last copy is done."""

    def make(_: Any) -> Any:
        def idle(uploads: Uploads) -> tuple[HostBuffer, torch.cuda.Event]:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            if len(uploads._buffers) < 2:
                uploads._buffers.append((HostBuffer(pinned=True), event))
            else:
                uploads._buffers.append(uploads._buffers.pop(0))
            return uploads._buffers[-1]

        return idle

    return replaced((Uploads, "_idle", make))


VARIANTS: Mapping[str, Variant] = {
    "layer-input-sent-early": layer_input_sent_early,
    "embedding-sent-early": embedding_sent_early,
    "checkpoint-read-while-written": checkpoint_read_while_written,
    "row-start-without-main": row_start_without_main,
    "slot-refilled-early": slot_refilled_early,
    "head-gradient-sent-early": head_gradient_sent_early,
    "source-freed-while-copied": source_freed_while_copied,
    "scratch-shared": scratch_shared,
    "head-gradient-overwritten": head_gradient_overwritten,
    "last-write-not-awaited": last_write_not_awaited,
    "second-batch-only": second_batch_only,
}
"""By the name of the race."""
