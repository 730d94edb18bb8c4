"""Every code block of every page does what the page says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import crosscurrent
from crosscurrent.cli.app import COMMANDS
from crosscurrent.stress.history import PAST_RACES
from crosscurrent.suite import LAYERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))

FOLLOWED = frozenset({"python", "console", "diff"})
CHECKED = frozenset({"sh", "yaml", "json"})
PLAIN = frozenset({"text"})


@pytest.mark.simulation
@pytest.mark.parametrize("page", PAGES)
def test_following_the_page_literally_works(
    page: str, pages: dict[str, list[Any]], reader: Callable[[Any], None]
) -> None:
    for block in pages[page]:
        if block.language in FOLLOWED or block.verb:
            try:
                reader(block)
            except Exception as error:
                raise AssertionError(f"docs/{page}:{block.line}: {error}") from error


@pytest.mark.parametrize("page", PAGES)
def test_no_block_escapes(page: str, pages: dict[str, list[Any]]) -> None:
    for block in pages[page]:
        known = FOLLOWED | CHECKED | PLAIN
        assert block.language.startswith("{") or block.language in known, f"docs/{page}:{block.line}"
        assert block.language != "diff" or block.verb == "edit", f"docs/{page}:{block.line}"
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists_with_its_options(page: str, pages: dict[str, list[Any]]) -> None:
    for block in pages[page]:
        if block.language in ("sh", "yaml", "console"):
            for command in _commands(block):
                _check(command, f"docs/{page}:{block.line}: {command}")


def _commands(block: Any) -> Iterator[str]:
    """The command lines of a block."""
    if block.language == "yaml":
        yield from _shell_lines(yaml.safe_load(block.text))
    elif block.language == "console":
        yield from (line[2:] for line in block.text.splitlines() if line.startswith("$ "))
    else:
        yield from block.text.replace("\\\n", " ").splitlines()


def _shell_lines(node: Any) -> Iterator[str]:
    """The shell lines of a pipeline: what ``run`` and ``script`` hold, wherever they are."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("run", "script", "before_script"):
                lines = value if isinstance(value, list) else value.splitlines()
                yield from (line for line in lines if line.strip())
            else:
                yield from _shell_lines(value)
    elif isinstance(node, list):
        for value in node:
            yield from _shell_lines(value)


def _check(command: str, where: str) -> None:
    for part in re.split(r"&&|\|\||;", command.split(" # ")[0]):
        words = shlex.split(part)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if not words or words[0] == "#":
            continue
        if words[0].rpartition("/")[2] == "crosscurrent":
            assert words[1] in COMMANDS or words[1].startswith("-"), where
            if words[1] in COMMANDS:
                import_module(f"crosscurrent.cli.{words[1]}").parser().parse_args(words[2:])
        elif words[0] == "tox" and "-e" in words:
            environment = words[words.index("-e") + 1]
            known = (ROOT / "tox.ini").read_text(encoding="utf-8")
            assert f"[testenv:{environment}]" in known or environment in re.findall(r"py3\d+", known), where


def _links(page: Path) -> list[tuple[str, str]]:
    """Where the links of a page lead within the project: the file, and the heading or an empty string."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [
        (target.partition("#")[0], target.partition("#")[2])
        for target in targets
        if "://" not in target and not target.startswith("mailto:")
    ]


def _slugs(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = DOCS / page
    for target, heading in _links(path):
        aim = (path.parent / target).resolve() if target else path
        assert aim.is_file(), f"docs/{page} links to {target}"
        if heading and aim.suffix == ".md":
            assert heading in _slugs(aim), f"docs/{page} links to {target}#{heading}"


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = {
        line.strip()
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", index, flags=re.DOTALL | re.MULTILINE)
        for line in tree.splitlines()
        if line.strip() and not line.startswith(":")
    }
    assert listed == {page.removesuffix(".md") for page in PAGES} - {"index"}


def _public_names() -> Iterator[str]:
    for module in ("", ".schedules", ".schedules.engines", ".stress", ".gradient"):
        home = import_module(f"crosscurrent{module}")
        yield from (name for name in home.__all__ if not name.startswith("__"))


def _named_on_pages() -> Iterator[str]:
    """Functions and classes that a page names by their path."""
    for page in PAGES:
        for path in re.findall(r"`(crosscurrent(?:\.\w+)+)`", (DOCS / page).read_text(encoding="utf-8")):
            module, _, name = path.rpartition(".")
            if not isinstance(getattr(import_module(module), name), ModuleType):
                yield name


def test_the_reference_has_every_public_name() -> None:
    reference = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = {
        name.rpartition(".")[2] for name in re.findall(r"^\.\. auto\w+:: (\S+)", reference, re.MULTILINE)
    }
    assert {*_public_names(), *_named_on_pages()} <= documented
    assert crosscurrent.__all__


def test_the_page_on_verification_lists_what_is_verified() -> None:
    page = (DOCS / "verification.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert named == [layer.name for layer in LAYERS] + [race.name for race in PAST_RACES]


def test_the_figure_of_the_lattice_is_self_contained() -> None:
    figure = (DOCS / "images" / "lattice.svg").read_text(encoding="utf-8")
    assert "<svg" in figure
    assert not re.findall(r"(?:href|src)=\"(?!#)", figure)
    assert "<title " in figure
