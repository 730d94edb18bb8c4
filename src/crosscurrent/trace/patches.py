"""Attributes of modules and classes that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch.jit import _builtins

_ABSENT = object()


class Patches(ExitStack):
    """Replaces attributes; ``close`` brings back what was there, exactly, the latest first.

    What an object only inherits is deleted again on the way back, not copied into it.
    """

    def set(self, owner: Any, name: str, value: object) -> None:
        """Replace ``owner.name``."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)

    def update(self, owner: Any, values: Mapping[str, object]) -> None:
        """Replace several attributes of one owner."""
        for name, value in values.items():
            self.set(owner, name, value)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(what it was)``."""
        before = getattr(owner, name)
        self.set(owner, name, wraps(before)(make(before)))

    def replace_builtin(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a function that TorchScript may know as a builtin, which it tells by identity."""
        table = _builtins._get_builtin_table()  # type: ignore[no-untyped-call]
        operator = table.get(id(getattr(owner, name)))
        self.set(owner, name, function)
        if operator is not None:
            table[id(function)] = operator
            self.callback(partial(_forget, table, function))


def _forget(table: dict[int, str], function: Callable[..., Any]) -> None:
    table.pop(id(function), None)  # one function may stand for two names
