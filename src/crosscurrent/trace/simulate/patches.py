"""Attributes of PyTorch that a simulation replaces, and puts back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

_ABSENT = object()


class Patches:
    """Replaces attributes of modules and classes; ``restore`` brings back what was there, exactly.

    What an object only inherits is deleted again on the way back, not copied into it.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, object]] = []
        self._contexts = ExitStack()

    def set(self, owner: Any, name: str, value: object) -> None:
        """Replace ``owner.name``."""
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def update(self, owner: Any, values: Mapping[str, object]) -> None:
        """Replace several attributes of one owner."""
        for name, value in values.items():
            self.set(owner, name, value)

    def enter(self, context: AbstractContextManager[Any]) -> None:
        """Enter a context, to be left when everything is restored."""
        self._contexts.enter_context(context)

    def restore(self) -> None:
        """Undo every replacement, the latest first."""
        self._contexts.close()
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
