"""All memory of a replay in one allocation, so that a run starts, and is compared, with one call each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crosscurrent.schedules.program import Program, View
from crosscurrent.schedules.reuse import GRANULARITY, Reuse, places


class Arena:
    """The blocks of a program, each at its place, those that reuse memory on top of what they reuse."""

    def __init__(self, program: Program, reuse: Sequence[Reuse] = ()) -> None:
        self._program = program
        self.taken = {choice.block: choice.old for choice in reuse}
        """By block that takes over memory: the block whose memory it takes."""
        self._address = self._lay_out(places(program.records, reuse))
        size = max((at + program.buffers[block].nbytes for block, at in self._address.items()), default=0)
        self.bytes = torch.empty(
            -(-max(size, 1) // GRANULARITY) * GRANULARITY, dtype=torch.uint8, device=program.device
        )
        """The memory. ``image`` says how a run starts."""
        self.words = self.bytes.view(torch.int64)
        self.image = self._image()
        self._views: dict[View, Tensor] = {}

    def view(self, view: View) -> Tensor:
        """The tensor of a view; the same object each time."""
        tensor = self._views.get(view)
        if tensor is None:
            tensor = self._views[view] = self.view_in(view, self.bytes)
        return tensor

    def view_in(self, view: View, memory: Tensor) -> Tensor:
        """The tensor of a view in another image of this arena."""
        start = self._address[view.block] // view.torch_dtype.itemsize + view.offset
        empty = torch.empty(0, dtype=view.torch_dtype, device=memory.device)
        tensor = empty.set_(memory.untyped_storage(), start, view.shape, view.strides)
        if "conj" in view.lazy:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if "neg" in view.lazy else tensor

    def span(self, block: int, memory: Tensor | None = None) -> Tensor:
        """The bytes of a block, here or in another image of this arena."""
        at = self._address[block]
        return (self.bytes if memory is None else memory)[at : at + self._program.buffers[block].nbytes]

    def _lay_out(self, where: dict[int, tuple[int, int]]) -> dict[int, int]:
        extents: dict[int, tuple[int, int]] = {}
        for block in self._program.buffers:
            root, shift = where.get(block, (block, 0))
            start, stop = extents.get(root, (0, 0))
            extents[root] = min(start, shift), max(stop, shift + self._program.buffers[block].nbytes)
        base: dict[int, int] = {}
        free = 0
        for root, (start, stop) in extents.items():
            base[root] = free - start
            free += -(-(stop - start) // GRANULARITY) * GRANULARITY
        # Shifts are multiples of the granularity, so every block is aligned as the allocator would align it.
        address = {}
        for block in self._program.buffers:
            root, shift = where.get(block, (block, 0))
            address[block] = base[root] + shift
        return address

    def _image(self) -> Tensor:
        image = torch.full_like(self.bytes, 0xFF)
        for block, buffer in self._program.buffers.items():
            if block in self.taken:
                continue  # poisoned when it is taken over
            span = self.span(block, image)
            span.fill_(buffer.fill)
            if buffer.initial is not None:
                span.copy_(buffer.initial)
        return image
