"""Row operations on caches.

Usage:

    windows_NnGSD = take_rows(pool_NGPD, rows_BnGS)             # many views of one pool, in one kernel
    add_rows_(grads_NGPD, rows_BnGS, windows_NnGSD)             # the gradient of that
    place_(cache_NGLD, slots_BGm, new_NGCD, start)              # one chunk into a cache, in one kernel
    rows_BnGL = follow_rows(rows_BGL, slots_BnGm, first, C)     # many chunks into a list of rows
    add_at_(total_PD, index_m, rows_mD)                         # rows that may have the same index
    slots_BGm = pair_(state_KBGL, evicted_BGm, first, start, C) # which tail entry moves to which evicted slot

`rows` may have 1 in place of B or G: the same rows for the whole batch, or for all groups. N is a multiple of
B: a buffer that holds the keys of the batch and then its values (N = 2 B) takes the same rows for both.

- `take_rows`: window j of a sequence and group holds its `rows[j]` of the pool.
- `add_rows_`: adds the windows to the rows that `take_rows` takes them from, the first window first. The
  rows of one window must differ. Sums are in the dtype of `grads`, in the same order in every run.
- `add_at_`: adds rows to those that an index names, in the same order in every run.
- `place_`: moves the rows of slots start .. start + m to `slots`, then writes the new rows from `start` on.
  See Note [Newest at the tail] of `kvcache.placement` for why no slot is read and written by others.
- `follow_rows`: what `place_` does to a full list of rows, for n chunks one after the other; chunk j's new
  rows are first + j C, first + j C + 1, ... Returns the list after each chunk.
- `pair_`: the slots [B, G, m], in the dtype of `slot_dtype(L)`, that the entries of the tail's m slots move
  to, where slot first + evicted[i] is evicted. The tail begins at slot `start`. An evicted slot that lies in
  the tail is paired with itself; the others follow in the order of `evicted`. The state moves along with the
  entries, and its first row is set to zero for the chunk's C new ones.

Legend: B batch, N batch of a buffer, G query groups, P rows of a pool, L cache length, S slots of a window,
n windows, C tokens of a chunk, m evicted entries, K rows of state, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crosscurrent.operators.library import register

_INT16_SLOTS = torch.iinfo(torch.int16).max + 1


def slot_dtype(cache_length: int) -> torch.dtype:
    """The smallest dtype in which a log can keep the slots of such a cache."""
    return torch.int16 if cache_length <= _INT16_SLOTS else torch.int32


def _for_pool(rows: Tensor, pool_NGPD: Tensor) -> Tensor:
    """Rows [N, n, G, S], of sequences and groups that share theirs as well."""
    N, G = pool_NGPD.shape[:2]
    B, n, _, S = rows.shape
    return rows.long().expand(B, n, G, S).repeat(N // B, 1, 1, 1)


def _take_rows(pool_NGPD: Tensor, rows: Tensor) -> Tensor:
    rows_NnGS = _for_pool(rows, pool_NGPD)
    N, n, G, S = rows_NnGS.shape
    D = pool_NGPD.shape[-1]
    index = rows_NnGS.transpose(1, 2).reshape(N, G, n * S, 1).expand(N, G, n * S, D)
    windows_NGnSD = pool_NGPD.gather(2, index).view(N, G, n, S, D)
    return windows_NGnSD.transpose(1, 2).contiguous()


def _add_rows_(grads_NGPD: Tensor, rows: Tensor, windows_NnGSD: Tensor) -> None:
    rows_NnGS = _for_pool(rows, grads_NGPD)
    for window in range(rows_NnGS.shape[1]):
        index = rows_NnGS[:, window].unsqueeze(-1).expand_as(windows_NnGSD[:, window])
        sums = grads_NGPD.gather(2, index).add_(windows_NnGSD[:, window])
        grads_NGPD.scatter_(2, index, sums)


def _add_at_(total_PD: Tensor, index_m: Tensor, rows_mD: Tensor) -> None:
    total_PD.index_add_(0, index_m, rows_mD)


def _place_(cache_NGLD: Tensor, slots_BGm: Tensor, new_NGCD: Tensor, start: int) -> None:
    m = slots_BGm.shape[-1]
    moved = cache_NGLD[:, :, start : start + m].clone()
    slots_NGm = slots_BGm.long().repeat(len(cache_NGLD) // len(slots_BGm), 1, 1)
    cache_NGLD.scatter_(2, slots_NGm.unsqueeze(-1).expand_as(moved), moved)
    cache_NGLD[:, :, start : start + new_NGCD.shape[2]].copy_(new_NGCD)


def _follow_rows(rows_BGL: Tensor, slots_BnGm: Tensor, first: int, chunk_length: int) -> Tensor:
    _, n, _, m = slots_BnGm.shape
    L = rows_BGL.shape[2]
    tail = L - chunk_length
    lists = []
    for chunk in range(n):
        moved = rows_BGL[:, :, tail : tail + m]
        rows_BGL = rows_BGL.scatter(2, slots_BnGm[:, chunk].long(), moved)
        start = first + chunk * chunk_length
        rows_BGL[:, :, tail:] = torch.arange(start, start + chunk_length, device=rows_BGL.device)
        lists.append(rows_BGL)
    return torch.stack(lists, dim=1)


def _pair_(state_KBGL: Tensor, evicted_BGm: Tensor, first: int, start: int, chunk_length: int) -> Tensor:
    m = evicted_BGm.shape[-1]
    evicted = evicted_BGm + first
    in_tail = evicted >= start
    # Outside of the tail first, each part in its order: as many as there are tail slots that must move.
    outside = evicted.gather(2, in_tail.byte().sort(dim=-1, stable=True).indices)
    # One slot past the tail collects what lies outside of it.
    local = torch.where(in_tail, evicted - start, m)
    stays = torch.zeros(*evicted.shape[:2], m + 1, dtype=torch.bool, device=evicted.device)
    stays_BGm = stays.scatter_(2, local, True)[..., :m]
    rank = (~stays_BGm).cumsum(-1).sub_(1).clamp_(min=0)
    tail = torch.arange(start, start + m, device=evicted.device)
    slots_BGm = torch.where(stays_BGm, tail, outside.gather(2, rank))
    moved = state_KBGL[..., start : start + m].clone()
    state_KBGL.scatter_(3, slots_BGm.expand(len(state_KBGL), -1, -1, -1), moved)
    state_KBGL[0, ..., start : start + chunk_length] = 0
    return slots_BGm.to(slot_dtype(state_KBGL.shape[-1]))


_CUDA = "crosscurrent.operators.rows_triton"
take_rows = register("take_rows(Tensor pool, Tensor rows) -> Tensor", _take_rows, _CUDA)
add_rows_ = register("add_rows_(Tensor(a!) grads, Tensor rows, Tensor windows) -> ()", _add_rows_, _CUDA)
add_at_ = register("add_at_(Tensor(a!) total, Tensor index, Tensor rows) -> ()", _add_at_, _CUDA)
place_ = register("place_(Tensor(a!) cache, Tensor slots, Tensor new, int start) -> ()", _place_, _CUDA)
follow_rows = register(
    "follow_rows(Tensor rows, Tensor slots, int first, int chunk_length) -> Tensor", _follow_rows, _CUDA
)
pair_ = register(
    "pair_(Tensor(a!) state, Tensor evicted, int first, int start, int chunk_length) -> Tensor", _pair_, _CUDA
)
