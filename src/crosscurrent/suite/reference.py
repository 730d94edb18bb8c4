"""The loss of a model with bounded caches, written to be obviously right.

Nothing here is shared with the gradient that is verified, but the model's own layers. The cache is
out of place: what a layer remembers is a list of tensors that each chunk replaces by new ones, and
plain autograd keeps all of them. There are no slots. A policy says which of the remembered tokens to
forget, oldest first in every tensor, and attention does not mind their order.

Shape letters: B batch, T tokens of the sequence, C tokens of a chunk, N tokens remembered, S = N + C,
H query heads, G query groups, R = H / G, D head size, E hidden size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscurrent.model.rope import Angles
from crosscurrent.model.transformer import Block, Head, Transformer

Stored = Callable[[Tensor], Tensor]
"""What a cache gives back of the keys or values [..., D] that it was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceCache:
    """What a cache does, without saying how."""

    policy: str
    """``dense`` and ``lastrec`` forget the oldest tokens, ``h2o`` those that got the least attention."""
    lengths: tuple[int, ...]
    """Tokens remembered at most, for each layer."""
    grace_period: int = 0
    """The newest tokens, which ``h2o`` does not forget."""
    stored: Stored = lambda rows: rows


@dataclass(frozen=True, slots=True)
class Memory:
    """What one layer remembers, oldest first."""

    keys_BGND: Tensor
    values_BGND: Tensor
    attention_BGN: Tensor
    """The attention that each token got so far."""

    def keep(self, kept_BGN: Tensor) -> Memory:
        """Only the tokens at these places."""
        places = kept_BGN.unsqueeze(-1).expand(-1, -1, -1, self.keys_BGND.shape[-1])
        return Memory(
            self.keys_BGND.gather(2, places),
            self.values_BGND.gather(2, places),
            self.attention_BGN.gather(2, kept_BGN),
        )


def reference_loss(
    model: Transformer,
    head: Head,
    ids_BT: Tensor,
    targets_BT: Tensor,
    *,
    cache: ReferenceCache,
    chunk_size: int,
) -> Tensor:
    """Mean cross entropy, to be differentiated by plain autograd. ``targets`` may be shorter than ``ids``."""
    x_BTE, angles = model.embed(ids_BT), model.angles(model.position(0), ids_BT.shape[1])
    chunks = cut(ids_BT.shape[1], first=min(cache.lengths), other=chunk_size)
    for block, length in zip(model.layers, cache.lengths, strict=True):
        assert isinstance(block, Block)
        x_BTE = _layer(block, x_BTE, angles, chunks, cache, length)
    logits_BTV = head(x_BTE[:, -targets_BT.shape[1] :])
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def cut(length: int, *, first: int, other: int) -> list[tuple[int, int]]:
    """The chunks [start, stop) of a sequence."""
    bounds = [0, *range(first, length, other), length]
    return [(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]


def _layer(
    block: Block,
    x_BTE: Tensor,
    angles: Angles,
    chunks: Sequence[tuple[int, int]],
    cache: ReferenceCache,
    length: int,
) -> Tensor:
    queries_BHTD, keys_BGTD, values_BGTD = block.project(x_BTE, angles)
    keys_BGTD, values_BGTD = cache.stored(keys_BGTD), cache.stored(values_BGTD)
    memory = Memory(keys_BGTD[:, :, :0], values_BGTD[:, :, :0], keys_BGTD.new_zeros(*keys_BGTD.shape[:2], 0))
    attended = []
    for start, stop in chunks:
        num_forgotten = max(0, memory.attention_BGN.shape[2] + stop - start - length)
        memory = memory.keep(_kept(memory, num_forgotten, cache))
        memory = Memory(
            torch.cat([memory.keys_BGND, keys_BGTD[:, :, start:stop]], dim=2),
            torch.cat([memory.values_BGND, values_BGTD[:, :, start:stop]], dim=2),
            torch.nn.functional.pad(memory.attention_BGN, (0, stop - start)),
        )
        attended_BHCD, got_BGS = _attend(queries_BHTD[:, :, start:stop], memory)
        attended.append(attended_BHCD)
        memory = Memory(memory.keys_BGND, memory.values_BGND, memory.attention_BGN + got_BGS)
    return block.finish(x_BTE, torch.cat(attended, dim=2))


def _kept(memory: Memory, num_forgotten: int, cache: ReferenceCache) -> Tensor:
    """The places of the tokens that stay, in order."""
    num_tokens = memory.attention_BGN.shape[2]
    ages = torch.arange(num_tokens, device=memory.attention_BGN.device).expand_as(memory.attention_BGN)
    if cache.policy != "h2o":
        return ages[:, :, num_forgotten:]
    attention = memory.attention_BGN.clone()
    attention[:, :, max(0, num_tokens - cache.grace_period) :] = math.inf
    return attention.argsort(dim=2)[:, :, num_forgotten:].sort(dim=2).values


def _attend(queries_BHCD: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """The attention's output, and how much of it each token got in its group."""
    num_groups, num_tokens = memory.attention_BGN.shape[1:]
    num_queries, head_size = queries_BHCD.shape[2:]
    queries_BGRCD = queries_BHCD.reshape(
        -1, num_groups, queries_BHCD.shape[1] // num_groups, num_queries, head_size
    )
    scores_BGRCS = queries_BGRCD @ memory.keys_BGND.unsqueeze(2).mT / math.sqrt(head_size)
    # The last `num_queries` tokens are the chunk itself: a query sees those before it, and itself.
    newest = torch.arange(num_tokens, device=scores_BGRCS.device) - (num_tokens - num_queries)
    future_CS = newest > torch.arange(num_queries, device=scores_BGRCS.device).unsqueeze(1)
    weights_BGRCS = scores_BGRCS.masked_fill(future_CS, -math.inf).softmax(dim=-1)
    attended_BHCD = (weights_BGRCS @ memory.values_BGND.unsqueeze(2)).flatten(1, 2)
    return attended_BHCD, weights_BGRCS.detach().sum(dim=(2, 3))
