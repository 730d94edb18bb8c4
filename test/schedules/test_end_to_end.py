"""Random programs in torch itself, under simulated CUDA: recorder, detector and explorer against each other.

The same equivalence as in ``test_against_detector``, through everything that a user's program goes through.
Values are generic integers: updates multiply and add, every copy that overwrites something has values of its
own and is preceded by a copy of what it overwrites, and all that is read stays alive to be compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import crosscurrent
from crosscurrent.schedules.explore import memory_choices
from crosscurrent.schedules.recording import keep_values
from crosscurrent.schedules.replay import Replayer
from crosscurrent.schedules.strategies import Classes

pytestmark = pytest.mark.simulation

PROGRAMS = int(os.environ.get("CROSSCURRENT_PROGRAMS", "200")) // 2
SIZE = 128  # elements of 8 bytes: two units of the allocator
MOST_CLASSES = 4000

Command = tuple[int, int, int, int]


class Machine:
    """Carries out commands on streams, device tensors and pinned tensors."""

    def __init__(self) -> None:
        self._streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self._events = [torch.cuda.Event()]
        self._device = [torch.arange(SIZE, device="cuda")]
        self._pinned = [torch.arange(SIZE).pin_memory(), torch.arange(SIZE).pin_memory()]
        self._kept: list[Tensor] = []
        self._number = 0
        torch.cuda.synchronize()

    def run(self, commands: Sequence[Command]) -> None:
        kinds: list[Callable[[int, int, int], None]] = [
            self._update,
            self._read,
            self._to_host,
            self._to_device,
            self._host_update,
            self._wait_stream,
            self._wait_stream,
            self._record,
            self._wait,
            self._synchronize,
            self._allocate,
            self._free,
            self._record_stream,
            self._hand_on,
        ]
        for kind, *numbers in commands:
            kinds[kind % len(kinds)](*numbers)

    def _next(self) -> int:
        self._number += 1
        return 2 * self._number + 1

    def _stream(self, number: int) -> torch.cuda.Stream:
        return self._streams[number % 3]

    def _any(self, tensors: list[Tensor], number: int, part: int) -> Tensor:
        whole = tensors[number % len(tensors)]
        return [whole, whole[: SIZE // 2], whole[SIZE // 2 :], whole[::2], whole[1::2]][part % 5]

    def _update(self, stream: int, which: int, part: int) -> None:
        if self._device:
            with torch.cuda.stream(self._stream(stream)):
                self._any(self._device, which, part).mul_(self._next()).add_(self._next())

    def _read(self, stream: int, which: int, part: int) -> None:
        if self._device:
            with torch.cuda.stream(self._stream(stream)):
                self._kept.append(self._any(self._device, which, part) * 1)

    def _to_host(self, stream: int, which: int, part: int) -> None:
        if self._device:
            host = self._pinned[part % 2]
            with torch.cuda.stream(self._stream(stream)):
                value = self._device[which % len(self._device)] * self._next() + self._next()
                self._kept += [host.to("cuda", non_blocking=True), value]
                host.copy_(value, non_blocking=True)

    def _to_device(self, stream: int, which: int, part: int) -> None:
        with torch.cuda.stream(self._stream(stream)):
            self._device.append(self._pinned[part % 2].to("cuda", non_blocking=True))

    def _host_update(self, _: int, which: int, part: int) -> None:
        self._any(self._pinned, which, part).mul_(self._next()).add_(self._next())

    def _wait_stream(self, waiter: int, other: int, _: int) -> None:
        self._stream(waiter).wait_stream(self._stream(other))

    def _record(self, stream: int, _: int, __: int) -> None:
        self._events.append(self._stream(stream).record_event())

    def _wait(self, stream: int, event: int, _: int) -> None:
        self._stream(stream).wait_event(self._events[event % len(self._events)])

    def _synchronize(self, stream: int, how: int, _: int) -> None:
        if how % 3 == 0:
            torch.cuda.synchronize()
        elif how % 3 == 1:
            self._stream(stream).synchronize()
        else:
            self._events[stream % len(self._events)].synchronize()

    def _allocate(self, stream: int, _: int, __: int) -> None:
        with torch.cuda.stream(self._stream(stream)):
            self._device.append(torch.full((SIZE,), self._next(), device="cuda"))

    def _free(self, which: int, _: int, __: int) -> None:
        if self._device:
            del self._device[which % len(self._device)]

    def _record_stream(self, stream: int, which: int, _: int) -> None:
        if self._device:
            self._device[which % len(self._device)].record_stream(self._stream(stream))

    def _hand_on(self, owner: int, reader: int, how: int) -> None:
        """A tensor is read on another stream and freed, and its memory may go to the next one."""
        with torch.cuda.stream(self._stream(owner)):
            tensor = torch.full((SIZE,), self._next(), device="cuda")
        if how % 5:
            self._stream(reader).wait_stream(self._stream(owner))
        with torch.cuda.stream(self._stream(reader)):
            self._kept.append(tensor * 1)
        if how % 3 == 1:
            tensor.record_stream(self._stream(reader))
        if how % 3 == 2:
            self._stream(owner).wait_stream(self._stream(reader))
        del tensor
        self._allocate(owner, 0, 0)


def verdicts(commands: Sequence[Command]) -> tuple[bool, bool]:
    """Whether there is a finding, and whether some schedule gives other values."""
    with crosscurrent.simulate():
        with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
            machine = Machine()
            machine.run(commands)
        program = keeper.program()
        del machine
    for reuse in memory_choices(program, every=True):
        replayer = Replayer(program, reuse)
        for number, proposal in enumerate(Classes().proposals(replayer.space)):
            if not replayer.run(proposal.linear).same:
                return bool(seen.findings), True
            assert number < MOST_CLASSES, "too many classes of schedules that all agree"
    return bool(seen.findings), False


commands = st.lists(st.tuples(st.integers(0, 13), *[st.integers(0, 11)] * 3), min_size=1, max_size=10)


@settings(max_examples=PROGRAMS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(commands=commands)
def test_no_finding_if_and_only_if_all_schedules_agree(commands: Sequence[Command]) -> None:
    found, differs = verdicts(commands)
    assert found == differs
