"""Operations that no call made: the host through a pointer, kernels that were only declared, storages
that were resized."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crosscurrent.schedules.calls import Calls, copy
from crosscurrent.schedules.contents import Contents, elements
from crosscurrent.schedules.program import Action, Given, View
from crosscurrent.trace.records import GRAPH_POOL, HOST, Access, Op


class Unseen:
    """Writes down what came of such operations. What they write is there only later, and is seen then."""

    def __init__(self, contents: Contents, calls: Calls, actions: dict[int, tuple[Action, ...]]) -> None:
        self._contents = contents
        self._calls = calls
        self._actions = actions
        self.pending: dict[int, list[_Pending]] = {}
        """By block: the writes whose values are still to be seen."""
        # Blocks of which the host has a pointer, and what it is known to have left there.
        self._exposed: dict[int, Tensor] = {}

    def add(self, op: Op) -> None:
        """The host through NumPy, a declared kernel, a storage that was resized."""
        if op.name == GRAPH_POOL:
            # Graphs are replayed with memory of their own: that they share a pool is a matter of order alone.
            self._actions[op.index] = ()
            return
        there = [self._contents.meet_storage(access.block, access.dtype) for access in op.accesses]
        reads = [access for access in op.accesses if not access.write]
        writes = [access for access in op.accesses if access.write]
        if len(reads) == len(writes) == 1 and reads[0].block != writes[0].block and "resize" in op.name:
            if reads[0].block in self._contents.buffers:
                self._calls.moves([op])
            return
        if not all(there):
            return
        blocks = {access.block for access in op.accesses}
        for block in blocks & self.pending.keys():
            self.settle(block)
        wrote = self.host_wrote(blocks)
        given = tuple((elements(access), self._contents.content(access)) for access in reads)
        if op.lane == HOST:
            self._exposed.update((block, self._contents.all_of(block)) for block in blocks)
        if op.lane == HOST and not writes:
            copies = [copy(self._contents.host_read(op, value, None), view) for view, value in given]
            self._actions[op.index] = (Given((), wrote), *copies) if wrote else tuple(copies)
            return
        self._actions[op.index] = (Given((), wrote), Given(given, ()))
        for access in writes:
            self.pending.setdefault(access.block, []).append(_Pending(op, access))

    def settle(self, block: int) -> None:
        """What the host or a declared kernel wrote to a block is there by now."""
        for op, access in self.pending.pop(block):
            *others, given = self._actions[op.index]
            assert isinstance(given, Given), "only these wait for their values"
            writes = (*given.writes, (elements(access), self._contents.content(access)))
            self._actions[op.index] = (*others, given._replace(writes=writes))
        self.look_again({block})

    def look_again(self, blocks: set[int]) -> None:
        """What is in these blocks now is known."""
        for block in blocks & self._exposed.keys():
            if self._contents.storage(block) is not None:
                self._exposed[block] = self._contents.all_of(block)

    def host_wrote(self, blocks: set[int]) -> tuple[tuple[View, Tensor], ...]:
        """What the host wrote to these blocks behind everybody's back, through a pointer that it has."""
        wrote = []
        for block in blocks & self._exposed.keys():
            now = self._contents.all_of(block)
            if not torch.equal(now, self._exposed[block]):
                wrote.append((View(block, "uint8", tuple(now.shape), (1,), 0), now))
        return tuple(wrote)

    def settle_all(self) -> None:
        """See what can still be seen."""
        for block in list(self.pending):
            if self._contents.storage(block) is not None:
                self.settle(block)


class _Pending(NamedTuple):
    """A write whose values are there only later."""

    op: Op
    access: Access
