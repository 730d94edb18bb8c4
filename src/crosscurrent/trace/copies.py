"""What a copy does, by where its two sides live.

The rules are those of PyTorch's ``copy_kernel_cuda`` and of ``cudaMemcpyAsync``:

- A copy between host and device is one asynchronous transfer when both sides are one run of bytes. If not,
  it goes through a contiguous temporary; what that means depends on the side that is not contiguous. A
  temporary on the device changes nothing. A temporary on the host is pageable, so that the host itself
  touches the pinned memory, and waits.
- Types are converted on the device when ``non_blocking``, else on the host.
- After a blocking copy into a device tensor that needed a temporary there, the last step runs on the
  stream and is not waited for.
- Between devices, the copy runs on the source's current stream, and joins the destination's before and after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from crosscurrent.trace.memory import Block, expands_contiguous, is_one_run
from crosscurrent.trace.records import HOST, Access, Op

if TYPE_CHECKING:
    from crosscurrent.trace.tracer import Tracer


class _Copy:
    """One copy: its two tensors, their blocks (None: pageable), and the accesses that it can make."""

    __slots__ = ("name", "non_blocking", "read", "source", "source_block", "target", "target_block", "write")

    def __init__(self, tracer: Tracer, name: str, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        self.name = name
        self.target = target
        self.source = source
        self.non_blocking = non_blocking
        self.target_block = tracer.block_of(target)
        self.source_block = tracer.block_of(source)
        self.read = _access(tracer, self.source_block, source, write=False)
        self.write = _access(tracer, self.target_block, target, write=True)

    def is_one_run(self) -> bool:
        return is_one_run(self.target, self.source)


def copy(tracer: Tracer, name: str, target: Any, source: Any, non_blocking: bool) -> None:
    """``target.copy_(source, non_blocking)``, which has run."""
    if not isinstance(target, Tensor) or not isinstance(source, Tensor) or target.numel() == 0:
        return
    if target.is_meta or source.is_meta:
        return  # a shape without content, which autograd asks for at times
    this = _Copy(tracer, name, target, source, bool(non_blocking))
    to, from_ = this.target_block, this.source_block
    to_device = to.device if to is not None and to.on_device else None
    from_device = from_.device if from_ is not None and from_.on_device else None
    if to_device is not None and from_device is not None:
        _between_devices(tracer, this, to_device, from_device)
    elif to_device is not None:
        _to_device(tracer, this, tracer.lane(to_device))
    elif from_device is not None:
        _to_host(tracer, this, tracer.lane(from_device))
    else:
        _op(tracer, HOST, name, this.read + this.write)


def _access(tracer: Tracer, block: Block | None, tensor: Tensor, *, write: bool) -> tuple[Access, ...]:
    if block is None:
        return ()
    region, shape, dtype = tracer.layouts.of(tensor)
    return () if region is None else (Access(block.index, region, write, shape, dtype),)


def _op(tracer: Tracer, lane: int, name: str, accesses: tuple[Access, ...]) -> int:
    return tracer.put(Op, lane, name, tracer.site, accesses) if accesses else -1


def _kept(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
    """The pinned side of an asynchronous copy: the host allocator keeps the block until the copy is done."""
    return tuple(access._replace(kept=True) for access in accesses)


def _used(block: Block | None, lane: int, index: int) -> None:
    if block is not None and not block.on_device:
        block.uses = {**(block.uses or {}), lane: index}


def _between_devices(tracer: Tracer, this: _Copy, to: int, from_: int) -> None:
    lane = tracer.lane(from_)
    other = tracer.lane(to)
    if to != from_:
        tracer.join(lane, other, "copy")
    _op(tracer, lane, this.name, this.read + this.write)
    if to != from_:
        tracer.join(other, lane, "copy")


def _to_device(tracer: Tracer, this: _Copy, lane: int) -> None:
    pinned = this.source_block is not None
    contiguous = this.is_one_run()
    source_as_it_is = contiguous or expands_contiguous(this.source, this.target.shape)
    if this.non_blocking:
        if pinned and source_as_it_is:
            index = _op(tracer, lane, this.name, _kept(this.read) + this.write)
            _used(this.source_block, lane, index)
            return
        _op(tracer, HOST, this.name, this.read)
        tracer.host_wait("strided copy" if pinned else "pageable copy", (), this.name)
        _op(tracer, lane, this.name, this.write)
        return
    same_type = this.source.dtype == this.target.dtype
    direct_read = pinned and source_as_it_is and same_type
    direct_write = contiguous or this.target.is_contiguous()
    if not direct_read:
        _op(tracer, HOST, this.name, this.read)
    before = (this.read if direct_read else ()) + (this.write if direct_write else ())
    _op(tracer, lane, this.name, before)
    tracer.host_wait("blocking copy", (lane,), this.name)
    if not direct_write:
        _op(tracer, lane, this.name, this.write)


def _to_host(tracer: Tracer, this: _Copy, lane: int) -> None:
    pinned = this.target_block is not None
    contiguous = this.is_one_run()
    if this.non_blocking:
        direct = contiguous or this.target.is_contiguous()
        if pinned and direct:
            index = _op(tracer, lane, this.name, this.read + _kept(this.write))
            _used(this.target_block, lane, index)
            return
        kind = "strided copy" if pinned else "pageable copy"
    else:
        direct = contiguous or (this.target.is_contiguous() and this.source.dtype == this.target.dtype)
        kind = "blocking copy"
    _op(tracer, lane, this.name, this.read + (this.write if direct else ()))
    tracer.host_wait(kind, (lane,), this.name)
    if not direct:
        _op(tracer, HOST, this.name, this.write)
