"""A column's attention through the pool of its rows, against a cache that is moved chunk by chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crosscurrent.gradient import windows
from crosscurrent.gradient.windows import Windows, advance_column, attend_column, pass_column
from crosscurrent.kvcache.buffers import PackedKVBuffer, PlainKVBuffer, make_buffer
from crosscurrent.kvcache.names import BufferKind, CacheConfig
from crosscurrent.kvcache.placement import Eviction, GroupedEviction
from crosscurrent.kvcache.policies import make_policy
from crosscurrent.kvcache.quantize import make_quantizer
from crosscurrent.model.attention import attention

BATCH, HEADS, GROUPS, LENGTH, SIZE = 2, 4, 2, 7, 4
CPU = torch.device("cpu")


def evictions(policy_name: str, chunks: list[int]) -> list[Eviction]:
    policy = make_policy(CacheConfig.from_name(policy_name, cache_length=LENGTH), 0)
    policy.reset(BATCH, GROUPS, CPU)
    placed = []
    for length in chunks:
        eviction = policy.place(length)
        if policy.needs_weights:
            policy.observe(eviction, torch.rand(BATCH, GROUPS, eviction.filled_after, dtype=torch.float64))
        placed.append(eviction)
    return placed


def seen(placed: list[Eviction]) -> Windows:
    return windows.make_windows(placed, slot_bytes=2 * BATCH * GROUPS * SIZE * 8, device=CPU)


def entries(heads: int, tokens: int) -> Tensor:
    return torch.randn(BATCH, heads, tokens, SIZE, dtype=torch.float64)


def cache() -> PlainKVBuffer:
    shape = BATCH, GROUPS, LENGTH, SIZE
    return PlainKVBuffer.empty(shape, dtype=torch.float64, device=CPU, with_gradient=True)


def out_of_place(
    q: Tensor, k: Tensor, v: Tensor, left: Tensor, placed: list[Eviction]
) -> tuple[Tensor, Tensor]:
    """The attention outputs, and the cache [2 B, G, S, D] at the right edge, in ordinary autograd."""
    slots = left
    outs, start = [], 0
    for eviction in placed:
        chunk = slice(start, start + eviction.chunk_length)
        start = chunk.stop
        new = torch.cat([k[:, :, chunk], v[:, :, chunk]])
        # The tail's occupied slots: as many as entries go, and none while there is room.
        moved = slots[:, :, eviction.tail.start : eviction.tail.start + eviction.num_evicted]
        if isinstance(eviction, GroupedEviction):
            index = eviction.slots_BGm.long().repeat(2, 1, 1).unsqueeze(-1).expand_as(moved)
            slots = slots.scatter(2, index, moved)
        else:
            where = [slot for run in eviction.runs for slot in range(*run)]
            slots = slots.index_copy(2, torch.tensor(where, dtype=torch.long), moved)
        slots = torch.cat([slots[:, :, : eviction.tail.start], new], dim=2)
        outs.append(attention(q[:, :, chunk], *slots.chunk(2)))
    return torch.cat(outs, dim=2), slots


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(["lastrec", "h2o"]),
    first=st.sampled_from([3, LENGTH]),
    chunks=st.lists(st.integers(1, LENGTH), min_size=1, max_size=7),
    num_before=st.integers(0, 3),
    window_bytes=st.sampled_from([1, 4000, 1 << 30]),
)
def test_a_column_is_what_a_cache_moved_out_of_place_gives(
    policy: str, first: int, chunks: list[int], num_before: int, window_bytes: int
) -> None:
    torch.manual_seed(0)
    placed = evictions(policy, [first, *chunks])
    split = min(num_before, len(placed) - 1)
    live = cache()
    if split:
        tokens = sum(eviction.chunk_length for eviction in placed[:split])
        advance_column(entries(GROUPS, tokens), entries(GROUPS, tokens), live, seen(placed[:split]))
    column = placed[split:]
    left_filled, right_filled = column[0].filled_before, column[-1].filled_after
    tokens = sum(eviction.chunk_length for eviction in column)
    leaves = [entries(heads, tokens).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    left = live.entries_NGLD[:, :, :left_filled].clone().requires_grad_()
    expected, right = out_of_place(*leaves, left, column)
    grad_out, grad_right = torch.randn_like(expected), torch.randn_like(right)
    expected_grads = torch.autograd.grad([expected, right], [*leaves, left], [grad_out, grad_right])

    assert live.grads_NGLD is not None
    live.grads_NGLD[:, :, :right_filled] = grad_right
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_WINDOW_BYTES", window_bytes)
        patch.setattr(windows, "_WINDOW_BYTES_BACKWARD", window_bytes)
        found = attend_column(*leaves, live, seen(column))
        found_grads = torch.autograd.grad(found, leaves, grad_out)
        # The cache has not moved: its left edge is what the rows were taken from.
        assert torch.equal(live.entries_NGLD[:, :, :left_filled], left)
        passed = pass_column(*(leaf.detach() for leaf in leaves), live, seen(column))
    # Sums of at most 7 slots * 4 features, a few dozen deep in all, in float64: 1e-16 * 30 * 30.
    close = {"rtol": 0, "atol": 1e-13}
    torch.testing.assert_close(found, expected, **close)
    for got, want in zip([*found_grads, live.grads_NGLD[:, :, :left_filled]], expected_grads, strict=True):
        torch.testing.assert_close(got, want, **close)
    assert torch.equal(passed, found)
    # Entries are moved, never computed with: to the bit.
    assert torch.equal(live.entries_NGLD[:, :, :right_filled], right)


@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
def test_advancing_moves_the_cache_as_passing_does(policy: str) -> None:
    torch.manual_seed(0)
    placed = evictions(policy, [7, 3, 3, 1])
    q, k, v = entries(HEADS, 14), entries(GROUPS, 14), entries(GROUPS, 14)
    passed, advanced = cache(), cache()
    pass_column(q, k, v, passed, seen(placed))
    advance_column(k, v, advanced, seen(placed))
    assert torch.equal(passed.entries_NGLD, advanced.entries_NGLD)


@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
@pytest.mark.parametrize("kind", [BufferKind.QUANTIZED8, BufferKind.QUANTIZED4], ids=lambda k: k.value)
def test_a_packed_cache_gives_what_entries_sent_through_its_quantizer_give(
    kind: BufferKind, policy: str
) -> None:
    torch.manual_seed(0)
    shape = BATCH, GROUPS, LENGTH, SIZE
    packed = make_buffer(kind, shape, dtype=torch.float64, device=CPU)
    assert isinstance(packed, PackedKVBuffer)
    plain = PlainKVBuffer.empty(shape, dtype=torch.float64, device=CPU, quantizer=make_quantizer(kind))
    placed = evictions(policy, [7, 3, 3, 1, 5, 2])
    # Columns at the left edge, in the middle, and one that displaces nearly everything.
    for column in (placed[:1], placed[1:4], placed[4:]):
        tokens = sum(eviction.chunk_length for eviction in column)
        q, k, v = entries(HEADS, tokens), entries(GROUPS, tokens), entries(GROUPS, tokens)
        passed = (pass_column(q, k, v, each, seen(column)) for each in (packed, plain))
        assert torch.equal(*passed)
        assert torch.equal(packed.unpack(packed.parts), plain.entries_NGLD)


@pytest.mark.parametrize("policy", ["lastrec", "h2o"])
@pytest.mark.parametrize("kind", list(BufferKind), ids=lambda k: k.value)
def test_chunks_placed_one_by_one_leave_what_a_column_leaves(kind: BufferKind, policy: str) -> None:
    torch.manual_seed(0)
    shape = BATCH, GROUPS, LENGTH, SIZE
    at_once, one_by_one = (make_buffer(kind, shape, dtype=torch.float64, device=CPU) for _ in range(2))
    placed = evictions(policy, [3, 2, 5, 3, 3, 6])
    for column in (placed[:2], placed[2:]):
        tokens = sum(eviction.chunk_length for eviction in column)
        k, v = entries(GROUPS, tokens), entries(GROUPS, tokens)
        advance_column(k, v, at_once, seen(column))
        opened, start = one_by_one.open(k, v, column[0].filled_before), 0
        for eviction in column:
            opened.place(eviction, slice(start, start + eviction.chunk_length))
            start += eviction.chunk_length
        filled = column[-1].filled_after
        for of_all, of_each in zip(at_once.parts, one_by_one.parts, strict=True):
            assert torch.equal(of_all[:, :, :filled], of_each[:, :, :filled])


def test_equal_chunks_after_the_cache_is_full_are_one_batch() -> None:
    placed = evictions("lastrec", [7, 3, 3, 3, 2])
    assert [(view.start, view.num_chunks, view.chunk_length) for view in seen(placed).views] == [
        (0, 1, 7),
        (7, 3, 3),
        (16, 1, 2),
    ]


def test_half_precision_adds_its_cache_gradients_in_float32() -> None:
    shape = BATCH, GROUPS, LENGTH, SIZE
    live = PlainKVBuffer.empty(shape, dtype=torch.bfloat16, device=CPU, with_gradient=True)
    assert live.grads_NGLD is not None
    assert live.grads_NGLD.dtype == torch.float32
    q, k, v = (entries(heads, 8).bfloat16().requires_grad_() for heads in (HEADS, GROUPS, GROUPS))
    attend_column(q, k, v, live, seen(evictions("lastrec", [7, 1]))).sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.bfloat16
