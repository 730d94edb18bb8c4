"""What can be wrong with a program or a schedule that is handed in. Nothing has run when these are raised."""

from __future__ import annotations

from crosscurrent.errors import CrosscurrentError


class ReplayError(CrosscurrentError, ValueError):
    """A program or a schedule that cannot be run."""


class DamagedError(ReplayError):
    """It is not what was written: bytes are missing or have changed."""


class VersionError(ReplayError):
    """It was written by another version of crosscurrent."""


class ProgramMismatchError(ReplayError):
    """The schedule belongs to another program."""


class NotReplayableError(ReplayError):
    """The program holds something whose values were not kept; the message says what."""
