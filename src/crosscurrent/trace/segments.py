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
    if not _has_pools():
        return ()
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return segments


def given_back(device: int) -> int:
    """The bytes that the caching allocator of a device gave back to the driver so far."""
    if not _has_pools():
        return 0
    stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats["reserved_bytes"]["all"]["freed"])


class Segments:
    """The streams of addresses.

    Looks at a device's segments once, and again for an address in none, or when memory was given back to the
    driver meanwhile: its addresses may be another stream's by now.
    """

    def __init__(self, look: Snapshot = snapshot, given_back: Callable[[int], int] = given_back) -> None:
        self._look = look
        self._given_back = given_back
        self._seen: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
        """For each device: how much had been given back, and start, stop and stream of each, in order."""

    def stream_of(self, device: int, address: int) -> int:
        """The stream that memory at ``address`` was allocated on; the default stream where nobody knows."""
        given_back = self._given_back(device)
        age, segments = self._seen.get(device, (-1, []))
        stream = _find(segments, address) if age == given_back else None
        if stream is None:
            segments = sorted(
                (each["address"], each["address"] + each["total_size"], each["stream"])
                for each in self._look()
                if each["device"] == device
            )
            self._seen[device] = given_back, segments
            stream = _find(segments, address)
        return DEFAULT_STREAM if stream is None else stream


def _find(segments: Sequence[tuple[int, int, int]], address: int) -> int | None:
    place = bisect_right(segments, address, key=lambda each: each[0]) - 1
    if place < 0:
        return None
    _, stop, stream = segments[place]
    return stream if address < stop else None


def _has_pools() -> bool:
    return bool(torch.cuda.get_allocator_backend() == "native")
