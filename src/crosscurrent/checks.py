"""Checks of arguments, for all that other people call: they say what was seen, and what was expected."""

from __future__ import annotations


def whole_number(name: str, value: object, *, least: int | None = None, unit: str = "") -> int:
    """``value``, which has to be a whole number, and at least ``least``.

    Raises ``TypeError`` or ``ValueError``, which name the argument and what it was.
    """
    expected = "a whole number" if least is None else f"a whole number of at least {least}{unit}"
    # True is 1 to Python; whoever says devices=True means something else.
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
    number = int(value.__index__())  # type: ignore[attr-defined]
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}{unit}, got {number}")
    return number


def flag(name: str, value: object) -> bool:
    """``value``, which has to be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value
