"""Grouped-query attention with its backward pass and its summed weights, in plain matrix products.

Over tiles of queries, so that the scores in memory stay below a fixed size. The softmax is float32, or
float64 for float64 inputs. `crosscurrent.model.attention` says what the operators mean.

Legend: B batch, H query heads, G query groups (key/value heads), R = H // G, C queries, S keys, D head size;
N = B * G, M = R * C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from crosscurrent.operators.library import register

# Scores of one tile: 128 MiB in float32. Larger is no faster, smaller makes more and smaller kernels.
_TILE_ELEMENTS = 1 << 25

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def plain_attend(q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> tuple[Tensor, Tensor]:
    (H, C), S = q_BHCD.shape[1:3], k_BGSD.shape[2]
    B, D = q_BHCD.shape[0], q_BHCD.shape[-1]
    q, k, v = (_wide(t) for t in (q_BHCD, k_BGSD, v_BGSD))
    k_NSD, v_NSD = k.flatten(0, 1), v.flatten(0, 1)
    out = q_BHCD.new_empty(B, C, H, D).transpose(1, 2)
    lse = q.new_empty(B, H, C)
    for start, stop, seen in _tiles(B * H, C, S):
        scores = _scores(q[:, :, start:stop], k_NSD[:, :seen])
        if stop - start > 1:
            future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu_(1)
            _square(scores, stop - start).masked_fill_(future, -math.inf)
        # By hand and not with softmax, since the log-sum-exp comes from the same pass.
        top = scores.amax(-1, keepdim=True)
        scores.sub_(top).exp_()
        total = scores.sum(-1, keepdim=True)
        tile = torch.bmm(scores, v_NSD[:, :seen]).div_(total)
        out[:, :, start:stop] = tile.view(B, H, stop - start, D)
        lse[:, :, start:stop] = total.log_().add_(top).view(B, H, stop - start)
    return out, lse


def plain_attend_backward(
    grad_out_BHCD: Tensor, q_BHCD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, out_BHCD: Tensor, lse_BHC: Tensor
) -> tuple[Tensor, Tensor]:
    B, H, C, D = q_BHCD.shape
    G, S = k_BGSD.shape[1:3]
    scale = 1.0 / math.sqrt(D)
    grad, q, k, v, out = (_wide(t) for t in (grad_out_BHCD, q_BHCD, k_BGSD, v_BGSD, out_BHCD))
    k_NSD, v_NSD = k.flatten(0, 1), v.flatten(0, 1)
    delta = (grad * out).sum(-1, keepdim=True)
    dq = q_BHCD.new_empty(B, C, H, D).transpose(1, 2)
    dkv = k.new_empty(2, B * G, S, D)
    dk, dv = dkv
    # From the last tile, which sees all keys and so fills dk and dv, to the first, which adds.
    for start, stop, seen in reversed(list(_tiles(B * H, C, S))):
        beta = 0.0 if stop == C else 1.0
        rows = slice(start, stop)
        q_NMD, grad_NMD = _by_group(q[:, :, rows], B * G), _by_group(grad[:, :, rows], B * G)
        weights = _weights(q[:, :, rows], k_NSD[:, :seen], lse_BHC[:, :, rows])
        dv[:, :seen].baddbmm_(weights.mT, grad_NMD, beta=beta)
        d_scores = torch.bmm(grad_NMD, v_NSD[:, :seen].mT)
        d_scores.sub_(_by_group(delta[:, :, rows], B * G)).mul_(weights)
        dk[:, :seen].baddbmm_(d_scores.mT, q_NMD, beta=beta, alpha=scale)
        tile = torch.bmm(d_scores, k_NSD[:, :seen]).mul_(scale)
        dq[:, :, rows] = tile.view(B, H, stop - start, D)
    return dq, dkv.view(2, B, G, S, D).to(k_BGSD.dtype)


def plain_summed_weights(q_BHCD: Tensor, k_BGSD: Tensor, lse_BHC: Tensor) -> Tensor:
    (B, H, C, _), (G, S) = q_BHCD.shape, k_BGSD.shape[1:3]
    q_BHCD, k_NSD = _wide(q_BHCD), _wide(k_BGSD).flatten(0, 1)
    sums = lse_BHC.new_empty(B * G, S)
    for start, stop, seen in reversed(list(_tiles(B * H, C, S))):
        tile = _weights(q_BHCD[:, :, start:stop], k_NSD[:, :seen], lse_BHC[:, :, start:stop])
        if stop == C:
            torch.sum(tile, dim=1, out=sums)
        else:
            sums[:, :seen].add_(tile.sum(1))
    return sums.view(B, G, S)


def _wide(x: Tensor) -> Tensor:
    """The dtype of the plain path: float32 in place of half precision."""
    return x.float() if x.dtype in _HALF_DTYPES else x


def _tiles(heads: int, queries: int, keys: int) -> Iterator[tuple[int, int, int]]:
    """Half-open ranges of queries, and how many keys the last query of each can see."""
    step = max(1, min(queries, _TILE_ELEMENTS // max(1, heads * keys)))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        yield start, stop, keys - queries + stop


def _by_group(x_BHCX: Tensor, num: int) -> Tensor:
    """[B, H, C, X] -> [B * G, R * C, X]: the heads of a group become more queries."""
    return x_BHCX.reshape(num, -1, x_BHCX.shape[-1])


def _scores(q_BHCD: Tensor, k_NSD: Tensor) -> Tensor:
    """Scaled scores [B * G, R * C, S] before the mask."""
    q_NMD = _by_group(q_BHCD, k_NSD.shape[0])
    scores = q_NMD.new_empty(*q_NMD.shape[:2], k_NSD.shape[1])
    # With beta=0 the product is scaled on its way out, and what was in the buffer is ignored.
    return scores.baddbmm_(q_NMD, k_NSD.mT, beta=0, alpha=1.0 / math.sqrt(q_NMD.shape[-1]))


def _weights(q_BHCD: Tensor, k_NSD: Tensor, lse_BHC: Tensor) -> Tensor:
    """Softmax weights [B * G, R * C, S], again, from the log-sum-exp."""
    lse_NM1 = _by_group(lse_BHC.unsqueeze(-1), k_NSD.shape[0])
    weights = _scores(q_BHCD, k_NSD).sub_(lse_NM1).exp_()
    # Zeroing after the exponential needs no mask tensor: what it overwrites, even an infinity, is gone.
    if q_BHCD.shape[2] > 1:
        _square(weights, q_BHCD.shape[2]).tril_()
    return weights


def _square(scores_NMS: Tensor, queries: int) -> Tensor:
    """The last C columns [B * G, R, C, C], the only ones where some key is in the future."""
    return scores_NMS.view(scores_NMS.shape[0], -1, queries, scores_NMS.shape[-1])[..., -queries:]


_CUDA = "crosscurrent.operators.attention_cuda"
attend = register("attend(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)", plain_attend, _CUDA)
attend_backward = register(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse) -> (Tensor, Tensor)",
    plain_attend_backward,
    _CUDA,
)
summed_weights = register(
    "summed_weights(Tensor q, Tensor k, Tensor lse) -> Tensor", plain_summed_weights, _CUDA
)
