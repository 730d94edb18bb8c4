"""The row operators against loops, and on a GPU the kernels against the plain versions, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from crosscurrent.operators import rows as row_operators
from crosscurrent.operators.rows import add_rows_, follow_rows, pair_, place_, take_rows

SEEDS = range(12)
CODES = (torch.int8, torch.uint8)


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

    def bits(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Any bits of an integer dtype: packed codes."""
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, shape, generator=self._generator).to(dtype)

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


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_codes_are_taken_and_placed_like_values(dtype: torch.dtype, size: int) -> None:
    draw = Draw(size)
    pool, rows = draw.bits(draw.N, draw.G, draw.P, size, dtype=dtype), draw.rows(draw.between(1, draw.P))
    windows = take_rows(pool, rows)
    assert windows.dtype == dtype
    # A double holds each code exactly.
    assert torch.equal(windows.double(), take_rows(pool.double(), rows))
    chunk = Chunk(draw, longest=90)
    slots = chunk.pair_(torch.zeros(1, draw.B, draw.G, chunk.cache_length), chunk.evicted)
    cache = draw.bits(draw.N, draw.G, chunk.cache_length, size, dtype=dtype)
    new = draw.bits(draw.N, chunk.length, draw.G, size, dtype=dtype).transpose(1, 2)
    values = cache.double()
    place_(cache, slots, new, chunk.start)
    place_(values, slots, new.double(), chunk.start)
    assert torch.equal(cache.double(), values)


class Chunk:
    """A chunk that comes into a full cache: its length C, the tail, and which m slots are evicted."""

    def __init__(self, draw: Draw, *, longest: int) -> None:
        self.cache_length = draw.between(3, longest)
        self.length = draw.between(1, self.cache_length)
        self.start = self.cache_length - self.length
        # The tail's occupied slots are its first ones: what lies behind them cannot be evicted.
        self.num_moved = draw.between(1, self.length)
        self.first = draw.between(0, self.start)
        self.shape = draw.B, draw.G, self.num_moved
        self._num_movable = self.start + self.num_moved - self.first
        self.evicted = self.other_slots(draw)

    def other_slots(self, draw: Draw) -> Tensor:
        """Evicted slots, counted from `first`."""
        return draw.choices(draw.B * draw.G, self.num_moved, self._num_movable).view(self.shape)

    def pair_(self, state: Tensor, evicted: Tensor) -> Tensor:
        return pair_(state, evicted, self.first, self.start, self.length)


@pytest.mark.parametrize("seed", SEEDS)
def test_pairing_and_placing(seed: int) -> None:
    draw = Draw(seed)
    chunk = Chunk(draw, longest=90)
    occupied = slice(chunk.start, chunk.start + chunk.num_moved)
    state = draw.normal(2, draw.B, draw.G, chunk.cache_length)
    before = state.clone()
    slots = chunk.pair_(state, chunk.evicted)
    assert slots.dtype == torch.int16
    assert torch.equal(slots.sort(-1).values.long(), (chunk.evicted + chunk.first).sort(-1).values)
    in_tail = slots >= chunk.start
    tail = torch.arange(occupied.start, occupied.stop).expand_as(slots)
    assert torch.equal(slots[in_tail].long(), tail[in_tail]), "an evicted tail slot is paired with itself"
    index = slots.long()
    moved = before[..., occupied]
    assert torch.equal(state[1].gather(2, index), moved[1])
    assert torch.equal(state[0].gather(2, index), moved[0].masked_fill(in_tail, 0))
    assert not state[0, ..., chunk.start :].any()

    cache = draw.normal(draw.N, draw.G, chunk.cache_length, draw.D)
    new = draw.normal(draw.N, chunk.length, draw.G, draw.D).transpose(1, 2)
    expected = cache.clone()
    for n in range(draw.N):
        for g in range(draw.G):
            expected[n, g, index[n % draw.B, g]] = cache[n, g, occupied]
    expected[:, :, chunk.start :] = new
    place_(cache, slots, new, chunk.start)
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
    chunk = Chunk(draw, longest=2500)
    rows = draw.choices(draw.B * draw.G, chunk.cache_length, 4000).view(draw.B, draw.G, -1).int()
    state = torch.zeros(1, draw.B, draw.G, chunk.cache_length)
    slots = [chunk.pair_(state, chunk.other_slots(draw)) for _ in range(draw.n)]
    return rows, torch.stack(slots, dim=1), 5000, chunk.length


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
    chunk = Chunk(draw, longest=90)
    state = draw.normal(2, draw.B, draw.G, chunk.cache_length, dtype=torch.float64)
    state_gpu = state.cuda()
    slots, slots_gpu = chunk.pair_(state, chunk.evicted), chunk.pair_(state_gpu, chunk.evicted.cuda())
    assert torch.equal(slots, slots_gpu.cpu())
    assert torch.equal(state, state_gpu.cpu())
    for dtype in (torch.bfloat16, torch.int32):
        cache = (draw.normal(draw.N, draw.G, chunk.cache_length, draw.D) * 100).to(dtype)
        new = (draw.normal(draw.N, chunk.length, draw.G, draw.D) * 100).to(dtype).transpose(1, 2)
        cache_gpu = cache.cuda()
        place_(cache_gpu, slots_gpu, new.cuda(), chunk.start)
        place_(cache, slots, new, chunk.start)
        assert torch.equal(cache, cache_gpu.cpu())
    for dtype, size in itertools.product(CODES, (1, 2, 5, 33, 64, draw.D)):
        pool, rows = draw.bits(draw.N, draw.G, draw.P, size, dtype=dtype), draw.rows(draw.between(1, draw.P))
        assert torch.equal(take_rows(pool.cuda(), rows.cuda()).cpu(), take_rows(pool, rows))
        cache = draw.bits(draw.N, draw.G, chunk.cache_length, size, dtype=dtype)
        new = draw.bits(draw.N, chunk.length, draw.G, size, dtype=dtype).transpose(1, 2)
        cache_gpu = cache.cuda()
        place_(cache_gpu, slots_gpu, new.cuda(), chunk.start)
        place_(cache, slots, new, chunk.start)
        assert torch.equal(cache, cache_gpu.cpu())
    rows, slots, first, chunk_length = draw_chunks(seed)
    lists = follow_rows(rows.cuda(), slots.cuda(), first, chunk_length)
    assert torch.equal(lists.cpu(), follow_rows(rows, slots, first, chunk_length))
