"""The racy twin of ``prefetch.py``: a slot is filled again while main still computes on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Prefetcher:
    """Hands out pinned batches of one shape, one after the other, on the device.

    A batch may be used until the next one is asked for: then its memory is filled again.
    """

    def __init__(self, batches: Sequence[Tensor], *, device: str = "cuda", num_slots: int = 2) -> None:
        self._batches = batches
        # One copy engine brings batches in, next to the kernels of the caller's stream.
        self._copies = torch.cuda.Stream(device)
        self._slots = [torch.empty_like(batches[0], device=device) for _ in range(num_slots)]
        self._filled = [torch.cuda.Event() for _ in range(num_slots)]
        self._consumed = [torch.cuda.Event() for _ in range(num_slots)]

    def __iter__(self) -> Iterator[Tensor]:
        main = torch.cuda.current_stream()
        for consumed in self._consumed:
            # The memory of a new slot may have been something else that main still uses.
            consumed.record(main)
        for index in range(min(len(self._slots), len(self._batches))):
            self._fetch(index)
        try:
            for index in range(len(self._batches)):
                slot = index % len(self._slots)
                # Read after write: the copy into this slot may still be under way.
                main.wait_event(self._filled[slot])
                yield self._slots[slot]
                self._consumed[slot].record(main)
                if index + len(self._slots) < len(self._batches):
                    self._fetch(index + len(self._slots))
        finally:
            # Reuse: who leaves the loop early may free the slots while a copy is on its way.
            main.wait_stream(self._copies)

    def _fetch(self, index: int) -> None:
        slot = index % len(self._slots)
        with torch.cuda.stream(self._copies):
            self._slots[slot].copy_(self._batches[index], non_blocking=True)
            self._filled[slot].record()


def main() -> Tensor:
    """Sum the squares of some batches."""
    batches = [torch.full((256,), float(number)).pin_memory() for number in range(6)]
    total = torch.zeros((), device="cuda")
    for batch in Prefetcher(batches):
        total += batch.square().sum()
    return total.cpu()


if __name__ == "__main__":
    print(main())
