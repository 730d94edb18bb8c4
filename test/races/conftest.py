"""Puts this folder's helper modules, ``race_programs`` and its like, within reach of its tests."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
