"""The protocol of eviction policies, and the room that they all have to check for.

A policy has one sequence of calls: `reset`, then `place` and, if it needs them, `observe` with
the weights, chunk by chunk. It counts what is filled; it never sees keys or values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from crosscurrent.kvcache.placement import Eviction


class Policy(Protocol):
    """Decides which entries a chunk displaces."""

    filled: int
    """Occupied slots."""

    @property
    def needs_weights(self) -> bool:
        """Whether `observe` wants the summed attention weights of every chunk."""

    def reset(self, batch_size: int, num_groups: int, device: torch.device) -> None:
        """Forget everything: a new sequence starts with an empty cache."""

    def place(self, length: int) -> Eviction:
        """Make room for a chunk of `length` tokens. No wait for the device."""

    def observe(self, eviction: Eviction, weights_BGS: Tensor) -> None:
        """Take in the weights that the chunk's queries gave to the S = filled_after slots."""


def check_room(length: int, *, filled: int, cache_length: int, num_grace: int) -> None:
    """Raise if a chunk is empty, or longer than what may be displaced for it."""
    if length < 1:
        raise ValueError(f"a chunk needs at least one token, got {length}")
    room = cache_length if filled == 0 else cache_length - min(num_grace, filled)
    if length > room:
        raise ValueError(
            f"a chunk of {length} tokens does not fit: the cache has {cache_length} slots, {filled} are "
            f"filled and up to {num_grace} hold grace tokens, which leaves room for {room}; use a smaller "
            f"chunk size, fewer grace tokens or a longer cache"
        )
