"""The processes that a checked program starts: nobody watches them, and the report has to say so."""

from __future__ import annotations

import multiprocessing
import multiprocessing.spawn
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Processes:
    """Counts the processes that this one spawns, and ends those that a failed program leaves behind.

    Only a spawned process can use CUDA; a forked one can not, and has no races to be missed.
    """

    def __init__(self) -> None:
        self._num_spawned = 0
        self._num_ended = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count from here on."""
        here = os.getpid()
        real: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data

        def get_preparation_data(name: str) -> dict[str, Any]:
            if os.getpid() == here and name != "ignore":  # as it calls its own server of forks
                self._num_spawned += 1
            return real(name)

        vars(multiprocessing.spawn)["get_preparation_data"] = get_preparation_data
        try:
            yield
        finally:
            vars(multiprocessing.spawn)["get_preparation_data"] = real

    def end_left(self) -> None:
        """End the processes that are still there. They may wait for ever for what a program that failed
        was to send them, and Python would wait for them before it ends."""
        left = [child for child in multiprocessing.active_children() if not child.daemon]
        for child in left:
            child.terminate()
        for child in left:
            child.join()
        self._num_ended += len(left)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person has to know about them, one paragraph each."""
        remarks = []
        if self._num_spawned:
            what = _processes(self._num_spawned)
            remarks.append(
                f"{what} that the program spawned ran, but nobody watched {_them(self._num_spawned)}: check "
                "what runs there in a program of its own"
            )
        if self._num_ended:
            remarks.append(
                f"{_processes(self._num_ended)} that the program left running when it failed had to be ended"
            )
        return tuple(remarks)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count:,} processes"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"
