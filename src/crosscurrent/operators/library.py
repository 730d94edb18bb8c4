"""Registering an operator with its two versions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("crosscurrent", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(schema: str, plain: Callable[..., Any], cuda_module: str) -> Callable[..., Any]:
    """Define an operator and return it. On CUDA the function of the same name in `cuda_module` is called.

    That module is imported with the first call: only CUDA builds of PyTorch bring Triton along. Its kernels
    read and write whole rows, and so get no tensor whose last stride is not 1, whatever the caller has.
    """
    name, _, signature = schema.partition("(")
    writes = [part.startswith("Tensor(") for part in signature.split(", ")]
    found: list[Callable[..., Any]] = []

    def on_cuda(*args: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(cuda_module), name))
        return found[0](*map(in_rows, args, writes))

    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, plain, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(name, on_cuda, "CUDA")  # type: ignore[no-untyped-call]
    operator: Callable[..., Any] = getattr(torch.ops.crosscurrent, name).default
    return operator


def in_rows(argument: Any, is_written: bool) -> Any:
    """An argument; in place of a tensor whose rows are not contiguous a copy, unless it is to be written."""
    if not isinstance(argument, Tensor) or argument.ndim == 0:
        return argument
    if argument.stride(-1) == 1 or argument.shape[-1] < 2:
        return argument
    if is_written:
        raise ValueError(
            f"a tensor that is written in place must have contiguous rows, got strides {argument.stride()} "
            f"for shape {tuple(argument.shape)}; pass one whose last stride is 1"
        )
    return argument.contiguous()
