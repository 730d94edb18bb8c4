"""Functions of the ``torch`` module that make tensors from data, or take a device as a plain number."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext, _device_constructors

from crosscurrent.trace.aliases import aliases
from crosscurrent.trace.simulate.tensors import move

if TYPE_CHECKING:
    from crosscurrent.trace.patches import Patches
    from crosscurrent.trace.simulate.simulation import Simulation

_CPU = torch.device("cpu")
_FROM_DATA = ("tensor", "as_tensor", "asarray")
_MORE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")


def default_device() -> torch.device | None:
    """The device of ``with torch.device(...)`` or ``set_default_device``, if there is one."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)


def patch_factories(simulation: Simulation, patches: Patches) -> None:
    """Replace the factories in the module ``torch``."""
    # Filled once and for all with the real functions, which is what a device context compares with.
    constructors = {function.__name__ for function in _device_constructors()}
    for owner, name, make in aliases():
        patches.replace_builtin(owner, name, make(getattr(owner, name)))
    for name in sorted(constructors | set(_MORE)):
        real = vars(torch).get(name)
        if real is not None and name.startswith("sparse_"):
            patches.replace_builtin(torch, name, _dense_only(real))
        elif real is not None and name not in _FROM_DATA:
            patches.replace_builtin(torch, name, _with_number(real))
    for name in _FROM_DATA:
        made = _from_data(simulation, getattr(torch, name), copies=name == "tensor")
        patches.replace_builtin(torch, name, made)


def _dense_only(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def factory(*args: Any, **kwargs: Any) -> Any:
        wanted: Any = kwargs.get("device")
        wanted = default_device() if wanted is None else wanted
        if isinstance(wanted, int) or (wanted is not None and torch.device(wanted).type == "cuda"):
            raise NotImplementedError(
                f"simulated CUDA has only dense strided tensors (torch.{real.__name__})"
            )
        return real(*args, **kwargs)

    return factory


def _with_number(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return real(*args, **kwargs)

    return factory


def _from_data(simulation: Simulation, real: Callable[..., Tensor], *, copies: bool) -> Callable[..., Tensor]:
    @wraps(real)
    def factory(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        wanted: Any = kwargs.pop("device", None)
        if wanted is None:
            wanted = data.device if isinstance(data, Tensor) else default_device()
        device = simulation.full_device(wanted)
        if isinstance(data, Tensor):
            # PyTorch would copy it where no mode can see.
            data = data.detach().clone() if copies else data
            data = data if device is None else data.to(device)
        elif isinstance(data, (list, tuple)):
            data, dtype = _values(data)
            if dtype is not None and not args:
                kwargs.setdefault("dtype", dtype)
        if device is None or device.type != "cuda":
            pinned = kwargs.pop("pin_memory", False)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="To copy construct from a tensor")
                made = real(data, *args, device=device or _CPU, **kwargs)
            return made.pin_memory() if pinned else made
        grad = kwargs.pop("requires_grad", False)
        kwargs.pop("pin_memory", None)
        if isinstance(data, Tensor):
            made = data.clone() if kwargs.pop("copy", False) else data
            made = made.to(kwargs.get("dtype", args[0] if args else None) or made.dtype)
        else:
            made = move(real(data, *args, device=_CPU, **kwargs), device)
        return made.requires_grad_() if grad else made

    return factory


def _values(data: Any) -> tuple[Any, torch.dtype | None]:
    """Nested lists with the tensors in them as plain values, and the dtype of those tensors.

    PyTorch would read them where no mode can see.
    """
    if isinstance(data, Tensor):
        return data.tolist(), data.dtype
    if not isinstance(data, (list, tuple)) or not any(isinstance(one, (Tensor, list, tuple)) for one in data):
        return data, None
    pairs = [_values(one) for one in data]
    dtypes = [dtype for _, dtype in pairs]
    known = [dtype for dtype in dtypes if dtype is not None]
    # Without a tensor everywhere, plain numbers take part in the choice, and PyTorch makes it.
    common = functools.reduce(torch.promote_types, known) if len(known) == len(dtypes) else None
    return [values for values, _ in pairs], common
