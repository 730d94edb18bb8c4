"""The operators of `rows` on CUDA: one Triton kernel each. What they mean stands in `rows`.

None uses atomics: each output element has one writer, and sums have one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crosscurrent.operators.rows import slot_dtype

_BLOCK_ROWS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _take_rows_kernel(  # type: ignore[no-untyped-def]
    pool, rows, out,
    pool_n, pool_g, pool_p,
    rows_b, rows_j, rows_g,
    num_batch, num_windows, num_groups, num_slots, head_size,
    BLOCK_ROWS: tl.constexpr, BLOCK_HEAD: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    window = tl.program_id(1)  # n-th sequence, j-th window, g-th group: the order of the output
    group = window % num_groups
    j = window // num_groups % num_windows
    n = window // num_groups // num_windows
    valid = slots < num_slots
    row = tl.load(rows + n % num_batch * rows_b + j * rows_j + group * rows_g + slots, mask=valid, other=0)
    columns = tl.arange(0, BLOCK_HEAD)
    mask = valid[:, None] & (columns < head_size)[None, :]
    source = pool + n.to(tl.int64) * pool_n + group.to(tl.int64) * pool_g + row[:, None].to(tl.int64) * pool_p
    values = tl.load(source + columns[None, :], mask=mask, other=0)
    target = out + (window.to(tl.int64) * num_slots + slots[:, None]) * head_size + columns[None, :]
    tl.store(target, values, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _add_rows_kernel(  # type: ignore[no-untyped-def]
    grads, inverse, windows,
    grads_n, grads_g, grads_p,
    inverse_b, inverse_j, inverse_g,
    windows_n, windows_j, windows_g, windows_s,
    num_batch, num_windows, num_groups, num_rows, head_size,
    BLOCK_ROWS: tl.constexpr, BLOCK_HEAD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    group = tl.program_id(1) % num_groups
    n = tl.program_id(1) // num_groups
    valid = rows < num_rows
    columns = tl.arange(0, BLOCK_HEAD)
    in_head = (columns < head_size)[None, :]
    target = (
        grads + n.to(tl.int64) * grads_n + group.to(tl.int64) * grads_g + rows[:, None].to(tl.int64) * grads_p
    )
    target = target + columns[None, :]
    total = tl.load(target, mask=valid[:, None] & in_head, other=0)
    for j in range(num_windows):
        base = inverse + n % num_batch * inverse_b + j * inverse_j + group * inverse_g
        slot = tl.load(base + rows, mask=valid, other=-1)
        source = (
            windows + n.to(tl.int64) * windows_n + j.to(tl.int64) * windows_j + group.to(tl.int64) * windows_g  # type: ignore[attr-defined]
        )
        source = source + slot[:, None].to(tl.int64) * windows_s + columns[None, :]
        share = tl.load(source, mask=(slot >= 0)[:, None] & in_head, other=0)
        total += share.to(total.dtype)
    tl.store(target, total, mask=valid[:, None] & in_head)


@triton.jit  # type: ignore[untyped-decorator]
def _place_kernel(  # type: ignore[no-untyped-def]
    cache, slots, new,
    cache_n, cache_g, cache_l,
    slots_b, slots_g,
    new_n, new_g, new_c,
    num_batch, num_groups, num_moved, num_new, start, head_size,
    BLOCK_ROWS: tl.constexpr, BLOCK_HEAD: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    group = tl.program_id(1) % num_groups
    n = tl.program_id(1) // num_groups
    columns = tl.arange(0, BLOCK_HEAD)
    in_head = (columns < head_size)[None, :]
    base = cache + n.to(tl.int64) * cache_n + group.to(tl.int64) * cache_g + columns[None, :]
    tail = base + (start + i)[:, None].to(tl.int64) * cache_l
    moves = i < num_moved
    slot = tl.load(slots + n % num_batch * slots_b + group * slots_g + i, mask=moves, other=0)
    moved = tl.load(tail, mask=moves[:, None] & in_head, other=0)
    source = new + n.to(tl.int64) * new_n + group.to(tl.int64) * new_g + i[:, None].to(tl.int64) * new_c
    fresh = tl.load(source + columns[None, :], mask=(i < num_new)[:, None] & in_head, other=0)
    # Loads and stores may be laid out differently over the threads, all the more for narrow dtypes.
    tl.debug_barrier()
    # What is paired with itself lies in the tail, where the new row goes: no row is written twice.
    moves = moves & (slot.to(tl.int32) < start)
    tl.store(base + slot[:, None].to(tl.int64) * cache_l, moved, mask=moves[:, None] & in_head)
    tl.store(tail, fresh, mask=(i < num_new)[:, None] & in_head)


@triton.jit  # type: ignore[untyped-decorator]
def _pair_kernel(  # type: ignore[no-untyped-def]
    state, evicted, slots, outside, stays,
    state_k, state_b, state_g, num_groups, num_state, num_moved, first, start, chunk_length,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # One program for a sequence and group. Two lists go through memory, behind barriers: the evicted slots
    # outside of the tail, and a flag for each tail slot that is evicted.
    bg = tl.program_id(0).to(tl.int64)
    own = state + bg // num_groups * state_b + bg % num_groups * state_g
    i = tl.arange(0, BLOCK)
    valid = i < num_moved
    gone = tl.load(evicted + bg * num_moved + i, mask=valid, other=0).to(tl.int32) + first
    in_tail = valid & (gone >= start)
    is_outside = valid & (gone < start)
    tl.store(stays + bg * num_moved + i, tl.zeros([BLOCK], dtype=tl.int32), mask=valid)
    tl.debug_barrier()
    tl.store(stays + bg * num_moved + gone - start, tl.full([BLOCK], 1, dtype=tl.int32), mask=in_tail)
    rank = tl.cumsum(is_outside.to(tl.int32), axis=0) - 1
    tl.store(outside + bg * num_moved + rank, gone, mask=is_outside)
    tl.debug_barrier()
    stay = tl.load(stays + bg * num_moved + i, mask=valid, other=1)
    moving = tl.cumsum((stay == 0).to(tl.int32), axis=0) - 1
    elsewhere = tl.load(outside + bg * num_moved + moving, mask=valid & (stay == 0), other=0)
    slot = tl.where(stay == 0, elsewhere, start + i)
    tl.store(slots + bg * num_moved + i, slot.to(slots.dtype.element_ty), mask=valid)
    for k in range(num_state):
        base = own + k * state_k
        moved = tl.load(base + start + i, mask=valid, other=0)
        tl.debug_barrier()
        tl.store(base + slot, moved, mask=valid)
    # The new entries have no score yet. A moved entry that is paired with itself is gone.
    tl.debug_barrier()
    new = own + start
    for offset in range(0, chunk_length, BLOCK):
        is_new = offset + i < chunk_length
        tl.store(new + offset + i, tl.zeros([BLOCK], dtype=state.dtype.element_ty), mask=is_new)


@triton.jit  # type: ignore[untyped-decorator]
def _follow_rows_kernel(  # type: ignore[no-untyped-def]
    rows, slots, out,
    slots_b, slots_j, slots_g,
    num_windows, num_groups, num_slots, num_moved, first, chunk_length,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # One program for a sequence and group. The lists follow from each other through memory, behind barriers.
    b = tl.program_id(0) // num_groups
    g = tl.program_id(0) % num_groups
    i = tl.arange(0, BLOCK)
    tail = num_slots - chunk_length
    source = rows + tl.program_id(0).to(tl.int64) * num_slots
    for j in range(num_windows):
        target = out + ((b * num_windows + j).to(tl.int64) * num_groups + g) * num_slots
        for start in range(0, tail, BLOCK):
            row = tl.load(source + start + i, mask=start + i < tail, other=0)
            tl.store(target + start + i, row, mask=start + i < tail)
        tl.debug_barrier()
        for start in range(0, chunk_length, BLOCK):
            moves = start + i < num_moved
            slot = tl.load(slots + b * slots_b + j * slots_j + g * slots_g + start + i, mask=moves, other=0)
            moved = tl.load(source + tail + start + i, mask=moves, other=0)
            # What is paired with itself lies in the tail, where the new row goes.
            tl.store(target + slot.to(tl.int32), moved, mask=moves & (slot.to(tl.int32) < tail))
            new = first + j * chunk_length + start + i
            tl.store(target + tail + start + i, new, mask=start + i < chunk_length)
        tl.debug_barrier()
        source = target


def take_rows(pool_NGPD: Tensor, rows: Tensor) -> Tensor:
    N, G, _, D = pool_NGPD.shape
    _, n, _, S = rows.shape
    out = torch.empty((N, n, G, S, D), dtype=pool_NGPD.dtype, device=pool_NGPD.device)
    _take_rows_kernel[(triton.cdiv(S, _BLOCK_ROWS), N * n * G)](
        pool_NGPD, rows, out,
        *pool_NGPD.stride()[:3], *_shared_strides(rows),
        len(rows), n, G, S, D,
        BLOCK_ROWS=_BLOCK_ROWS, BLOCK_HEAD=triton.next_power_of_2(D),
    )  # fmt: skip
    return out


def add_rows_(grads_NGPD: Tensor, rows: Tensor, windows_NnGSD: Tensor) -> None:
    N, G, P, D = grads_NGPD.shape
    n, S = rows.shape[1], rows.shape[3]
    # For each row of the pool, its slot in each window: then every row has one writer.
    inverse = torch.full((*rows.shape[:3], P), -1, dtype=torch.int32, device=rows.device)
    slots = torch.arange(S, dtype=torch.int32, device=rows.device)
    inverse.scatter_(3, rows.long(), slots.expand(rows.shape))
    _add_rows_kernel[(triton.cdiv(P, _BLOCK_ROWS), N * G)](
        grads_NGPD, inverse, windows_NnGSD,
        *grads_NGPD.stride()[:3], *_shared_strides(inverse), *windows_NnGSD.stride()[:4],
        len(rows), n, G, P, D,
        BLOCK_ROWS=_BLOCK_ROWS, BLOCK_HEAD=triton.next_power_of_2(D),
    )  # fmt: skip


def place_(cache_NGLD: Tensor, slots_BGm: Tensor, new_NGCD: Tensor, start: int) -> None:
    N, G, _, D = cache_NGLD.shape
    C = new_NGCD.shape[2]
    _place_kernel[(triton.cdiv(C, _BLOCK_ROWS), N * G)](
        cache_NGLD, slots_BGm, new_NGCD,
        *cache_NGLD.stride()[:3], *slots_BGm.stride()[:2], *new_NGCD.stride()[:3],
        len(slots_BGm), G, slots_BGm.shape[2], C, start, D,
        BLOCK_ROWS=_BLOCK_ROWS, BLOCK_HEAD=triton.next_power_of_2(D),
    )  # fmt: skip


def follow_rows(rows_BGL: Tensor, slots_BnGm: Tensor, first: int, chunk_length: int) -> Tensor:
    B, n, G, m = slots_BnGm.shape
    L = rows_BGL.shape[2]
    out = torch.empty((B, n, G, L), dtype=torch.int32, device=rows_BGL.device)
    _follow_rows_kernel[(B * G,)](
        rows_BGL.contiguous(), slots_BnGm, out,
        *slots_BnGm.stride()[:3],
        n, G, L, m, first, chunk_length,
        BLOCK=1024, num_warps=8,
    )  # fmt: skip
    return out


def pair_(state_KBGL: Tensor, evicted_BGm: Tensor, first: int, start: int, chunk_length: int) -> Tensor:
    B, G, m = evicted_BGm.shape
    evicted_BGm = evicted_BGm.contiguous()
    slots = torch.empty((B, G, m), dtype=slot_dtype(state_KBGL.shape[-1]), device=evicted_BGm.device)
    outside, stays = torch.empty((2, B, G, m), dtype=torch.int32, device=slots.device)
    _pair_kernel[(B * G,)](
        state_KBGL, evicted_BGm, slots, outside, stays,
        *state_KBGL.stride()[:3], G, len(state_KBGL), m, first, start, chunk_length,
        BLOCK=triton.next_power_of_2(m), num_warps=8 if m > 1024 else 4,
    )  # fmt: skip
    return slots


def _shared_strides(rows: Tensor) -> tuple[int, int, int]:
    """Strides of [B, n, G or 1, ...] that read what all groups share again and again."""
    batch, window, group = rows.stride()[:3]
    return batch, window, group if rows.shape[2] > 1 else 0


def add_at_(total_PD: Tensor, index_m: Tensor, rows_mD: Tensor) -> None:
    # Sorts the index first: no atomic additions, and sums of a row in float32.
    total_PD.index_put_((index_m,), rows_mD, accumulate=True)
