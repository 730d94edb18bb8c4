"""Copies of many tensors: the same as one by one, in as few kernels as can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.operators.copies import copy_all

DTYPES = (torch.bfloat16, torch.int32, torch.int16, torch.float64, torch.uint8, torch.int64)


class Copies(TorchDispatchMode):
    """Counts the ops that copy."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._foreach_copy_.default
        return func(*args, **(kwargs or {}))


def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits: NaNs, too."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return row.view(dtype).squeeze(-1)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("shapes", [[(2, 3)], [(), (0,), (5,)], [(4, 2), (), (3, 1)]], ids=str)
def test_all_dtypes_come_out_to_the_bit(shapes: list[tuple[int, ...]]) -> None:
    sources = [draw(seed, shape, dtype) for seed, dtype in enumerate(DTYPES) for shape in shapes]
    targets = [torch.zeros_like(source) for source in sources]
    with Copies() as copies:
        copy_all(targets, sources)
    assert copies.count == 2  # one for single bytes
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(bits(target), bits(source))


def test_what_does_not_lie_alike_is_copied_by_its_values() -> None:
    sources = [torch.arange(6.0).view(2, 3).mT, torch.arange(4), torch.arange(3.0), torch.ones(3, 1)]
    targets = [
        torch.zeros(3, 2),
        torch.zeros(8, dtype=torch.int64)[::2],
        torch.zeros(3).bfloat16(),
        torch.zeros(3, 2),
    ]
    copy_all(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype).expand_as(target))


def test_one_dtype_is_copied_as_it_is() -> None:
    sources = [torch.full((2,), value, requires_grad=True) for value in (1.0, 2.0)]
    targets = [torch.zeros(2), torch.zeros(2)]
    with torch.no_grad(), Copies() as copies:
        copy_all(targets, sources)
    assert copies.count == 1
    assert [target.tolist() for target in targets] == [[1.0, 1.0], [2.0, 2.0]]
