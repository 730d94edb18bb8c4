"""What a person calls the tensors of a program: the variables of its module, and what these hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import islice

from torch import Tensor, nn, optim

_DEEP = 3
"""How many containers are opened, one in the other."""

_LONG = 1000
"""How many items of one container are looked at."""


def tensors_of(namespace: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of a namespace by name: ``loss``, ``model.layers.0.weight.grad``, ``batches[1]``.

    Looks into modules, optimizers, lists, tuples and dictionaries. A tensor with two names has the first.
    """
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in list(namespace.items()):
        if name.startswith("__"):
            continue
        for found, tensor in _tensors(name, value, _DEEP):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named[found] = tensor
    return named


def _tensors(name: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        grad = value.grad if value.is_leaf else None
        if grad is not None:
            yield f"{name}.grad", grad
    elif isinstance(value, nn.Module):
        # A module of the program may compute what it calls its parameters: then it has no names to give.
        with contextlib.suppress(Exception):
            for part, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield from _tensors(f"{name}.{part}", tensor, depth)
    elif depth:
        for part, item in _items(value):
            yield from _tensors(f"{name}{part}", item, depth - 1)


def _items(value: object) -> Iterator[tuple[str, object]]:
    """What a container of a plain kind holds; subclasses may do anything when they are asked."""
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        yield from ((f"[{number}]", item) for number, item in enumerate(islice(value, _LONG)))
    elif type(value) is dict:
        yield from (
            (f"[{key!r}]", item) for key, item in islice(value.items(), _LONG) if isinstance(key, str | int)
        )
    elif isinstance(value, optim.Optimizer):
        for number, state in enumerate(islice(value.state.values(), _LONG)):
            yield f".state[{number}]", state
