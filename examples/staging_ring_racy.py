"""The racy twin of ``staging_ring.py``: the host fills a buffer that a copy still reads."""

from __future__ import annotations

import torch
from torch import Tensor


class StagingRing:
    """Uploads float32 tensors of up to ``size`` elements, on the current stream."""

    def __init__(self, size: int, *, num_slots: int = 3) -> None:
        self._slots = [torch.empty(size, pin_memory=True) for _ in range(num_slots)]
        self._copied = [torch.cuda.Event() for _ in range(num_slots)]
        self._num_uploads = 0

    def upload(self, source: Tensor) -> Tensor:
        """The tensor on the device, for work on the current stream."""
        index = self._num_uploads % len(self._slots)
        self._num_uploads += 1
        staged = self._slots[index][: source.numel()].view(source.shape)
        staged.copy_(source)
        on_device = torch.empty(source.shape, device="cuda")
        on_device.copy_(staged, non_blocking=True)
        self._copied[index].record()
        return on_device


def main() -> Tensor:
    """Sum the squares of some tensors."""
    ring = StagingRing(1024)
    total = torch.zeros((), device="cuda")
    for number in range(8):
        total += ring.upload(torch.full((16, 64), float(number))).square().sum()
    return total.cpu()


if __name__ == "__main__":
    print(main())
