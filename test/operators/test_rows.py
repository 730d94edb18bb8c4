"""The row operators against loops, and on a GPU the kernels against the plain versions, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crosscurrent.operators import rows as row_operators
from crosscurrent.operators.rows import add_rows_, follow_rows, pair_, place_, take_rows

SEEDS = range(12)


class Draw:
    """Random shapes and tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.B, self.G, self.n = self.between(1, 3), self.between(1, 3), self.between(1, 5)
        self.N = self.B * self.between(1, 2)
        # Head sizes with and without a rest in a block; rows across several blocks of 32.
        self.D = (3, 8, 24, 64, 128)[self.between(0, 4)]
        self.P = self.between(2, 90)
        self.shared = self.between(0, 1) == 1

    def between(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(dtype)

    def choices(self, lists: int, size: int, of: int) -> Tensor:
        """`lists` lists of `size` different numbers below `of`."""
        return torch.stack([torch.randperm(of, generator=self._generator)[:size] for _ in range(lists)])

    def rows(self, num_slots: int) -> Tensor:
        B, G = (1, 1) if self.shared else (self.B, self.G)
        return self.choices(B * self.n * G, num_slots, self.P).view(B, self.n, G, num_slots).int()


@pytest.mark.parametrize("seed", SEEDS)
def test_taking_and_adding_rows(seed: int) -> None:
    draw = Draw(seed)
    pool, rows = draw.normal(draw.N, draw.G, draw.P, draw.D), draw.rows(draw.between(1, draw.P))
    windows = take_rows(pool, rows)
    grads = draw.normal(draw.N, draw.G, draw.P, draw.D)
    expected = grads.clone()
    for n in range(draw.N):
        for j in range(draw.n):
            for g in range(draw.G):
                own = rows[n % rows.shape[0], j, g % rows.shape[2]].long()
                assert torch.equal(windows[n, j, g], pool[n, g, own])
                expected[n, g, own] += windows[n, j, g]
    add_rows_(grads, rows, windows)
    assert torch.equal(grads, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_pairing_and_placing(seed: int) -> None:
    draw = Draw(seed)
    length = draw.between(3, 90)
    size = draw.between(1, length)
    start = length - size
    evicted = draw.choices(draw.B * draw.G, size, length).view(draw.B, draw.G, size).to(torch.int16)
    state = draw.normal(2, draw.B, draw.G, length)
    before = state.clone()
    slots = pair_(state, evicted, start)
    assert slots.dtype == evicted.dtype
    assert torch.equal(slots.sort(-1).values, evicted.sort(-1).values)
    in_tail = slots >= start
    tail = torch.arange(start, length).expand_as(slots)
    assert torch.equal(slots[in_tail].long(), tail[in_tail]), "an evicted tail slot is paired with itself"
    index = slots.long()
    assert torch.equal(state.gather(3, index.expand(2, -1, -1, -1)), before[..., start:])

    cache = draw.normal(draw.N, draw.G, length, draw.D)
    new = draw.normal(draw.N, size, draw.G, draw.D).transpose(1, 2)
    expected = cache.clone()
    for n in range(draw.N):
        for g in range(draw.G):
            expected[n, g, index[n % draw.B, g]] = cache[n, g, start:]
    expected[:, :, start:] = new
    place_(cache, slots, new, start)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_following_rows_is_placing_them_chunk_by_chunk(seed: int) -> None:
    rows, slots, first, length = draw_chunks(seed)
    lists = follow_rows(rows, slots, first, length)
    placed = rows.unsqueeze(-1).clone()
    for chunk in range(slots.shape[1]):
        start = first + chunk * length
        new = torch.arange(start, start + length, dtype=torch.int32).view(1, 1, -1, 1)
        shape = *placed.shape[:2], length, 1
        place_(placed, slots[:, chunk], new.expand(shape), rows.shape[-1] - length)
        assert torch.equal(lists[:, chunk], placed[..., 0])


def draw_chunks(seed: int) -> tuple[Tensor, Tensor, int, int]:
    """A list of rows [B, G, L], paired slots [B, n, G, m], the first new row, and tokens of a chunk."""
    draw = Draw(seed)
    cache_length = draw.between(3, 2500)
    length = draw.between(1, cache_length)
    moved = draw.between(1, length)
    rows = draw.choices(draw.B * draw.G, cache_length, 4000).view(draw.B, draw.G, -1).int()
    start = cache_length - length
    slots = []
    for _ in range(draw.n):
        # The tail's occupied slots are its first ones: what lies behind them cannot be evicted.
        evicted = draw.choices(draw.B * draw.G, moved, start + moved).view(draw.B, draw.G, moved)
        state = torch.zeros(1, draw.B, draw.G, cache_length)
        slots.append(pair_(state, evicted.to(torch.int16), start))
    return rows, torch.stack(slots, dim=1), 5000, length


def test_the_operators_say_what_they_write() -> None:
    operators = torch.ops.crosscurrent
    assert not operators.take_rows.default._schema.is_mutable
    assert not operators.follow_rows.default._schema.is_mutable
    for operator in (operators.add_rows_, operators.place_, operators.pair_):
        written = [bool(a.alias_info and a.alias_info.is_write) for a in operator.default._schema.arguments]
        assert written == [True] + [False] * (len(written) - 1)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernels_do_what_the_plain_versions_do(seed: int) -> None:
    draw = Draw(seed)
    for dtype in (torch.bfloat16, torch.float32):
        pool = draw.normal(draw.N, draw.G, draw.P, draw.D, dtype=dtype)
        rows = draw.rows(draw.between(1, draw.P))
        windows = row_operators.take_rows(pool, rows)
        assert torch.equal(take_rows(pool.cuda(), rows.cuda()).cpu(), windows)
        grads = draw.normal(draw.N, draw.G, draw.P, draw.D)
        on_gpu = grads.cuda()
        # Strides that are not those of a fresh tensor: attention returns such gradients.
        add_rows_(on_gpu, rows.cuda(), windows.cuda().transpose(2, 3).contiguous().transpose(2, 3))
        add_rows_(grads, rows, windows)
        assert torch.equal(on_gpu.cpu(), grads)
    length = draw.between(3, 90)
    size = draw.between(1, length)
    evicted = draw.choices(draw.B * draw.G, size, length).view(draw.B, draw.G, size).to(torch.int16)
    state = draw.normal(2, draw.B, draw.G, length, dtype=torch.float64)
    state_gpu = state.cuda()
    slots, slots_gpu = pair_(state, evicted, length - size), pair_(state_gpu, evicted.cuda(), length - size)
    assert torch.equal(slots, slots_gpu.cpu())
    assert torch.equal(state, state_gpu.cpu())
    for dtype in (torch.bfloat16, torch.int32):
        cache = (draw.normal(draw.N, draw.G, length, draw.D) * 100).to(dtype)
        new = (draw.normal(draw.N, size, draw.G, draw.D) * 100).to(dtype).transpose(1, 2)
        cache_gpu = cache.cuda()
        place_(cache_gpu, slots_gpu, new.cuda(), length - size)
        place_(cache, slots, new, length - size)
        assert torch.equal(cache, cache_gpu.cpu())
    rows, slots, first, chunk_length = draw_chunks(seed)
    lists = follow_rows(rows.cuda(), slots.cuda(), first, chunk_length)
    assert torch.equal(lists.cpu(), follow_rows(rows, slots, first, chunk_length))
