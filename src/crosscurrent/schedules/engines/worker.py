"""What a worker does, in a process of its own or on another machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

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


def work(program: bytes, strategies: Sequence[Strategy], limit: int | None, share: Share) -> Exploration:
    """Run one share. One thread: workers share the cores."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        path.write_bytes(program)
        return explore(load(path), strategies, limit=limit, share=share)
