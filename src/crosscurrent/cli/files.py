"""Result files: whole or not there at all, and never one of an earlier run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from crosscurrent.cli.exits import WrongUseError


def result_file(name: str | None) -> Path | None:
    """The file to write in the end. What an earlier run left there is removed now: however this run
    ends, nobody can take the old results for its own.

    Raises:
        WrongUseError: nothing could be written there.
    """
    if name is None:
        return None
    path = Path(name)
    if not path.parent.is_dir():
        raise WrongUseError(f"there is no folder {path.parent} for {path.name}; make it first")
    if path.is_dir():
        raise WrongUseError(f"{path} is a folder; name a file in it")
    if not os.access(path.parent, os.W_OK):
        raise WrongUseError(f"nothing can be written in the folder {path.parent}; name another")
    path.unlink(missing_ok=True)
    return path.absolute()  # the run may change the working folder


def write_json(path: Path, content: object) -> None:
    """Write the file in one act."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
