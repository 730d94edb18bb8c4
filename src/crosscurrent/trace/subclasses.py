"""Tensor subclasses that handle their own ops."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode

_Key = torch._C._TorchDispatchModeKey
_get_mode = torch._C._get_dispatch_mode


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


def step_aside(
    mode: AbstractContextManager[Any], func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a dispatch mode gives back for an op on subclasses that handle it themselves.

    Usually ``NotImplemented``: PyTorch asks the subclass next, and ``mode`` sees what that does inside. But
    fake and functional tensors refuse their ops while the mode that they belong to is on, which comes after
    all other modes. So it is that one which is asked.
    """
    if _belong_to(types, FakeTensor, _Key.FAKE):
        return func(*args, **kwargs)  # nothing happens inside: they have no memory
    if _belong_to(types, FunctionalTensor, _Key.FUNCTIONAL):
        functional = _get_mode(_Key.FUNCTIONAL)
        with disable_functional_mode(), mode:
            return functional.__torch_dispatch__(func, types, args, kwargs)
    return NotImplemented


def _belong_to(types: Any, owned: type, key: Any) -> bool:
    """Whether the mode of ``key`` is on, and knows all the subclasses."""
    return _get_mode(key) is not None and all(
        issubclass(kind, owned) or not has_own_dispatch(kind) for kind in types
    )
