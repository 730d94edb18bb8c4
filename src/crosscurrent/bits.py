"""Results to the last bit: how they are compared, and how they come out the same each time.

Bits and not values count, since NaN equals nothing and -0 equals 0. Here a NaN is the same as one of the same
bits: whoever promises that there is none has to look for it, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors on one device are the same, bit for bit. Waits for the device."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(_bytes(one), _bytes(other))


def difference(one: Tensor, other: Tensor) -> str | None:
    """In what the bits of two tensors differ, in words; None if in nothing. Waits for the device."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    one, other = one.detach().cpu(), other.detach().cpu()
    if same_bits(one, other):
        return None
    apart = (_bytes(one) != _bytes(other)).view(one.numel(), one.element_size()).any(dim=1)
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.flatten().to(wide), other.flatten().to(wide)
    distance = (one - other)[apart].abs().nan_to_num(nan=0.0).max()
    said = f"{int(apart.sum())} of {one.numel()} elements differ, by up to {float(distance):.6g}"
    nan = int(one.isnan().sum()), int(other.isnan().sum())
    return f"{said}; {nan[0]} and {nan[1]} NaN" if any(nan) else said


@contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that give the same bits each time: on a GPU some add with atomics otherwise."""
    ask_cublas()
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def ask_cublas() -> None:
    """Ask cuBLAS for the same bits each time; without that PyTorch refuses to call it deterministically.

    To be called before cuBLAS is first used, which is when it looks.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of all elements, one after the other."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element may have any stride, with which PyTorch refuses to look at its bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
