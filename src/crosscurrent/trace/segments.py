"""Whose pool device memory came from that was allocated before anybody watched.

PyTorch's caching allocator keeps a pool for each stream, and a freed block goes back to that of the stream
that it was allocated on, whoever used it meanwhile. The allocator's snapshot tells each segment's stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from crosscurrent.trace.recorder import DEFAULT_STREAM

Snapshot: TypeAlias = Callable[[], Sequence[dict[str, Any]]]


def snapshot() -> Sequence[dict[str, Any]]:
    """The segments of the caching allocator; none of an allocator that has no pools for streams."""
    if torch.cuda.get_allocator_backend() != "native":
        return ()
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return segments


class Segments:
    """The streams of addresses. Looks at the allocator once, and again for an address in no segment."""

    def __init__(self, look: Snapshot = snapshot) -> None:
        self._look = look
        self._segments: list[tuple[int, int, int, int]] = []
        """Device, start, stop and stream of each, in order."""

    def stream_of(self, device: int, address: int) -> int:
        """The stream that memory at ``address`` was allocated on; the default stream where nobody knows."""
        stream = self._find(device, address)
        if stream is None:
            self._segments = sorted(
                (each["device"], each["address"], each["address"] + each["total_size"], each["stream"])
                for each in self._look()
            )
            stream = self._find(device, address)
        return DEFAULT_STREAM if stream is None else stream

    def _find(self, device: int, address: int) -> int | None:
        place = bisect_right(self._segments, (device, address), key=lambda each: each[:2]) - 1
        if place < 0:
            return None
        on, _, stop, stream = self._segments[place]
        return stream if on == device and address < stop else None
