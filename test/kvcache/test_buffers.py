"""Buffers: what is placed is what is seen, moved with its slot, and packed once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from crosscurrent.kvcache import buffers
from crosscurrent.kvcache.buffers import KVBuffer, PackedKVBuffer, PlainKVBuffer, make_buffer
from crosscurrent.kvcache.names import BufferKind, CacheConfig
from crosscurrent.kvcache.placement import Eviction
from crosscurrent.kvcache.policies import make_policy
from crosscurrent.kvcache.quantize import Packed, TorchQuantized, make_quantizer, packed_bytes, round_trip

B, G, L = 2, 2, 7
CPU = torch.device("cpu")
COLUMNS = [[7], [3, 1, 2], [5], [7], [1, 1, 4]]
KINDS = pytest.mark.parametrize("kind", list(BufferKind), ids=lambda k: k.value)
PACKED = pytest.mark.parametrize(
    "kind", [BufferKind.QUANTIZED8, BufferKind.QUANTIZED4], ids=lambda k: k.value
)
POLICIES = pytest.mark.parametrize("policy", ["lastrec", "h2o"])


def evictions(policy_name: str, device: torch.device = CPU) -> list[list[Eviction]]:
    """Those of COLUMNS, chunk by chunk."""
    generator = torch.Generator().manual_seed(0)
    policy = make_policy(CacheConfig.from_name(policy_name, cache_length=L), 0)
    policy.reset(B, G, device)
    result: list[list[Eviction]] = []
    for column in COLUMNS:
        result.append([])
        for length in column:
            eviction = policy.place(length)
            weights = torch.rand(B, G, eviction.filled_after, generator=generator)
            policy.observe(eviction, weights.to(device))
            result[-1].append(eviction)
    return result


def place_all(
    buffer: KVBuffer, placed: Sequence[Sequence[Eviction]], entries: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Place all columns of entries [2, B, G, T, D]; the keys and values that each chunk saw."""
    seen, start = [], 0
    for column in placed:
        stops = list(itertools.accumulate((each.chunk_length for each in column), initial=0))
        keys, values = entries[:, :, :, start : start + stops[-1]]
        opened = buffer.open(keys, values, column[0].filled_before)
        for eviction, first, stop in zip(column, stops, stops[1:], strict=False):
            keys, values = opened.place(eviction, slice(first, stop))
            seen.append((keys.clone(), values.clone()))
        start += stops[-1]
    return seen


def draw(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    num_tokens = sum(map(sum, COLUMNS))
    return torch.randn(2, B, G, num_tokens, size, generator=torch.Generator().manual_seed(1)).to(dtype)


def plain(size: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> PlainKVBuffer:
    return PlainKVBuffer.empty((B, G, L, size), dtype=dtype, device=device)


def assert_same(got: list[tuple[Tensor, Tensor]], want: list[tuple[Tensor, Tensor]]) -> None:
    assert len(got) == sum(map(len, COLUMNS))
    for each, expected in zip(got, want, strict=True):
        assert torch.equal(each[0], expected[0])
        assert torch.equal(each[1], expected[1])


# One block of odd length, one that is even, two blocks: parts with rows of 1 to 256 numbers.
@pytest.mark.parametrize("size", [1, 5, 8, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@PACKED
@POLICIES
def test_a_packed_cache_holds_what_went_through_the_quantizer_once(
    kind: BufferKind, policy: str, device: str, dtype: torch.dtype, size: int
) -> None:
    on = torch.device(device)
    placed, entries = evictions(policy, on), draw(size, dtype).to(on)
    packed = make_buffer(kind, (B, G, L, size), dtype=dtype, device=on)
    got = place_all(packed, placed, entries)
    stored = round_trip(make_quantizer(kind), entries)
    want = place_all(plain(size, dtype, on), placed, stored)
    assert_same(got, want)
    # What is at rest after the last chunk says the same as what the chunk saw.
    assert torch.equal(packed.unpack(packed.parts), torch.cat(want[-1]))


@PACKED
def test_the_comparison_notices_entries_that_were_packed_twice(kind: BufferKind) -> None:
    """The bad twin: through the quantizer a second time, some entries change."""
    quantizer, entries = make_quantizer(kind), draw(8)
    once = round_trip(quantizer, entries)
    assert not torch.equal(round_trip(quantizer, once), once)


class Counting(TorchQuantized):
    """Counts the rows that it packs."""

    num_rows = 0

    def quantize_(self, source: Tensor, out: Packed, scratch: Tensor | None) -> None:
        self.num_rows += source[..., 0].numel()
        super().quantize_(source, out, scratch)


@POLICIES
def test_each_entry_is_packed_once(policy: str) -> None:
    quantizer, entries = Counting(8), draw(8)
    packed = PackedKVBuffer(quantizer, (B, G, L, 8), dtype=torch.float32, device=CPU)
    place_all(packed, evictions(policy), entries)
    assert quantizer.num_rows == entries[..., 0].numel()


@PACKED
def test_pieces_change_nothing(kind: BufferKind, monkeypatch: pytest.MonkeyPatch) -> None:
    placed, entries = evictions("h2o"), draw(5)

    def run() -> list[tuple[Tensor, Tensor]]:
        return place_all(make_buffer(kind, (B, G, L, 5), dtype=torch.float32, device=CPU), placed, entries)

    want = run()
    # One slot, two slots, and less than a slot.
    for num_bytes in (2 * B * G * 5 * 4, 2 * 2 * B * G * 5 * 4, 1):
        monkeypatch.setattr(buffers, "_SCRATCH_BYTES", num_bytes)
        assert_same(run(), want)


@POLICIES
def test_the_chunk_is_seen_at_the_tail(policy: str) -> None:
    placed, entries = evictions(policy), draw(5)
    seen = place_all(plain(5), placed, entries)
    start = 0
    for eviction, (keys, values) in zip(itertools.chain(*placed), seen, strict=True):
        tokens = slice(start, start + eviction.chunk_length)
        assert keys.shape == (B, G, eviction.filled_after, 5)
        assert torch.equal(keys[:, :, -eviction.chunk_length :], entries[0, :, :, tokens])
        assert torch.equal(values[:, :, -eviction.chunk_length :], entries[1, :, :, tokens])
        start = tokens.stop


def test_a_plain_cache_is_seen_in_place() -> None:
    buffer = plain(5)
    keys, values = draw(5)[:, :, :, :3]
    eviction = evictions("lastrec")[0][0]
    seen, _ = buffer.open(*draw(5)[:, :, :, :7], 0).place(eviction, slice(None))
    assert seen.data_ptr() == buffer.entries_NGLD.data_ptr()
    assert buffer.unpack(buffer.parts) is buffer.entries_NGLD
    (packed,) = buffer.pool(keys, values, 0)
    assert torch.equal(packed, torch.cat([keys, values]))


@PACKED
@pytest.mark.parametrize("size", [5, 256])
def test_a_packed_cache_takes_the_bytes_of_its_packed_form(kind: BufferKind, size: int) -> None:
    buffer = make_buffer(kind, (B, G, L, size), dtype=torch.bfloat16, device=CPU)
    num_bytes = sum(part.untyped_storage().nbytes() for part in buffer.parts)
    assert num_bytes == packed_bytes(make_quantizer(kind), (2 * B, G, L, size), torch.bfloat16)
    assert all(part.shape[:3] == (2 * B, G, L) and part.dim() == 4 for part in buffer.parts)


@KINDS
def test_kinds(kind: BufferKind) -> None:
    buffer = make_buffer(kind, (B, G, L, 5), dtype=torch.float32, device=CPU)
    assert isinstance(buffer, PlainKVBuffer if kind is BufferKind.DEFAULT else PackedKVBuffer)


@KINDS
def test_in_a_cell_the_gradient_passes_straight_through(kind: BufferKind) -> None:
    quantizer = make_quantizer(kind)
    buffer = PlainKVBuffer.empty(
        (B, G, L, 5), dtype=torch.float32, device=CPU, quantizer=quantizer, with_gradient=True
    )
    assert buffer.grads_NGLD is not None
    assert buffer.grads_NGLD.shape == buffer.entries_NGLD.shape
    keys, values = draw(5)
    (new,) = buffer.pool(keys, values, 0)
    entries = torch.cat([keys, values]).requires_grad_()
    through = round_trip(quantizer, entries)
    assert torch.equal(new, through)
    grad = torch.randn(new.shape, generator=torch.Generator().manual_seed(2))
    # The default kind hands out what came in.
    (found,) = torch.autograd.grad(through, entries, grad)
    assert torch.equal(found, grad)
