"""Result files: whole or not there at all, and never one of an earlier run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from crosscurrent.cli.exits import WrongUseError
from crosscurrent.files import in_one_act, partial_of


def result_file(name: str | None, *, inputs: Iterable[str] = ()) -> Path | None:
    """The file to write in the end. What an earlier run left there is removed now: however this run
    ends, nobody can take the old results for its own. ``inputs`` are files that the run reads.

    Raises:
        WrongUseError: nothing could be written there.
    """
    return result_files(name, inputs=inputs)[0]


def result_files(*names: str | None, inputs: Iterable[str] = ()) -> tuple[Path | None, ...]:
    """The same for some files. Nothing is removed unless all of them can be written."""
    inputs = tuple(inputs)
    paths = tuple(None if name is None else _writable(name, inputs) for name in names)
    wanted = [path for path in paths if path is not None]
    for path in wanted:
        if wanted.count(path) > 1:
            raise WrongUseError(f"{path} was named for two results; name one file for each")
    for path in wanted:
        path.unlink(missing_ok=True)
    return paths


def write_json(path: Path, content: object) -> None:
    """Write the file in one act."""
    with in_one_act(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _writable(name: str, inputs: Iterable[str]) -> Path:
    path = Path(name)
    if not name:
        raise WrongUseError("the name of a result file is empty; name a file")
    try:
        if not path.parent.is_dir():
            raise WrongUseError(f"there is no folder {path.parent} for {path.name}; make it first")
        if path.is_dir():
            raise WrongUseError(f"{path} is a folder; name a file in it")
        if path.exists() and not path.is_file():
            raise WrongUseError(f"{path} is no ordinary file; name one")
        if not os.access(path.parent, os.W_OK):
            raise WrongUseError(f"nothing can be written in the folder {path.parent}; name another")
        if any(path.exists() and Path(read).exists() and path.samefile(read) for read in inputs):
            raise WrongUseError(f"{path} is what is read; name another file for the results")
        require_room(path)
    except (OSError, ValueError) as error:  # too long, no text, a folder that cannot be looked into
        reason = getattr(error, "strerror", None) or error
        raise WrongUseError(f"nothing can be written to {name!r} ({reason}); name another file") from error
    return path.absolute()  # the run may change the working folder


def require_room(path: Path) -> None:
    """Try it: permissions do not tell of read-only file systems, quotas and names that are too long."""
    trial = partial_of(path)
    try:
        trial.touch()
    finally:
        trial.unlink(missing_ok=True)
