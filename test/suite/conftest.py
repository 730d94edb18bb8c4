"""Puts ``known_answers`` within reach of this folder's tests, and of the processes that they start."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
