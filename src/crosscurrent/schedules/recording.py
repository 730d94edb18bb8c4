"""Keeps what it takes to run a watched program again.

``keep_values`` sits beside a watch that keeps its trace. Before an op runs it copies what it has not seen
yet: the content of blocks that are older than the watch. After the op it notes the op, its arguments as
views of blocks, and where the results lie; numbers and pageable tensors are kept by value. What the host
gets to see (an item, a copy in pageable memory) becomes a block of the host's own, to be compared.

Memory that nobody wrote is poisoned in the recorded run, too, so that a program which reads it does in a
replay what it did when recorded.

Tensors are never held on to: that would change when memory is freed, and so what is watched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import Tensor

from crosscurrent.errors import WrongUseError
from crosscurrent.races.watch import Watch
from crosscurrent.schedules import arguments
from crosscurrent.schedules.arguments import Before, kept, quiet
from crosscurrent.schedules.calls import Calls
from crosscurrent.schedules.contents import Contents
from crosscurrent.schedules.program import Action, Program, View
from crosscurrent.schedules.unseen import Unseen
from crosscurrent.trace.access import Kind, Signature, signature
from crosscurrent.trace.memory import Block
from crosscurrent.trace.records import Op, Record


def keep_values(watch: Watch) -> Keeper:
    """Keep the values of what ``watch`` sees, so that it can be run again.

    >>> with watch(trace=True) as seen, keep_values(seen) as keeper:
    ...     loss = step()
    ...     keeper.name({"loss": loss})
    >>> program = keeper.program()

    ``watch`` has to be entered, with ``trace=True``, right before. Costs a copy of all memory that is
    older than the watch, and some microseconds for each op.
    """
    return Keeper(watch)


class Keeper:
    """What was kept. A context manager; made by :func:`keep_values`, used once."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._tracer = watch.tracer
        self._records = watch.records
        if self._records:
            raise WrongUseError("keep_values has to be entered before the watched program runs")
        # By identity, as hashing an overload takes a microsecond; each is kept alive beside its signature.
        self._signatures: dict[int, tuple[Any, Signature]] = {}
        self._before = threading.local()
        self._lock = self._tracer.lock
        self._actions: dict[int, tuple[Action, ...]] = {}
        self._contents = Contents(self._tracer)
        self._calls = Calls(self._contents, self._actions)
        self._unseen = Unseen(self._contents, self._calls, self._actions)
        self._names: dict[str, View] = {}
        self._open = False

    def __enter__(self) -> Keeper:
        self._tracer.observers.append(self)
        self._tracer.add_sink(self._feed)
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock, quiet(self._tracer):
            self._unseen.settle_all()
        self._tracer.observers.remove(self)
        self._open = False

    def name(self, values: Mapping[str, Tensor]) -> None:
        """Say what the final values are called; their content now is what a replay must reproduce.

        Call it last, inside of the context. A tensor in pageable memory has its name from how it got there.
        """
        if not self._open:
            raise WrongUseError("name the final values inside of 'with keep_values(...) as keeper:'")
        with self._lock, quiet(self._tracer):
            self._unseen.settle_all()
            for name, tensor in values.items():
                block = self._contents.block_of(tensor)
                if block is None or tensor.numel() == 0:
                    continue
                self._meet(block, tensor)
                self._names[name] = View.of(tensor, block.index)
                self._contents.recorded[name] = kept(tensor)

    def program(self) -> Program:
        """The program. Its trace ends where the watch or the keeper was left."""
        return Program(
            records=tuple(self._records),
            info=self._tracer.info,
            buffers=dict(self._contents.buffers),
            actions=dict(self._actions),
            host_reads=tuple(self._contents.host_reads),
            names=dict(self._names),
            recorded=dict(self._contents.recorded),
            device=self._contents.device,
        )

    # -- calls -----------------------------------------------------------------------------------------

    def before_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to run: keep what it may be about to change."""
        sign = self._signature(func)
        if sign.kind is Kind.NOTHING:
            return
        with self._lock, quiet(self._tracer):
            self._tracer.begin()
            before = Before(random=arguments.random_state(func))
            for tensor in arguments.tensors_in((args, kwargs)):
                block = self._contents.block_of(tensor)
                if block is not None:
                    self._meet(block, tensor)
                    before.blocks.add(block.index)
            before.host_wrote = self._unseen.host_wrote(before.blocks)
            if before.blocks:
                for tensor in arguments.written(sign, args, kwargs):
                    if self._contents.block_of(tensor) is None:
                        before.pageable[id(tensor)] = kept(tensor)
            self._before.call = before

    def after_call(
        self, records: list[Record], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """The op ran, and was turned into ``records``."""
        sign = self._signature(func)
        if sign.kind is Kind.NOTHING:
            return
        ops = [record for record in records if isinstance(record, Op) and record.accesses]
        with self._lock, quiet(self._tracer):
            before = getattr(self._before, "call", None)
            self._before.call = None
            if before is None:  # a higher-order op: it only reads its arguments, so that it is not too late
                before = Before(random=None)
                for tensor in arguments.tensors_in((args, kwargs)):
                    if (block := self._contents.block_of(tensor)) is not None:
                        self._meet(block, tensor)
                        before.blocks.add(block.index)
            self._contents.meet_results(sign, ops, args, out)
            # An operation whose values cannot be kept has no action, which a replay reports by its name.
            with contextlib.suppress(arguments.NotKeptError):
                self._calls.act(sign, ops, func, args, kwargs, out, before)
            self._unseen.look_again({access.block for op in ops for access in op.accesses})

    def _feed(self, record: Record) -> None:
        """The next record: of interest are operations that no call made."""
        if self._open and isinstance(record, Op) and record.accesses and not self._tracer.in_call:
            with self._lock, quiet(self._tracer):
                self._unseen.add(record)

    def _meet(self, block: Block, tensor: Tensor) -> None:
        self._contents.meet(block, tensor)
        if block.index in self._unseen.pending:
            self._unseen.settle(block.index)

    def _signature(self, func: Any) -> Signature:
        known = self._signatures.get(id(func))
        if known is None:
            known = self._signatures[id(func)] = func, signature(func)
        return known[1]
