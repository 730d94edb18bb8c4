"""What autograd nodes were made on: their streams, and their devices. See Note [Backward on streams]."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from crosscurrent.trace.patches import Patches
    from crosscurrent.trace.simulate.queues import Queue
    from crosscurrent.trace.simulate.simulation import Simulation

_LOG_LIMIT = 1 << 17
_DEVICE = "_crosscurrent_device"
_FunctionNode = torch.autograd.function.BackwardCFunction

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
current_node: Callable[[], Any] = torch._C._current_autograd_node


class StreamLog:
    """Which stream of one device was current in one thread, by sequence numbers of autograd nodes.

    It keeps the last 65,536 changes at least; older nodes are taken to be from the oldest one.
    """

    def __init__(self, queue: Queue) -> None:
        self._numbers = [0]
        self._queues = [queue]

    def changed(self, queue: Queue, since: int | None = None) -> None:
        """Nodes made from now on, or since a sequence number, belong to ``queue``."""
        number = sequence_number() if since is None else since
        if self._numbers[-1] >= number:
            if len(self._queues) > 1 and self._queues[-2] is queue:
                del self._numbers[-1], self._queues[-1]
            else:
                self._queues[-1] = queue
        elif self._queues[-1] is not queue:
            self._numbers.append(number)
            self._queues.append(queue)
        if len(self._numbers) > _LOG_LIMIT:
            half = _LOG_LIMIT // 2
            del self._numbers[:half], self._queues[:half]

    def at(self, number: int) -> Queue:
        """The stream that was current when the node with this number was made."""
        return self._queues[max(0, bisect_right(self._numbers, number) - 1)]

    def knows_only(self, queue: Queue) -> bool:
        """Whether no other stream is remembered."""
        return len(self._queues) == 1 and self._queues[0] is queue


def patch_functions(simulation: Simulation, patches: Patches) -> None:
    """Remember the device of each call of an ``autograd.Function`` with several results.

    When no gradient arrives for one of them, the engine makes zeros "where the result was", which it
    believes to be the CPU.
    """
    real = vars(torch.autograd.Function)["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        results = real(cls, *args, **kwargs)
        if type(results) is tuple:
            for result in results:
                node: Any = result.grad_fn if isinstance(result, Tensor) else None
                if isinstance(node, _FunctionNode):
                    setattr(node, _DEVICE, simulation.memory.device_of(result))
                    break
        return results

    patches.set(torch.autograd.Function, "apply", classmethod(apply))


def device_of_running_function() -> int | None:
    """The device of the ``autograd.Function`` whose backward is about to run, if there is one."""
    node = current_node()
    device: int | None = getattr(node, _DEVICE, None) if isinstance(node, _FunctionNode) else None
    return device
