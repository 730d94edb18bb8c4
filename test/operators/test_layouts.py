"""Tensors whose rows are not contiguous, such as the gradient of a transposed matrix.

Kernels read whole rows: they must never be given others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscurrent.operators import attention
from crosscurrent.operators.library import in_rows
from crosscurrent.operators.rotation import rotate
from crosscurrent.operators.rows import add_at_, add_rows_, follow_rows, pair_, place_, take_rows


def columns(x: Tensor) -> Tensor:
    """The same values, with neighbours of a row apart."""
    return x.mT.contiguous().mT


def test_what_is_read_is_copied_if_its_rows_are_not_contiguous() -> None:
    x = torch.arange(6.0).view(2, 3)
    for right in (x, x[:, :2], x[:1].expand(4, 3), columns(x[:, :1]), torch.tensor(1.0), 3, None):
        assert in_rows(right, False) is right
        assert in_rows(right, True) is right
    copy = in_rows(columns(x), False)
    assert copy.stride() == (3, 1)
    assert torch.equal(copy, x)


def test_what_is_written_is_refused_if_its_rows_are_not_contiguous() -> None:
    with pytest.raises(ValueError, match=r"written in place must have contiguous rows, got strides \(1, 2\)"):
        in_rows(columns(torch.ones(2, 3)), True)


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Operators, and what they may be called with."""
    draw = torch.Generator().manual_seed(0)

    def wide(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def normal(*shape: int) -> Tensor:
        return wide(*shape).to(dtype)

    def choices(*shape: int, of: int) -> Tensor:
        return torch.rand(*shape[:-1], of, generator=draw).argsort(-1)[..., : shape[-1]].int()

    q, k, v = normal(2, 4, 6, 8), normal(2, 2, 9, 8), normal(2, 2, 9, 8)
    out, lse = attention.attend(q, k, v)
    return {
        "rotate": (rotate, (normal(2, 3, 5, 8), wide(5, 4), wide(5, 4), -1)),
        "take_rows": (take_rows, (normal(4, 2, 9, 5), choices(2, 3, 2, 4, of=9))),
        "add_rows_": (add_rows_, (wide(4, 2, 9, 5), choices(2, 3, 2, 4, of=9), normal(4, 3, 2, 4, 5))),
        "place_": (place_, (normal(4, 2, 9, 5), choices(2, 2, 3, of=6), normal(4, 2, 3, 5), 6)),
        "follow_rows": (follow_rows, (choices(2, 2, 9, of=30), choices(2, 3, 2, 3, of=6), 40, 3)),
        "pair_": (pair_, (wide(2, 2, 2, 9), choices(2, 2, 3, of=6), 1, 6, 3)),
        "add_at_": (add_at_, (normal(7, 5), torch.tensor([1, 3, 6]), normal(3, 5))),
        "attend": (attention.attend, (q, k, v)),
        "attend_backward": (attention.attend_backward, (normal(2, 4, 6, 8), q, k, v, out, lse)),
        "summed_weights": (attention.summed_weights, (q, k, lse)),
    }


def call(operator: Any, args: tuple[Any, ...], *, lay: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What an operator gives and writes on a GPU, where what it reads is laid out somehow."""
    written = [bool(a.alias_info and a.alias_info.is_write) for a in operator._schema.arguments]
    given = []
    for arg, is_written in zip(args, written, strict=True):
        on_gpu = arg.cuda() if isinstance(arg, Tensor) else arg
        given.append(lay(on_gpu) if isinstance(arg, Tensor) and arg.ndim > 1 and not is_written else on_gpu)
    out = operator(*given)
    outs = [] if out is None else [out] if isinstance(out, Tensor) else list(out)
    return outs + [arg for arg, is_written in zip(given, written, strict=True) if is_written]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(arguments()))
def test_operators_take_any_layout_of_what_they_read(name: str, dtype: torch.dtype) -> None:
    operator, args = arguments(dtype)[name]
    usual, got = call(operator, args, lay=lambda x: x), call(operator, args, lay=columns)
    assert usual
    for expected, found in zip(usual, got, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.gpu
def test_scores_may_be_a_part_of_a_larger_tensor() -> None:
    operator, (state, *others) = arguments()["pair_"]
    larger = torch.randn(3, 4, 5, 12, device="cuda")
    part = larger[:2, 1:3, 2:4, :9].copy_(state)
    on_gpu = [arg.cuda() if isinstance(arg, Tensor) else arg for arg in others]
    assert torch.equal(operator(part, *on_gpu).cpu(), operator(state, *others))
    assert torch.equal(part.cpu(), state)
