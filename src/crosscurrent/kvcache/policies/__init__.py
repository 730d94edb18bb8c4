"""Eviction policies, one file each. They decide slots; buffers hold tensors.

Usage, for each layer:

    policy = make_policy(config, layer)
    policy.reset(batch_size=2, num_groups=4, device=x.device)   # once a sequence
    for each chunk of C tokens:
        eviction = policy.place(C)      # raises if the chunk cannot be placed
        ...                             # write, attend
        if policy.needs_weights:
            policy.observe(eviction, summed_weights(q, k, lse))
"""

from __future__ import annotations

from crosscurrent.kvcache.names import CacheConfig, PolicyKind
from crosscurrent.kvcache.policies.base import Policy
from crosscurrent.kvcache.policies.dense import Dense
from crosscurrent.kvcache.policies.h2o import H2O
from crosscurrent.kvcache.policies.lastrec import LastRecent

__all__ = ["H2O", "Dense", "LastRecent", "Policy", "make_policy"]


def make_policy(config: CacheConfig, layer: int) -> Policy:
    """The policy of one layer."""
    length = config.length(layer)
    match config.policy:
        case PolicyKind.DENSE:
            return Dense(length)
        case PolicyKind.LASTREC:
            return LastRecent(length, init_grace_tokens=config.init_grace_tokens)
        case PolicyKind.H2O:
            return H2O(
                length,
                init_grace_tokens=config.init_grace_tokens,
                grace_period=config.grace_period,
                normalize_scores=config.normalize_scores,
            )
