"""What a worker does, in a process of its own or on another machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from crosscurrent.schedules.engines.counting import counted
from crosscurrent.schedules.explore import Exploration, Share, explore
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.storage import load, save
from crosscurrent.schedules.strategies import Strategy


def packed(program: Program) -> bytes:
    """A program as it travels: the bytes of its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        save(program, path)
        return path.read_bytes()


def work(
    program: bytes,
    strategies: Sequence[Strategy],
    limit: int | None,
    share: Share,
    hand_over: Callable[[int], object] | None = None,
) -> Exploration:
    """Run one share. One thread: workers share the cores. ``hand_over`` is told how many more were tried."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        path.write_bytes(program)
        return explore(load(path), counted(strategies, hand_over), limit=limit, share=share)
