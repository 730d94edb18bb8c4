"""Quantizers of cache entries and checkpoints: `default`, `torch-quantized8`, `torch-quantized4`.

Usage, with everything allocated beforehand and nothing synchronized:

    quantizer = make_quantizer(BufferKind.QUANTIZED8)
    packed = empty_packed(quantizer, x.shape, x.dtype, device=x.device)   # or pin_memory=True
    scratch = quantizer.empty_scratch(x.shape, x.dtype, device=x.device)  # one for each lane
    quantizer.quantize_(x, packed, scratch)
    quantizer.dequantize_(packed, x_again, scratch)
    y = round_trip(quantizer, x)                 # both, with a straight-through gradient

`packed` is a tuple of tensors, made to be copied one by one. `scratch` is None where none is
needed. Rows (the last dimension) are quantized each by itself, in blocks of 128 values if their
length is a multiple of it and else as a whole, so a tensor can be cut anywhere else first.

Note [Error bound]
A block with least value lo and greatest hi is stored as a midpoint mid, a scale, and signed codes q of at
most `levels` (127 or 7): x is read back as mid + q * scale. Arithmetic is float32, and float64 for float64;
u is its unit of rounding, 2^-24 or 2^-53.
- mid is lo/2 + hi/2, and one last bit nearer to zero, so that the end of greater magnitude is the farther
  one: r = max(hi - mid, mid - lo) is the distance to it.
- scale is r / levels, smaller by 8 u so that rounding never carries a value beyond that end, where it might
  overflow; and at least the smallest normal number, so that nothing is divided by zero.
Then, where u' is the rounding of the result to its dtype if that is narrower than float32,
    |x - x'| <= scale / 2 + 8 u max|x| + u' (max|x| + smallest normal of that dtype)
with scale / 2 about (hi - lo) / 508 or (hi - lo) / 28. The first term is the rounding of the code; the second
covers the roundings of subtracting, dividing, multiplying and adding, each at most u r or u max|x| with
r <= max|x| (1 + 2 u). In the third the smallest normal number is there for results below it, and for those
that half a step of the least scale has brought beyond max|x|.

Zeros come back exactly, and so do other constant rows if they are at least 2^7 / u times the smallest normal
number (below, a last bit may be lost). A block that holds a NaN or an infinity comes back as NaN, all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from crosscurrent.kvcache.names import BufferKind
from crosscurrent.operators.copies import copy_all

Packed = tuple[Tensor, ...]
Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]

_BLOCK = 128
# In units of rounding: see Note [Error bound].
_SHRINK_UNITS = 8
_SLACK_UNITS = 8


class Quantizer(Protocol):
    """Packs tensors into fewer bytes and back, into memory that the caller owns."""

    @property
    def kind(self) -> BufferKind:
        """The name, as a type."""

    def packed_shapes(self, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """(shape, dtype) of each part of the packed form; budgets are made from it."""

    def empty_scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Working memory for one lane and tensors of up to this shape; None if none is needed."""

    def quantize_(self, source: Tensor, out: Packed, scratch: Tensor | None) -> None:
        """Write the packed form of `source` to `out`."""

    def dequantize_(self, packed: Packed, out: Tensor, scratch: Tensor | None) -> None:
        """Write the values of `packed` to `out`, in the dtype of `out`."""

    def error_bound(self, source: Tensor) -> Tensor:
        """Greatest error of a round trip for each value of `source`, in float64."""


class Plain:
    """`default`: a copy."""

    kind = BufferKind.DEFAULT

    def packed_shapes(self, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        return ((tuple(shape), dtype),)

    def empty_scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        return None

    def quantize_(self, source: Tensor, out: Packed, scratch: Tensor | None) -> None:
        copy_all([out[0]], [source])

    def dequantize_(self, packed: Packed, out: Tensor, scratch: Tensor | None) -> None:
        copy_all([out], [packed[0]])

    def error_bound(self, source: Tensor) -> Tensor:
        return torch.zeros_like(source, dtype=torch.float64)


class TorchQuantized:
    """`torch-quantized8` and `torch-quantized4`: codes, and a scale and a midpoint a block."""

    def __init__(self, bits: int) -> None:
        if bits not in (4, 8):
            raise ValueError(f"torch quantizers have 4 or 8 bits, got {bits}")
        self.kind = BufferKind.QUANTIZED8 if bits == 8 else BufferKind.QUANTIZED4
        self._bits = bits
        self._levels = 2 ** (bits - 1) - 1

    def packed_shapes(self, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        *rows, size = shape
        num_blocks, block = _blocks(size)
        codes = (block, torch.int8) if self._bits == 8 else ((block + 1) // 2, torch.uint8)
        return (
            ((*rows, num_blocks, codes[0]), codes[1]),
            ((*rows, num_blocks, 2), _compute_dtype(dtype)),
        )

    def empty_scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(math.prod(shape), dtype=_compute_dtype(dtype), device=device)

    def quantize_(self, source: Tensor, out: Packed, scratch: Tensor | None) -> None:
        codes, ranges = out
        blocks = _as_blocks(source)
        mid, scale = ranges[..., :1], ranges[..., 1:]
        self._measure(blocks, mid, scale)
        values = _scratch_as(scratch, blocks.shape, ranges.dtype)
        torch.sub(blocks, mid, out=values).div_(scale).round_()
        if self._bits == 8:
            codes.copy_(values)
            return
        # Value i shares a byte with value i + half; both are shifted to 0 .. 14 in the one sum.
        half = codes.shape[-1]
        low, high = values[..., :half], values[..., half:]
        low[..., : high.shape[-1]].add_(high, alpha=16)
        codes.copy_(low.add_(self._levels * 17))

    def dequantize_(self, packed: Packed, out: Tensor, scratch: Tensor | None) -> None:
        codes, ranges = packed
        mid, scale = ranges[..., :1], ranges[..., 1:]
        blocks = _as_blocks(out)
        if self._bits == 8:
            torch.addcmul(mid, codes, scale, out=blocks)
            return
        values = _scratch_as(scratch, blocks.shape, ranges.dtype)
        half = codes.shape[-1]
        low, high = values[..., :half], values[..., half:]
        # In floating point, where it is exact, and which has kernels everywhere: CUDA has none that take bits
        # apart and write floats.
        low.copy_(codes)
        both, alone = low[..., : high.shape[-1]], low[..., high.shape[-1] :]
        torch.div(both, 16, rounding_mode="floor", out=high)
        both.sub_(high, alpha=16)
        # An odd value at the end has no partner: its upper bits are those of zero.
        alone.sub_(16 * self._levels)
        torch.addcmul(mid, values.sub_(self._levels), scale, out=blocks)

    def error_bound(self, source: Tensor) -> Tensor:
        blocks = _as_blocks(source)
        compute = _compute_dtype(source.dtype)
        mid = torch.empty(*blocks.shape[:-1], 1, dtype=compute, device=source.device)
        scale = torch.empty_like(mid)
        self._measure(blocks, mid, scale)
        largest = blocks.double().abs().amax(-1, keepdim=True)
        bound = scale.double() / 2 + _SLACK_UNITS * torch.finfo(compute).eps / 2 * largest
        if source.dtype != compute:
            finfo = torch.finfo(source.dtype)
            bound += finfo.eps / 2 * (largest + finfo.smallest_normal)
        return bound.expand(blocks.shape).reshape(source.shape)

    def _measure(self, blocks: Tensor, mid: Tensor, scale: Tensor) -> None:
        """Write midpoint and scale of each block; the scale is NaN if the block is not finite."""
        low, high = torch.aminmax(blocks, dim=-1, keepdim=True)
        low, high = low.to(mid.dtype), high.to(mid.dtype)
        finfo = torch.finfo(mid.dtype)
        # Halves first: the sum of two large numbers, or their distance, may not be finite.
        torch.add(high / 2, low, alpha=0.5, out=mid).mul_(1 - finfo.eps)
        radius = torch.maximum(high - mid, mid - low)
        shrunk = (1 - _SHRINK_UNITS * finfo.eps / 2) / self._levels
        # A block with an infinity has an infinite midpoint or none, so the radius is NaN; the clamp keeps it.
        torch.clamp(radius * shrunk, min=finfo.tiny, out=scale)


def make_quantizer(kind: BufferKind) -> Quantizer:
    """The quantizer of a buffer kind."""
    match kind:
        case BufferKind.DEFAULT:
            return Plain()
        case BufferKind.QUANTIZED8:
            return TorchQuantized(8)
        case BufferKind.QUANTIZED4:
            return TorchQuantized(4)


def empty_packed(
    quantizer: Quantizer,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    pin_memory: bool = False,
) -> Packed:
    """Memory for the packed form of a tensor of this shape and dtype."""
    return tuple(
        torch.empty(part, dtype=kind, device=device, pin_memory=pin_memory)
        for part, kind in quantizer.packed_shapes(shape, dtype)
    )


def packed_bytes(quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of the packed form of a tensor of this shape and dtype."""
    return sum(math.prod(part) * kind.itemsize for part, kind in quantizer.packed_shapes(shape, dtype))


class _RoundTrip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Tensor:
        packed = empty_packed(quantizer, x.shape, x.dtype, device=x.device)
        scratch = quantizer.empty_scratch(x.shape, x.dtype, x.device)
        quantizer.quantize_(x, packed, scratch)
        out = torch.empty_like(x)
        quantizer.dequantize_(packed, out, scratch)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def round_trip(quantizer: Quantizer, x: Tensor) -> Tensor:
    """Quantize and dequantize; the gradient passes straight through. `default` returns x itself."""
    if quantizer.kind is BufferKind.DEFAULT:
        return x
    return _RoundTrip.apply(x, quantizer)  # type: ignore[no-any-return, no-untyped-call]


def _blocks(size: int) -> tuple[int, int]:
    """Number and length of the blocks of a row."""
    return (size // _BLOCK, _BLOCK) if size % _BLOCK == 0 else (1, size)


def _as_blocks(x: Tensor) -> Tensor:
    """[..., D] -> [..., number of blocks, length of a block], a view."""
    return x.view(*x.shape[:-1], *_blocks(x.shape[-1]))


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _scratch_as(scratch: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    size = math.prod(shape)
    if scratch is None or scratch.numel() < size or scratch.dtype != dtype:
        seen = "none" if scratch is None else f"{scratch.numel()} of {scratch.dtype}"
        raise ValueError(
            f"quantizing {list(shape)} needs a scratch of {size} elements of {dtype}, got {seen}; "
            f"make one with empty_scratch"
        )
    return scratch[:size].view(shape)
