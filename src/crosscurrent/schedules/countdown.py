"""How much of some work is left, where only a bound is known beforehand, and it may end early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Progress: TypeAlias = Callable[[float, int], None]
"""Called with the steps that were taken, and with how many there will be at most, which never grows. Of steps
that take long, parts are told, too."""


class Countdown:
    """Counts the steps of some work, and those that are left at most.

    Parts of the work have bounds of their own. What a part did not need when it ends, however it ends, is
    counted off at once.
    """

    def __init__(self, told: Progress | None = None) -> None:
        self._told = told
        self._taken = 0
        self._left = 0

    def expect(self, most: int) -> None:
        """At most so many steps are ahead."""
        self._left = most
        self._tell()

    def take(self, steps: int = 1) -> None:
        """So many steps were taken."""
        self._taken += steps
        self._left = max(0, self._left - steps)
        self._tell()

    def amid(self, steps: float) -> None:
        """So many of the steps that will be taken next are done already, the last of them in part."""
        self._tell(steps)

    def skip(self, steps: int) -> None:
        """So many steps are not needed after all."""
        self._left = max(0, self._left - steps)
        self._tell()

    @contextmanager
    def part(self, most: int) -> Iterator[None]:
        """A part of at most so many of the steps that are ahead."""
        after = max(0, self._left - most)
        try:
            yield
        finally:
            self.skip(self._left - after)

    def _tell(self, ahead: float = 0) -> None:
        if self._told is not None:
            self._told(self._taken + ahead, self._taken + self._left)
