"""Registering an operator with its two versions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("crosscurrent", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(schema: str, plain: Callable[..., Any], cuda_module: str) -> Callable[..., Any]:
    """Define an operator and return it. On CUDA the function of the same name in `cuda_module` is called.

    That module is imported with the first call: only CUDA builds of PyTorch bring Triton along.
    """
    name = schema.partition("(")[0]
    found: list[Callable[..., Any]] = []

    def on_cuda(*args: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(cuda_module), name))
        return found[0](*args)

    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, plain, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(name, on_cuda, "CUDA")  # type: ignore[no-untyped-call]
    operator: Callable[..., Any] = getattr(torch.ops.crosscurrent, name).default
    return operator
