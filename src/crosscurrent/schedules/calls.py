"""How a call that was seen becomes what has to be run again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from crosscurrent.schedules import arguments
from crosscurrent.schedules.arguments import Before, kept
from crosscurrent.schedules.contents import Contents, elements
from crosscurrent.schedules.program import Action, Call, Given, View
from crosscurrent.trace.access import Kind, Signature
from crosscurrent.trace.records import HOST, Op

_COPIES = frozenset({Kind.COPY, Kind.TO_COPY, Kind.PIN, Kind.FOREACH_COPY})


def copy(target: View, source: View | Tensor) -> Call:
    """The call of a copy."""
    return Call("aten::copy_", (target, source), {}, (None,))


class Calls:
    """Writes down the actions of operations that come from calls."""

    def __init__(self, contents: Contents, actions: dict[int, tuple[Action, ...]]) -> None:
        self._contents = contents
        self._actions = actions

    def act(
        self, sign: Signature, ops: list[Op], func: Any, args: Any, kwargs: Any, out: Any, before: Before
    ) -> None:
        """Note how to run a call again that was turned into ``ops``."""
        if not ops:
            return
        if sign.kind in _COPIES:
            self._copies(sign, ops, args, out)
        elif sign.kind is Kind.RESIZE:
            self.moves(ops)
        else:
            self._call(sign, ops, func, args, kwargs, out, before)
        if before.host_wrote:
            self._actions[ops[0].index] = (Given((), before.host_wrote), *self._actions[ops[0].index])

    def _call(
        self, sign: Signature, ops: list[Op], func: Any, args: Any, kwargs: Any, out: Any, before: Before
    ) -> None:
        written = {id(tensor) for tensor in arguments.written(sign, args, kwargs)}
        main = ops[-1]
        staged: dict[View, View] = {}

        def convert(tensor: Tensor) -> Any:
            block = self._contents.block_of(tensor)
            if block is not None:
                view = View.of(tensor, block.index)
                if id(tensor) not in written and not block.on_device and main.lane != HOST:
                    return staged.setdefault(view, self._contents.scratch(view))
                return view
            if id(tensor) in written:
                return self._contents.host_read(main, tensor, before.pageable.get(id(tensor)))
            return kept(tensor)

        new_args, new_kwargs = arguments.convert(args, convert), arguments.convert(kwargs, convert)
        results = tuple(self._result(main, item, before, args, kwargs) for item in arguments.flat(out))
        name = str(func.name()) if isinstance(func, torch._ops.OpOverload) else func  # type: ignore[no-untyped-call]
        call = Call(name, new_args, new_kwargs, results)
        for op in ops[:-1]:
            if op.lane == HOST:
                self._actions[op.index] = tuple(copy(temporary, view) for view, temporary in staged.items())
            elif not written:
                # What the host waits for in the middle of the op: how many elements there are.
                probes = tuple(None if view is None else self._contents.scratch(view) for view in results)
                self._actions[op.index] = (call._replace(results=probes),)
            else:
                self._actions[op.index] = ()
        if before.random is not None:
            self._actions[main.index] = (self._random(call, main, func, args, kwargs, out, before.random),)
        else:
            self._actions[main.index] = (call,)

    def _random(
        self, call: Call, op: Op, func: Any, args: Any, kwargs: Any, out: Any, state: Tensor
    ) -> Action:
        """An op that draws: from the same state where that gives the same values, else what came out."""
        if self._contents.device == "cpu" and arguments.reproduces(func, args, kwargs, out, state):
            return call._replace(random=state)
        views = {
            View.of(tensor, block.index): tensor
            for tensor in arguments.tensors_in((args, kwargs, out))
            if (block := self._contents.block_of(tensor)) is not None
        }
        written = {access.block for access in op.accesses if access.write}
        # What a random fill overwrites is no input of it.
        reads = {access.block for access in op.accesses if not access.write} - written
        return Given(
            tuple((view, kept(tensor)) for view, tensor in views.items() if view.block in reads),
            tuple((view, kept(tensor)) for view, tensor in views.items() if view.block in written),
        )

    def _copies(self, sign: Signature, ops: list[Op], args: Any, out: Any) -> None:
        if sign.kind is Kind.FOREACH_COPY:
            pairs = list(zip(args[0], args[1], strict=True))
        elif sign.kind is Kind.COPY:
            pairs = [(args[0], args[1])]
        else:
            pairs = [(out, args[1] if sign.name == "aten.copy.default" else args[0])]
        waiting = list(ops)
        for target, source in pairs:
            if target.numel() == 0:
                continue
            to, from_ = self._contents.block_of(target), self._contents.block_of(source)
            if to is None and from_ is None:
                continue
            mine = [waiting.pop(0)]
            while to is not None and not any(a.write and a.block == to.index for a in mine[-1].accesses):
                mine.append(waiting.pop(0))
            self._copy(mine, target, source)

    def _copy(self, ops: list[Op], target: Tensor, source: Tensor) -> None:
        """One copy, of which the host may do a part: then it goes through a temporary."""
        to, from_ = self._contents.block_of(target), self._contents.block_of(source)
        value: Any = kept(source) if from_ is None else View.of(source, from_.index)
        into = self._contents.host_read(ops[-1], target, None) if to is None else View.of(target, to.index)
        reader = next((op for op in ops if any(not access.write for access in op.accesses)), None)
        if reader is not None and reader is not ops[-1] and isinstance(value, View):
            temporary = self._contents.scratch(value)
            self._actions[reader.index] = (copy(temporary, value),)
            value = temporary
        for op in ops[:-1]:
            self._actions.setdefault(op.index, ())
        self._actions[ops[-1].index] = (copy(into, value),)

    def moves(self, ops: Iterable[Op]) -> None:
        """Storages that grew: their content moved to another block."""
        for op in ops:
            old, new = op.accesses
            self._actions[op.index] = (copy(elements(new), elements(old)),)

    def _result(self, op: Op, item: Any, before: Before, args: Any, kwargs: Any) -> View | None:
        if item is None:
            return None
        if not isinstance(item, Tensor):
            if not isinstance(item, bool | int | float | complex):
                return None  # an object of C++ code, such as the handle of a collective: it has no value
            return self._contents.host_read(op, torch.tensor(item), None)
        if item.numel() == 0:
            return None
        block = self._contents.block_of(item)
        if block is not None:
            return None if block.index in before.blocks else View.of(item, block.index)
        if any(arguments.same_storage(item, tensor) for tensor in arguments.tensors_in((args, kwargs))):
            return None
        return self._contents.host_read(op, item, None)
