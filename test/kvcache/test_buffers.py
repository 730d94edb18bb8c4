"""Buffers: what is written is what is seen, moved with its slot, and taken back to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crosscurrent.kvcache.buffers import Buffer, KVBuffer, Overwritten, PackedKVBuffer, make_buffer
from crosscurrent.kvcache.names import BufferKind, CacheConfig
from crosscurrent.kvcache.placement import Eviction
from crosscurrent.kvcache.policies import make_policy
from crosscurrent.kvcache.quantize import make_quantizer, round_trip

B, G, L, D = 2, 2, 7, 5
LENGTHS = [7, 3, 1, 5, 7]
KINDS = pytest.mark.parametrize("kind", list(BufferKind), ids=lambda k: k.value)
POLICIES = pytest.mark.parametrize("policy", ["lastrec", "h2o"])


def entries(length: int, seed: int) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, B, G, length, D, generator=torch.Generator().manual_seed(seed))
    return keys, values


def evictions(policy_name: str, lengths: list[int], *, batch_size: int = B) -> list[Eviction]:
    generator = torch.Generator().manual_seed(0)
    policy = make_policy(CacheConfig.from_name(policy_name, cache_length=L), 0)
    policy.reset(batch_size, G, torch.device("cpu"))
    result = []
    for length in lengths:
        result.append(policy.place(length))
        policy.observe(result[-1], torch.rand(batch_size, G, result[-1].filled_after, generator=generator))
    return result


def write_all(
    buffer: Buffer, placed: list[Eviction]
) -> tuple[list[Overwritten], list[tuple[Tensor, Tensor]]]:
    """Write one chunk after the other; what each displaced, and what was seen after each."""
    displaced, seen = [], []
    for i, eviction in enumerate(placed):
        displaced.append(buffer.write(eviction, *entries(eviction.chunk_length, seed=i)))
        keys, values = buffer.view(eviction.filled_after)
        seen.append((keys.clone(), values.clone()))
    return displaced, seen


@KINDS
@POLICIES
def test_unwriting_walks_back_to_the_bit(kind: BufferKind, policy: str) -> None:
    placed = evictions(policy, LENGTHS)
    buffer = make_buffer(kind, (B, G, L, D), dtype=torch.float32, device=torch.device("cpu"))
    displaced, seen = write_all(buffer, placed)
    for i in reversed(range(1, len(placed))):
        buffer.unwrite(placed[i], displaced[i])
        for got, want in zip(buffer.view(placed[i].filled_before), seen[i - 1], strict=True):
            assert torch.equal(got, want)


@KINDS
@POLICIES
def test_entries_are_quantized_once_when_they_are_written(kind: BufferKind, policy: str) -> None:
    """A packed cache holds what a plain one holds of entries that went through the quantizer."""
    placed = evictions(policy, LENGTHS)
    packed = make_buffer(kind, (B, G, L, D), dtype=torch.float32, device=torch.device("cpu"))
    plain = KVBuffer(torch.zeros(B, G, L, D), torch.zeros(B, G, L, D))
    quantizer = make_quantizer(kind)
    for i, eviction in enumerate(placed):
        k, v = entries(eviction.chunk_length, seed=i)
        packed.write(eviction, k, v)
        plain.write(eviction, round_trip(quantizer, k), round_trip(quantizer, v))
        views = packed.view(eviction.filled_after), plain.view(eviction.filled_after)
        for got, want in zip(*views, strict=True):
            assert torch.equal(got, want)


@POLICIES
def test_the_chunk_is_seen_at_the_tail(policy: str) -> None:
    buffer = KVBuffer(torch.zeros(B, G, L, D), torch.zeros(B, G, L, D))
    for i, eviction in enumerate(evictions(policy, LENGTHS)):
        k, v = entries(eviction.chunk_length, seed=i)
        buffer.write(eviction, k, v)
        keys, values = buffer.view(eviction.filled_after)
        assert torch.equal(keys[:, :, -eviction.chunk_length :], k)
        assert torch.equal(values[:, :, -eviction.chunk_length :], v)


def test_a_default_view_is_in_place() -> None:
    keys = torch.zeros(B, G, L, D)
    view, _ = KVBuffer(keys, torch.zeros_like(keys)).view(3)
    assert view.data_ptr() == keys.data_ptr()
    assert view.shape == (B, G, 3, D)


@pytest.mark.parametrize(("kind", "parts"), [(BufferKind.DEFAULT, 1), (BufferKind.QUANTIZED4, 2)])
def test_what_was_displaced_is_as_long_as_the_eviction(kind: BufferKind, parts: int) -> None:
    placed = evictions("h2o", [6, 3])
    buffer = make_buffer(kind, (B, G, L, D), dtype=torch.float32, device=torch.device("cpu"))
    displaced, _ = write_all(buffer, placed)
    assert [rows.shape[2] for overwritten in displaced for rows in overwritten.keys] == [0] * parts + [
        2
    ] * parts


def test_kinds() -> None:
    for kind in BufferKind:
        buffer = make_buffer(kind, (B, G, L, D), dtype=torch.float32, device=torch.device("cpu"))
        assert isinstance(buffer, KVBuffer if kind is BufferKind.DEFAULT else PackedKVBuffer)


def test_keys_and_values_must_match() -> None:
    with pytest.raises(ValueError, match=r"\[2, 2, 7, 5\] and \[2, 2, 6, 5\]"):
        KVBuffer(torch.zeros(B, G, L, D), torch.zeros(B, G, L - 1, D))


class TestGradient:
    """`unwrite_gradient_` against autograd through an out-of-place write."""

    @POLICIES
    @pytest.mark.parametrize("lengths", [[7, 3, 1, 5, 7], [2, 1, 3, 4], [3, 6], [1, 7]])
    def test_the_gradient_of_a_write(self, policy: str, lengths: list[int]) -> None:
        for eviction in evictions(policy, lengths):
            cache = torch.randn(B, G, L, D, dtype=torch.float64)
            cache[:, :, eviction.filled_before :] = 0
            cache.requires_grad_()
            new = torch.randn(B, G, eviction.chunk_length, D, dtype=torch.float64, requires_grad=True)
            after = self.out_of_place(eviction, cache, new)
            written = cache.detach().clone()
            eviction.write_(written, new.detach())
            assert torch.equal(after[:, :, : eviction.filled_after], written[:, :, : eviction.filled_after])
            grad = torch.randn(after.shape, dtype=torch.float64)
            grad[:, :, eviction.filled_after :] = 0  # nobody can see an empty slot
            want_cache, want_new = torch.autograd.grad(
                after, (cache, new), grad, allow_unused=True, materialize_grads=True
            )
            got_cache = grad.clone()
            got_new = eviction.unwrite_gradient_(got_cache)
            # Only copies: to the bit.
            assert torch.equal(got_new, want_new)
            want_cache[:, :, eviction.filled_before :] = 0
            assert torch.equal(got_cache, want_cache)

    @staticmethod
    def out_of_place(eviction: Eviction, cache: Tensor, new: Tensor) -> Tensor:
        """Slot by slot: who is in it after the write."""
        slots = torch.arange(L, dtype=torch.float64).view(1, 1, L, 1).expand(B, G, L, 1).clone()
        dest = eviction.take(slots).long()[..., 0]
        rows = []
        for b in range(B):
            for g in range(G):
                holder = [cache[b, g, slot] for slot in range(L)]
                for i, slot in enumerate(dest[b, g].tolist()):
                    holder[slot] = cache[b, g, eviction.tail.start + i]
                for i in range(eviction.chunk_length):
                    holder[eviction.tail.start + i] = new[b, g, i]
                rows.append(torch.stack(holder))
        return torch.stack(rows).view(B, G, L, D)
