"""Files that are whole, or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_one_act(path: Path) -> Iterator[Path]:
    """Another path to write to, beside; what is there in the end takes the place of ``path``. After an
    exception ``path`` is what it was."""
    partial = partial_of(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def partial_of(path: Path) -> Path:
    """Where a file is written before it is whole; each process has its own."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
