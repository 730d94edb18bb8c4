"""Checks of arguments, for all that other people call: they say what was seen, and what was expected."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import SupportsIndex


def whole_number(name: str, value: object, *, least: int | None = None, unit: str = "") -> int:
    """``value``, which has to be a whole number, and at least ``least``.

    Raises ``TypeError`` or ``ValueError``, which name the argument and what it was.
    """
    expected = "a whole number" if least is None else f"a whole number of at least {least}{unit}"
    # True is 1 to Python; whoever says devices=True means something else.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}{unit}, got {number}")
    return number


def flag(name: str, value: object) -> bool:
    """``value``, which has to be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def file_path(name: str, value: object) -> Path:
    """``value`` as the path of a file that is there."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be the path of a file, got {value!r} ({type(value).__name__})")
    path = Path(value)
    if "\0" not in str(path) and path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if "\0" in str(path) or not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}; look at its name and at the working folder")
    if not path.is_file():
        raise OSError(f"{path} is no ordinary file; name one")
    return path
