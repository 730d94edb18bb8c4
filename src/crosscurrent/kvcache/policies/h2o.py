"""h2o: the tokens that got the least attention so far are evicted ("heavy hitters" stay).

Usage: `H2O(cache_length, grace_period=64)`; see `crosscurrent.kvcache.policies` for the calls.

Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", arXiv:2306.14048. A token's score is the attention weight that it got, summed over all
queries since it came in. Where we deviate from the paper:
- a chunk of C tokens displaces C entries at once, by the scores before the chunk; the paper
  evicts one entry for each generated token;
- scores, and so evictions, are per query group (summed over its heads), the unit that shares
  keys and values; the paper has no grouped queries;
- the paper splits the budget in halves of recent tokens and heavy hitters; here the share of
  recent ones is `grace_period`, and the newest chunk is never displaced by itself;
- `normalize_scores` divides by the number of queries that could see the token, since a plain sum
  favours the old; `init_grace_tokens` keeps the first ones. Neither is in the paper.

Everything is decided on the device, without a wait for it. Ties go to whom `topk` picks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from crosscurrent.kvcache.placement import Eviction, GroupedEviction, SharedEviction
from crosscurrent.kvcache.policies.base import check_room
from crosscurrent.operators.rows import pair_


class H2O:
    """Keeps the heavy hitters, the newest and the first tokens."""

    needs_weights = True

    def __init__(
        self,
        cache_length: int,
        *,
        init_grace_tokens: int = 0,
        grace_period: int = 0,
        normalize_scores: bool = False,
    ) -> None:
        self._cache_length = cache_length
        self._num_initial = init_grace_tokens
        self._grace_period = grace_period
        self._normalize = normalize_scores
        self.filled = 0
        self._state_KBGL: Tensor | None = None
        """Scores, and the ages of the entries if the rules ask for them: 1 for the token seen last. In
        float64 both are exact enough for any sequence, and one gather moves both."""

    def reset(self, batch_size: int, num_groups: int, device: torch.device) -> None:
        rows = 2 if self._grace_period or self._normalize else 1
        shape = rows, batch_size, num_groups, self._cache_length
        self.filled = 0
        if self._state_KBGL is None or (self._state_KBGL.shape, self._state_KBGL.device) != (shape, device):
            self._state_KBGL = torch.empty(shape, dtype=torch.float64, device=device)
        self._state_KBGL.zero_()

    def place(self, length: int) -> Eviction:
        check_room(
            length,
            filled=self.filled,
            cache_length=self._cache_length,
            num_grace=self._num_initial + self._grace_period,
        )
        state_KBGL = self._state()
        before, after = self.filled, min(self._cache_length, self.filled + length)
        num_evicted = before + length - after
        eviction: Eviction
        if num_evicted:
            # The state moves along with the entries, and the new ones start from zero.
            lowest_BGm = self._lowest(num_evicted)
            slots_BGm = pair_(state_KBGL, lowest_BGm, self._num_fixed(), after - length, length)
            eviction = GroupedEviction(
                filled_before=before,
                chunk_length=length,
                cache_length=self._cache_length,
                slots_BGm=slots_BGm,
            )
        else:
            eviction = SharedEviction(
                filled_before=before, chunk_length=length, cache_length=self._cache_length
            )
            state_KBGL[0, ..., after - length : after].zero_()
        if len(state_KBGL) > 1:
            ages = state_KBGL[1]
            ages.add_(length)
            ages[..., after - length : after] = torch.arange(length, 0, -1, device=ages.device)
        self.filled = after
        return eviction

    def observe(self, eviction: Eviction, weights_BGS: Tensor) -> None:
        """Add the chunk's summed weights to the scores."""
        if weights_BGS.shape[-1] != eviction.filled_after or eviction.filled_after != self.filled:
            raise ValueError(
                f"got weights for {weights_BGS.shape[-1]} slots, expected the {self.filled} that the last "
                f"place() left filled; observe each chunk once, right after its attention"
            )
        self._state()[0, ..., : self.filled].add_(weights_BGS)

    def _num_fixed(self) -> int:
        """The first tokens cannot move, so that their slots are their positions."""
        return min(self._num_initial, self.filled)

    def _lowest(self, count: int) -> Tensor:
        """The evicted slots [B, G, m] in no particular order, counted from the first that can move."""
        state_KBGL = self._state()
        scores = state_KBGL[0, ..., self._num_fixed() : self.filled]
        if len(state_KBGL) > 1:
            ages = state_KBGL[1, ..., self._num_fixed() : self.filled]
            if self._normalize:
                scores = scores / ages
            if self._grace_period:
                scores = scores.masked_fill(ages <= self._grace_period, math.inf)
        return scores.topk(count, dim=-1, largest=False, sorted=False).indices

    def _state(self) -> Tensor:
        if self._state_KBGL is None:
            raise RuntimeError("call reset() before place() or observe(): it starts a sequence")
        return self._state_KBGL
