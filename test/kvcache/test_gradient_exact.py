"""The long-context gradient against plain autograd, in float64.

The reference below keeps every version of every cache, out of place, as a tensor of entries and a tensor of
the positions that they came from. It knows nothing of slots, columns or cells, and decides by itself what to
evict.

Tolerance: 1e-9 of the largest entry of a parameter's gradient. Float64 rounds at 1.1e-16; a gradient here is
a sum of at most some 1e4 products through some 1e2 operations deep, which leaves three decimal digits. A
gradient that is zero by cancellation (queries and keys, where a token sees only itself) has no digits of its
own: there the error may be 1e-13, some 1e3 roundings, of the largest entry of all gradients.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from crosscurrent.gradient import GradientArgs, LongContextGradientModel
from crosscurrent.kvcache.names import CacheConfig, PolicyKind
from crosscurrent.model.config import MLPKind, ModelConfig
from crosscurrent.model.transformer import Block, Head, Transformer
from crosscurrent.trace.simulate import simulate

# Deterministic matrix products need it, and cuBLAS reads it when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

TOLERANCE = 1e-9
CANCELLED = 1e-13
VOCABULARY = 11


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that Hypothesis draws."""

    policy: PolicyKind = PolicyKind.LASTREC
    cache_lengths: tuple[int, ...] = (6, 6)
    chunk_size: int = 2
    sequence_length: int = 20
    num_targets: int = 12
    init_grace_tokens: int = 0
    grace_period: int = 0
    normalize_scores: bool = False
    batch_size: int = 2
    num_groups: int = 2
    heads_per_group: int = 2
    head_size: int = 4
    mlp_kind: MLPKind = MLPKind.SWIGLU
    tie_embeddings: bool = False
    layers_per_cell: int = 1
    multiplier: float = 1.0
    seed: int = 0
    ignored: tuple[int, ...] = field(default=())


def make_models(case: Case) -> tuple[Transformer, Head]:
    torch.manual_seed(case.seed)
    config = ModelConfig(
        vocab_size=VOCABULARY,
        num_layers=len(case.cache_lengths),
        embed_size=10,
        num_heads=case.num_groups * case.heads_per_group,
        num_groups=case.num_groups,
        head_size=case.head_size,
        mlp_kind=case.mlp_kind,
        mlp_size=9,
        tie_embeddings=case.tie_embeddings,
    )
    gpt = Transformer(config)
    head = Head(config, gpt) if case.tie_embeddings else Head(config)
    for parameter in dict.fromkeys([*gpt.parameters(), *head.parameters()]):
        # Larger than a training run would start with, so that no part of the gradient drowns in another.
        torch.nn.init.normal_(parameter, std=0.5)
    return gpt.double(), head.double()


def make_batch(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.seed + 1)
    ids = torch.randint(VOCABULARY, (case.batch_size, case.sequence_length), generator=generator)
    targets = torch.randint(VOCABULARY, (case.batch_size, case.num_targets), generator=generator)
    for position in case.ignored:
        targets[0, position % case.num_targets] = -100
    return ids, targets


def long_context_model(
    case: Case, gpt: Transformer, head: Head, *, asynchronous: bool = False
) -> LongContextGradientModel:
    cache = CacheConfig(
        policy=case.policy,
        cache_length=case.cache_lengths,
        init_grace_tokens=case.init_grace_tokens,
        grace_period=case.grace_period,
        normalize_scores=case.normalize_scores,
    )
    grad = GradientArgs(
        chunk_size=case.chunk_size,
        layers_per_cell=case.layers_per_cell,
        chunks_per_cell_multiplier=case.multiplier,
        layercp_pin_memory=asynchronous,
        cachecp_pin_memory=asynchronous,
        async_cpu_transfer=asynchronous,
    )
    return LongContextGradientModel(gpt, head, cache=cache, grad=grad)


class ReferenceCache:
    """Entries [B, G, n, D], the positions and the scores [B, G, n] that they have, oldest entry first."""

    def __init__(self, case: Case, length: int) -> None:
        self.case = case
        self.length = length
        self.num_seen = 0
        shape = case.batch_size, case.num_groups, 0
        self.keys = torch.zeros(*shape, case.head_size, dtype=torch.float64)
        self.values = torch.zeros(*shape, case.head_size, dtype=torch.float64)
        self.positions = torch.zeros(shape, dtype=torch.long)
        self.scores = torch.zeros(shape, dtype=torch.float64)

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Evict what has to go, then append."""
        num_new = keys.shape[2]
        kept = torch.tensor(
            [
                [self.kept(b, g, num_new) for g in range(self.case.num_groups)]
                for b in range(self.case.batch_size)
            ],
            dtype=torch.long,
        ).reshape(self.case.batch_size, self.case.num_groups, -1)
        rows = kept.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
        new_positions = torch.arange(self.num_seen, self.num_seen + num_new).expand(*kept.shape[:2], -1)
        self.keys = torch.cat([self.keys.gather(2, rows), keys], dim=2)
        self.values = torch.cat([self.values.gather(2, rows), values], dim=2)
        self.positions = torch.cat([self.positions.gather(2, kept), new_positions], dim=2)
        no_scores = torch.zeros(*kept.shape[:2], num_new, dtype=torch.float64)
        self.scores = torch.cat([self.scores.gather(2, kept), no_scores], dim=2)
        self.num_seen += num_new

    def kept(self, b: int, g: int, num_new: int) -> list[int]:
        """The entries of one sequence and group that stay, oldest first."""
        positions, scores = self.positions[b, g].tolist(), self.scores[b, g].tolist()
        num_evicted = max(0, len(positions) + num_new - self.length)
        candidates = [i for i, position in enumerate(positions) if position >= self.case.init_grace_tokens]
        if self.case.policy is PolicyKind.H2O:
            newest = self.num_seen - self.case.grace_period
            candidates = [i for i in candidates if positions[i] < newest]
            if self.case.normalize_scores:
                scores = [
                    score / (self.num_seen - position)
                    for score, position in zip(scores, positions, strict=True)
                ]
            candidates.sort(key=lambda i: scores[i])
        evicted = set(candidates[:num_evicted])
        return [i for i in range(len(positions)) if i not in evicted]

    def attend(self, queries: Tensor) -> Tensor:
        """Attend to all entries, the chunk's own causally: queries [B, H, C, D]."""
        num_queries = queries.shape[2]
        per_group = self.case.heads_per_group
        keys, values = (t.repeat_interleave(per_group, dim=1) for t in (self.keys, self.values))
        scores = queries @ keys.mT / math.sqrt(self.case.head_size)
        query_positions = torch.arange(self.num_seen - num_queries, self.num_seen)
        positions = self.positions.repeat_interleave(per_group, dim=1)
        future = positions.unsqueeze(2) > query_positions.view(1, 1, -1, 1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        summed = weights.detach().sum(2).unflatten(1, (-1, per_group)).sum(2)
        self.scores = self.scores + summed
        return weights @ values


def reference_loss(case: Case, gpt: Transformer, head: Head, ids: Tensor, targets: Tensor) -> Tensor:
    x, angles = gpt.embed(ids), gpt.angles(gpt.position(0), ids.shape[1])
    first = min(case.cache_lengths)
    starts = [0, *range(first, case.sequence_length, case.chunk_size)]
    for block, length in zip(gpt.layers, case.cache_lengths, strict=True):
        assert isinstance(block, Block)
        cache = ReferenceCache(case, length)
        queries, keys, values = block.project(x, angles)
        attended = []
        for start, stop in zip(starts, [*starts[1:], case.sequence_length], strict=True):
            cache.add(keys[:, :, start:stop], values[:, :, start:stop])
            attended.append(cache.attend(queries[:, :, start:stop]))
        x = block.finish(x, torch.cat(attended, dim=2))
    logits = head(x)[:, -case.num_targets :]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    floor = CANCELLED * max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        error = (found[name] - gradient).abs().max().item()
        assert error <= TOLERANCE * gradient.abs().max().item() + floor, f"{name} is off by {error}"


def check(case: Case, *, device: str = "cpu") -> None:
    """Compare; on a CUDA device with asynchronous transfers, against the reference in CPU memory."""
    gpt, head = make_models(case)
    ids, targets = make_batch(case)
    model = long_context_model(case, gpt, head, asynchronous=device == "cuda")
    expected_loss = reference_loss(case, gpt, head, ids, targets)
    expected_loss.backward()
    expected = gradients(model)
    model.zero_grad()
    model.to(device)
    loss = model(ids, targets)
    loss.backward()
    assert abs(loss.item() - expected_loss.item()) <= TOLERANCE * abs(expected_loss.item())
    assert_close({name: gradient.cpu() for name, gradient in gradients(model).items()}, expected)


@st.composite
def sequence_lengths(draw: st.DrawFn, cache_length: int, chunk_size: int, *, dense: bool) -> int:
    """Shorter than the cache, equal to it, many times as long, or with a last chunk of a single token."""
    num_chunks = -(-draw(st.sampled_from([2, 1, 3, 6])) * cache_length // chunk_size)
    lengths = {
        "shorter": draw(st.integers(1, cache_length)),
        "equal": cache_length,
        "longer": cache_length + num_chunks * chunk_size - draw(st.integers(0, chunk_size - 1)),
        "single": cache_length + num_chunks * chunk_size + 1,
    }
    kinds = ["shorter", "equal"] if dense else ["longer", "single", "shorter", "equal"]
    return lengths[draw(st.sampled_from(kinds))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    policy = draw(st.sampled_from([PolicyKind.LASTREC, PolicyKind.H2O, PolicyKind.H2O, PolicyKind.DENSE]))
    num_layers = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(3, 9), min_size=num_layers, max_size=num_layers))
    shortest = min(lengths)
    dense = policy is PolicyKind.DENSE
    init_grace = 0 if dense else draw(st.integers(0, shortest - 2))
    h2o = policy is PolicyKind.H2O
    grace_period = draw(st.integers(0, shortest - 1 - init_grace)) if h2o else 0
    chunk_size = draw(st.integers(1, shortest - init_grace - grace_period))
    sequence_length = draw(sequence_lengths(shortest, chunk_size, dense=dense))
    num_targets = draw(st.integers(1, sequence_length))
    return Case(
        policy=policy,
        cache_lengths=tuple(lengths),
        chunk_size=chunk_size,
        sequence_length=sequence_length,
        num_targets=num_targets,
        init_grace_tokens=init_grace,
        grace_period=grace_period,
        normalize_scores=h2o and draw(st.booleans()),
        batch_size=draw(st.integers(1, 3)),
        num_groups=draw(st.integers(1, 3)),
        heads_per_group=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([2, 4, 6])),
        mlp_kind=draw(st.sampled_from(MLPKind)),
        tie_embeddings=draw(st.booleans()),
        layers_per_cell=draw(st.integers(1, num_layers + 1)),
        multiplier=draw(st.sampled_from([0.3, 1.0, 1.7, 4.0])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
@example(case=Case(sequence_length=4, num_targets=2))
@example(case=Case(sequence_length=6, num_targets=6))
@example(case=Case(sequence_length=7, num_targets=1))
@example(case=Case(sequence_length=60, num_targets=30, policy=PolicyKind.H2O, layers_per_cell=2))
@example(case=Case(cache_lengths=(9, 4, 7), sequence_length=41, policy=PolicyKind.H2O, grace_period=1))
@example(case=Case(tie_embeddings=True, multiplier=2.0, sequence_length=33, num_targets=33))
def test_gradients_are_those_of_plain_autograd(case: Case) -> None:
    note(f"seed {case.seed}")
    check(case)


ON_CUDA = [
    Case(sequence_length=5, num_targets=3, policy=PolicyKind.H2O),
    Case(sequence_length=7, num_targets=7, tie_embeddings=True),
    Case(sequence_length=29, num_targets=9, cache_lengths=(6, 8, 7), policy=PolicyKind.H2O, grace_period=2),
    Case(sequence_length=41, num_targets=41, init_grace_tokens=2, layers_per_cell=2, multiplier=1.7),
]


@pytest.fixture
def cuda() -> Iterator[str]:
    """A real device under deterministic algorithms, or a simulated one."""
    if not torch.cuda.is_available():
        with simulate():
            yield "cuda"
        return
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield "cuda"
    torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize("case", ON_CUDA, ids=["one-column", "single-token", "h2o", "wide-cells"])
def test_with_asynchronous_transfers_they_are_the_same(case: Case, cuda: str) -> None:
    check(case, device=cuda)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=cases(), spare=st.integers(0, 3))
def test_with_a_cache_as_long_as_the_sequence_it_is_full_attention(case: Case, spare: int) -> None:
    """No token is ever evicted, so that the model's ordinary forward pass computes the same function."""
    length = max(case.sequence_length, *case.cache_lengths) + spare
    case = replace(case, cache_lengths=(length,) * len(case.cache_lengths))
    gpt, head = make_models(case)
    ids, targets = make_batch(case)
    model = long_context_model(case, gpt, head)
    logits = head(gpt(ids))[:, -case.num_targets :]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    expected = gradients(model)
    model.zero_grad()
    model(ids, targets).backward()
    assert_close(gradients(model), expected)


def test_the_comparison_notices_an_evicted_token_too_many() -> None:
    """The bad twin: one slot less, and the reference is no longer matched."""
    case = Case(sequence_length=20)
    gpt, head = make_models(case)
    ids, targets = make_batch(case)
    model = long_context_model(replace(case, cache_lengths=(6, 5)), gpt, head)
    reference_loss(case, gpt, head, ids, targets).backward()
    expected = gradients(model)
    model.zero_grad()
    model(ids, targets).backward()
    with pytest.raises(AssertionError, match="is off by"):
        assert_close(gradients(model), expected)


def test_ignored_targets_have_no_gradient_and_do_not_count() -> None:
    check(Case(sequence_length=30, num_targets=20, ignored=(0, 3, 4, 19)))
