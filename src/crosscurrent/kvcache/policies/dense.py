"""dense: nothing is evicted, so a sequence may not be longer than the cache.

Usage: `Dense(cache_length)`; see `crosscurrent.kvcache.policies` for the calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crosscurrent.kvcache.placement import Eviction, SharedEviction
from crosscurrent.kvcache.policies.base import check_room


class Dense:
    """Keeps everything: exact attention, within the cache."""

    needs_weights = False

    def __init__(self, cache_length: int) -> None:
        self._cache_length = cache_length
        self.filled = 0

    def reset(self, batch_size: int, num_groups: int, device: torch.device) -> None:
        self.filled = 0

    def place(self, length: int) -> Eviction:
        total = self.filled + length
        if total > self._cache_length:
            raise ValueError(
                f"dense keeps every token, but the sequence has at least {total} and the cache "
                f"{self._cache_length} slots; use a longer cache_length, or lastrec or h2o, which evict"
            )
        check_room(length, filled=self.filled, cache_length=self._cache_length, num_grace=0)
        eviction = SharedEviction(
            filled_before=self.filled, chunk_length=length, cache_length=self._cache_length
        )
        self.filled = total
        return eviction

    def observe(self, eviction: Eviction, weights_BGS: Tensor) -> None:
        """Nothing to learn."""
