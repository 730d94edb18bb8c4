"""What a command tells the shell, and the errors that end one early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from crosscurrent.errors import CrosscurrentError, WrongUseError

__all__ = ["CommandError", "ExitCode", "WrongUseError", "as_wrong_use"]


class ExitCode(IntEnum):
    """The exit codes of every command. Only 0 is good news."""

    GOOD = 0
    """Everything held; no race; the run finished."""
    BAD = 1
    """Something failed: a layer of ``verify``, a race in ``check``, an error in ``train``."""
    WRONG_USE = 2
    """An option, a file or a configuration that cannot be; nothing was run."""
    NO_VERDICT = 3
    """Nothing bad was found, but not everything could be looked at, or the script itself failed."""
    INTERRUPTED = 130
    """Stopped by SIGINT (128 + 2, as shells count)."""
    UNREAD = 141
    """Whoever read the output stopped reading (128 + SIGPIPE): there was nobody to tell."""


class CommandError(CrosscurrentError):
    """The command could not finish. The message says what happened and what to do."""


@contextmanager
def as_wrong_use() -> Iterator[None]:
    """Turn what is wrong with the user's configuration or files into ``WrongUseError``."""
    try:
        yield
    except OSError as error:
        raise WrongUseError(
            f"{error.filename}: {error.strerror}" if error.filename else str(error)
        ) from error
    except UnicodeDecodeError as error:
        raise WrongUseError(f"a file that should be text is none ({error.reason}); name another") from error
    except ValueError as error:
        raise WrongUseError(str(error)) from error
