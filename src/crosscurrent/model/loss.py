"""Next-token cross entropy over slices, so that logits never exist for a whole sequence.

Usage:

    targets_BT = align_targets(targets, length=ids_BT.shape[1])   # on the CPU, before upload
    ranges = slices(T, batch_size=B, vocab_size=V)
    total = sum(head.loss_sum(x_BTE[:, a:b], targets_BT[:, a:b]) for a, b in ranges)
    loss = total / count_targets(targets_BT)

A target is the token that should follow its input. Targets may be shorter than the inputs and then belong
to the last ones. -100 is ignored, in the sum and in the count.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

IGNORE_INDEX = -100

# Float32 logits of one slice: 256 MiB. A slice only needs enough rows for efficient products.
_SLICE_ELEMENTS = 1 << 26


def align_targets(targets: Tensor, length: int) -> Tensor:
    """Pad targets [B, T'] on the left with -100 to [B, length]; the same tensor if T' == length."""
    missing = length - targets.shape[1]
    if missing < 0:
        raise ValueError(
            f"targets are longer than inputs: {targets.shape[1]} targets, {length} inputs; they align on "
            f"the right, so drop the first {-missing} targets or pass the inputs that they belong to"
        )
    return functional.pad(targets, (missing, 0), value=IGNORE_INDEX) if missing else targets


def count_targets(targets_BT: Tensor) -> Tensor:
    """How many targets are not ignored, at least 1, as an integer scalar where the targets live."""
    return (targets_BT != IGNORE_INDEX).sum().clamp_(min=1)


def slices(length: int, *, batch_size: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    """Half-open token ranges, as equal as can be, whose logits have a bounded size."""
    longest = max(1, _SLICE_ELEMENTS // (batch_size * vocab_size))
    number = -(-length // longest)
    for i in range(number):
        yield i * length // number, (i + 1) * length // number


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum over the targets that are not ignored, in float32 or wider."""
    logits_NV = logits_BTV.flatten(0, -2)
    if logits_NV.itemsize < 4:
        logits_NV = logits_NV.float()
    return functional.cross_entropy(
        logits_NV, targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
