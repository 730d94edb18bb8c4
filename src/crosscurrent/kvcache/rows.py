"""Row operations on caches, as operators that PyTorch dispatches by device.

Usage:

    windows_NnGSD = take_rows(pool_NGPD, rows_BnGS)           # many views of one pool, in one kernel
    add_rows_(grads_NGPD, rows_BnGS, windows_NnGSD)           # the gradient of that
    place_(cache_NGLD, slots_BGm, new_NGCD, start)            # one chunk into a cache, in one kernel
    slots_BGm = pair_(state_KBGL, evicted_BGm, start)         # which tail entry moves to which evicted slot

On a CPU they are plain PyTorch, which is what they mean; on CUDA each is one Triton kernel. Being
operators with a schema, they show in traces and profiles with what they read and write.

`rows` may have 1 in place of B or G: the same rows for the whole batch, or for all groups. N is a multiple of
B: a buffer that holds the keys of the batch and then its values (N = 2 B) takes the same rows for both.

Legend: B batch, N batch of a buffer, G query groups, P rows of a pool, L cache length, S slots of a window,
n windows, C tokens of a chunk, m evicted entries, K rows of state, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("crosscurrent", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("take_rows(Tensor pool, Tensor rows) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("add_rows_(Tensor(a!) grads, Tensor rows, Tensor windows) -> ()")  # type: ignore[no-untyped-call]
_library.define("place_(Tensor(a!) cache, Tensor slots, Tensor new, int start) -> ()")  # type: ignore[no-untyped-call]
_library.define("pair_(Tensor(a!) state, Tensor evicted, int start) -> Tensor")  # type: ignore[no-untyped-call]


def take_rows(pool_NGPD: Tensor, rows_BnGS: Tensor) -> Tensor:
    """Windows [N, n, G, S, D]: window j of a sequence and group holds its `rows[j]` of the pool."""
    return torch.ops.crosscurrent.take_rows(pool_NGPD, rows_BnGS)  # type: ignore[no-any-return]


def add_rows_(grads_NGPD: Tensor, rows_BnGS: Tensor, windows_NnGSD: Tensor) -> None:
    """Add the windows to the rows that `take_rows` takes them from, the first window first.

    The rows of one window must differ. Sums are in the dtype of `grads`, in the same order in every run.
    """
    torch.ops.crosscurrent.add_rows_(grads_NGPD, rows_BnGS, windows_NnGSD)


def place_(cache_NGLD: Tensor, slots_BGm: Tensor, new_NGCD: Tensor, start: int) -> None:
    """Move the rows of slots start .. start + m to `slots`, then write the new rows from `start` on.

    See Note [Newest at the tail] of `placement` for why no slot is both read and written by others.
    """
    torch.ops.crosscurrent.place_(cache_NGLD, slots_BGm, new_NGCD, start)


def pair_(state_KBGL: Tensor, evicted_BGm: Tensor, start: int) -> Tensor:
    """The slots [B, G, m], in the dtype of `evicted`, that the entries of the tail's m slots move to.

    The tail begins at slot `start`. An evicted slot that lies in the tail is paired with itself; the others
    follow in the order of `evicted`. `state` moves along with the entries.
    """
    return torch.ops.crosscurrent.pair_(state_KBGL, evicted_BGm, start)  # type: ignore[no-any-return]


def _for_pool(rows: Tensor, pool_NGPD: Tensor) -> Tensor:
    """Rows [N, n, G, S], of sequences and groups that share theirs as well."""
    N, G = pool_NGPD.shape[:2]
    B, n, _, S = rows.shape
    return rows.long().expand(B, n, G, S).repeat(N // B, 1, 1, 1)


def _take_rows_cpu(pool_NGPD: Tensor, rows: Tensor) -> Tensor:
    rows_NnGS = _for_pool(rows, pool_NGPD)
    N, n, G, S = rows_NnGS.shape
    D = pool_NGPD.shape[-1]
    index = rows_NnGS.transpose(1, 2).reshape(N, G, n * S, 1).expand(N, G, n * S, D)
    windows_NGnSD = pool_NGPD.gather(2, index).view(N, G, n, S, D)
    return windows_NGnSD.transpose(1, 2).contiguous()


def _add_rows_cpu_(grads_NGPD: Tensor, rows: Tensor, windows_NnGSD: Tensor) -> None:
    rows_NnGS = _for_pool(rows, grads_NGPD)
    for window in range(rows_NnGS.shape[1]):
        index = rows_NnGS[:, window].unsqueeze(-1).expand_as(windows_NnGSD[:, window])
        sums = grads_NGPD.gather(2, index).add_(windows_NnGSD[:, window])
        grads_NGPD.scatter_(2, index, sums)


def _place_cpu_(cache_NGLD: Tensor, slots_BGm: Tensor, new_NGCD: Tensor, start: int) -> None:
    m = slots_BGm.shape[-1]
    moved = cache_NGLD[:, :, start : start + m].clone()
    slots_NGm = slots_BGm.long().repeat(len(cache_NGLD) // len(slots_BGm), 1, 1)
    cache_NGLD.scatter_(2, slots_NGm.unsqueeze(-1).expand_as(moved), moved)
    cache_NGLD[:, :, start : start + new_NGCD.shape[2]].copy_(new_NGCD)


def _pair_cpu_(state_KBGL: Tensor, evicted_BGm: Tensor, start: int) -> Tensor:
    m = evicted_BGm.shape[-1]
    evicted = evicted_BGm.long()
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
    return slots_BGm.to(evicted_BGm.dtype)


def _on_cuda(name: str):  # type: ignore[no-untyped-def]
    def call(*args):  # type: ignore[no-untyped-def]
        # Imported on the first call: only CUDA builds of PyTorch bring Triton along.
        from crosscurrent.kvcache import kernels

        return getattr(kernels, name)(*args)

    return call


for _name, _plain in {
    "take_rows": _take_rows_cpu,
    "add_rows_": _add_rows_cpu_,
    "place_": _place_cpu_,
    "pair_": _pair_cpu_,
}.items():
    _library.impl(_name, _plain, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(_name, _on_cuda(_name), "CUDA")  # type: ignore[no-untyped-call]
