"""Pages as a list of blocks, and a reader who does what a page says."""

from __future__ import annotations

import linecache
import os
import re
import runpy
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from crosscurrent.cli import main

DOCS = Path(__file__).parents[2] / "docs"

_PART = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->\n"
    r"|(?:^<!-- (?P<verb>file|edit): (?P<name>\S+) -->\n\n?)?"
    r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block of a page, or a hidden ``<!-- setup`` of one."""

    language: str
    text: str
    line: int
    verb: str = ""
    """``file``: it is the content of a file; ``edit``: it changes one."""

    name: str = ""


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    blocks = []
    for found in _PART.finditer(page):
        line = page.count("\n", 0, found.start()) + 1
        if found["setup"] is not None:
            blocks.append(Block(language="python", text=found["setup"], line=line))
        else:
            verb, name = found["verb"] or "", found["name"] or ""
            language = found["language"].strip()
            blocks.append(Block(language=language, text=found["text"], line=line, verb=verb, name=name))
    return blocks


class Reader:
    """Follows a page literally, in an empty folder of its own: writes its files, runs what it runs."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self._names: dict[str, Any] = {"__name__": "a_page"}

    def follow(self, block: Block) -> None:
        """Do what a block says; raises ``AssertionError`` where it is not so."""
        if block.verb == "file":
            path = Path(block.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.verb == "edit":
            _edit(Path(block.name), block.text)
        elif block.language == "python":
            code = compile(f"{chr(10) * block.line}{block.text}", f"the block at line {block.line}", "exec")
            exec(code, self._names)
        elif block.language == "console":
            self._console(block.text)
        self._capture.readouterr()

    def _console(self, text: str) -> None:
        for part in re.split(r"^(?=\$ )", text, flags=re.MULTILINE):
            if not part:
                continue
            command, _, expected = part.partition("\n")
            assert command.startswith("$ "), f"a console block starts with a command, not {command!r}"
            said = self._run(shlex.split(command[2:]))
            if expected.strip():
                assert _matches(expected, said), f"{command}\nsays\n{said}\nand not\n{expected}"

    def _run(self, words: list[str]) -> str:
        if words[0] == "crosscurrent":
            self._capture.readouterr()
            linecache.clearcache()
            main(words[1:])
            out, err = self._capture.readouterr()
            return out + err
        if words[0] == "cat":
            return Path(words[1]).read_text(encoding="utf-8")
        assert words[0] == "python", f"a page may run crosscurrent and python, not {words[0]}"
        return _python(words[1:])


def _python(words: list[str]) -> str:
    """What ``python ...`` says, in a child of this process: that saves it importing torch each time."""
    said = Path(tempfile.mkdtemp()) / "said"
    child = os.fork()
    if child == 0:
        _become_python(words, said)
    os.waitpid(child, 0)
    return said.read_text(encoding="utf-8")


def _become_python(words: list[str], said: Path) -> NoReturn:
    try:
        torch.set_num_threads(1)  # the threads of the parent are not here
        file = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            del os.environ[name]
        os.environ |= {
            "COLUMNS": "80",
            "PY_COLORS": "0",
            "PYTEST_ADDOPTS": "-p no:cacheprovider -p no:hypothesispytest",
        }
        sys.path.insert(0, str(Path.cwd()))
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _edit(path: Path, difference: str) -> None:
    """Make the change that a difference shows, at the only place where it fits."""
    lines = difference.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path} has the lines before the change {text.count(before)} times"
    path.write_text(text.replace(before, after), encoding="utf-8")


def _matches(expected: str, said: str) -> bool:
    """Whether the output is as shown, where ``...`` stands for any text."""
    pattern = re.escape(expected.strip()).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, said.strip(), flags=re.DOTALL) is not None


@pytest.fixture
def pages() -> dict[str, list[Block]]:
    """The blocks of every page, by its path within the folder of the pages."""
    return {
        str(path.relative_to(DOCS)): blocks_of(path.read_text(encoding="utf-8"))
        for path in sorted(DOCS.rglob("*.md"))
    }


@pytest.fixture
def reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[Block], None]:
    """Follows blocks, one after the other, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Reader(capfd).follow
