"""The errors of the verifier: one root, few leaves."""

from __future__ import annotations

from collections.abc import Sequence


class CrosscurrentError(Exception):
    """Anything that crosscurrent itself has to complain about."""


class WrongUseError(CrosscurrentError, RuntimeError):
    """Crosscurrent was called in a way that cannot work; the message says what to do."""


class RaceError(CrosscurrentError, AssertionError):
    """A watch found races. ``findings`` holds them, and the message shows all of them."""

    def __init__(self, findings: Sequence[object]) -> None:
        self.findings = tuple(findings)
        num = len(self.findings)
        heading = "1 race" if num == 1 else f"{num} races"
        super().__init__("\n\n".join([heading, *(str(finding) for finding in self.findings)]))
