"""The memory of a program as it is recorded: what blocks there are, and what is, or was, in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crosscurrent.schedules import arguments
from crosscurrent.schedules.arguments import bytes_of, kept
from crosscurrent.schedules.errors import NotReplayableError
from crosscurrent.schedules.program import Buffer, HostRead, View, poison_of
from crosscurrent.trace.access import Kind, Signature
from crosscurrent.trace.memory import Block
from crosscurrent.trace.recorder import Recorder
from crosscurrent.trace.records import Access, Op


class Contents:
    """The buffers of a program, and the values that were seen."""

    def __init__(self, tracer: Recorder) -> None:
        self._tracer = tracer
        self.buffers: dict[int, Buffer] = {}
        self.host_reads: list[HostRead] = []
        self.recorded: dict[str, Tensor] = {}
        self.device = "cpu"
        self._num_host_blocks = 0

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block that a tensor lies in; None for the host's own memory, and where there is nothing."""
        block = self._tracer.block_of(tensor)
        return block if block is not None and block.nbytes else None

    def meet(self, block: Block, tensor: Tensor) -> None:
        """See a block as an argument: unless it is known, it is older than the watch."""
        if block.index not in self.buffers:
            content = kept(bytes_of(tensor.untyped_storage()))
            self._note_device(tensor)
            self.buffers[block.index] = Buffer(block.nbytes, poison_of(tensor.dtype), content)

    def meet_storage(self, block: int, dtype: str) -> bool:
        """See a block that only records name; whether it is still there to be looked at."""
        storage = self.storage(block)
        if storage is not None and block not in self.buffers:
            fill = poison_of(getattr(torch, dtype, torch.uint8))
            self.buffers[block] = Buffer(storage.nbytes(), fill, kept(bytes_of(storage)))
        return storage is not None

    def meet_results(self, sign: Signature, ops: list[Op], args: Any, out: Any) -> None:
        """See new blocks; those that hold nothing yet, or less than they could, are poisoned."""
        resized = sign.kind is Kind.RESIZE or sign.grows
        for tensor in arguments.tensors_in((out, args if resized else ())):
            block = self.block_of(tensor)
            if block is None or block.index in self.buffers:
                continue
            self._note_device(tensor)
            fill = poison_of(tensor.dtype)
            self.buffers[block.index] = Buffer(block.nbytes, fill)
            if sign.kind in (Kind.EMPTY, Kind.RESIZE):
                moved = max((access.region.stop for op in ops for access in op.accesses), default=0)
                bytes_of(tensor.untyped_storage())[moved:].fill_(fill)

    def host_read(self, op: Op, value: Tensor, initial: Tensor | None) -> View:
        """Memory of the host's own that ends up holding ``value``."""
        view = self.scratch(View.of(value, 0), initial)
        site = self._tracer.info.site_at(op.site)
        place = "?" if site is None else f"{site.file}:{site.line}"
        name = f"{op.name} at {place} (read {len(self.host_reads) + 1} of the host)"
        self.host_reads.append(HostRead(view, name))
        self.recorded[name] = kept(value).reshape(view.shape)
        return view

    def scratch(self, like: View, initial: Tensor | None = None) -> View:
        """New contiguous memory of the host's own, of the shape and type of another view."""
        self._num_host_blocks += 1
        strides = tuple(torch.empty(like.shape, device="meta").stride())
        view = View(-self._num_host_blocks, like.dtype, like.shape, strides, 0)
        raw = None if initial is None else initial.contiguous().flatten().view(torch.uint8)
        nbytes = view.numel * view.torch_dtype.itemsize
        self.buffers[view.block] = Buffer(nbytes, poison_of(view.torch_dtype), raw)
        return view

    def content(self, access: Access) -> Tensor:
        """What a region holds now."""
        storage = self.storage(access.block)
        if storage is None:
            raise NotReplayableError(f"block {access.block} was freed before its content was kept")
        view = elements(access)
        raw = bytes_of(storage)
        whole = raw[: raw.numel() // view.torch_dtype.itemsize * view.torch_dtype.itemsize].view(
            view.torch_dtype
        )
        return kept(whole.as_strided(view.shape, view.strides, view.offset))

    def all_of(self, block: int) -> Tensor:
        """The bytes of a block now; none if it is gone."""
        storage = self.storage(block)
        return torch.empty(0, dtype=torch.uint8) if storage is None else kept(bytes_of(storage))

    def storage(self, block: int) -> torch.UntypedStorage | None:
        """The storage of a block; None if it is gone."""
        return self._tracer.storage_of(block)

    def _note_device(self, tensor: Tensor) -> None:
        if arguments.is_real_cuda(tensor):
            self.device = "cuda"


def elements(access: Access) -> View:
    """A region as its elements, or as bytes where that does not come out even."""
    start, _, run, dims = access.region
    dtype = getattr(torch, access.dtype, torch.uint8)
    size = dtype.itemsize
    if any(number % size for number in (start, run, *(stride for _, stride in dims))):
        dtype, size = torch.uint8, 1
    shape = (*(count for count, _ in dims), run // size)
    strides = (*(stride // size for _, stride in dims), 1)
    return View(access.block, str(dtype).removeprefix("torch."), shape, strides, start // size)
