"""The innermost frame, for code that may be compiled. This module stays interpreted."""

from __future__ import annotations

import sys
from types import FrameType

_frame = sys._getframe


def innermost() -> FrameType | None:
    """The innermost frame of Python's below the call; None in a thread of C++ code, which has none.

    Compiled code must not ask for it by itself. While the locals of a frame are cleared, as when a storage
    dies with them, the innermost frame of Python 3.12 is none that may be looked at, and ``sys._getframe``
    skips such frames only below one that may.
    """
    try:
        return _frame(1)
    except ValueError:
        return None
