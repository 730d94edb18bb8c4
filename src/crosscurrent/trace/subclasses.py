"""Tensor subclasses that handle their own ops."""

from __future__ import annotations

import torch
from torch import Tensor


def has_own_dispatch(kind: type) -> bool:
    """Whether a class of tensors takes its ops apart itself (a wrapper, a fake tensor, a jagged one).

    A dispatch mode that steps aside for it, by returning ``NotImplemented``, gets to see the ops on the
    tensors inside.
    """
    handler = getattr(kind, "__torch_dispatch__", None)
    return (
        kind is not Tensor
        and handler is not None
        and handler is not torch._C._disabled_torch_dispatch_impl
        and handler is not getattr(Tensor, "__torch_dispatch__", None)
    )
