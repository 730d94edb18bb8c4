"""What may be compiled. The compiler does not tell of these faults: they crash, some of them seldom."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import tomllib
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import pytest

import crosscurrent

ROOT = Path(__file__).parents[2]
SOURCES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"][
    "targets"
]["wheel"]["hooks"]["mypyc"]["include"]
MODULES = [source.removeprefix("src/").removesuffix(".py").replace("/", ".") for source in SOURCES]


def classes_of(module: str) -> list[type[Any]]:
    members = vars(importlib.import_module(module)).values()
    return [member for member in members if inspect.isclass(member) and member.__module__ == module]


@pytest.mark.parametrize("module", MODULES)
def test_no_compiled_class_has_a_base_that_is_written_in_c(module: str) -> None:
    """A native class is laid over the memory of such a base. Named tuples and enumerations are no native
    classes, and exceptions are what mypyc makes an exception for.
    """
    for each in classes_of(module):
        named_tuple = each.__bases__ == (tuple,) and hasattr(each, "_fields")
        if named_tuple or issubclass(each, (Enum, Exception)) or Protocol in each.__bases__:
            continue
        for base in each.__bases__:
            assert base is object or base.__module__ in MODULES, f"{each.__qualname__} has {base}"


@pytest.fixture(scope="module")
def everything() -> None:
    """A class knows only those derived classes that were imported. Operators need Triton, and have none."""
    for each in pkgutil.walk_packages(crosscurrent.__path__, "crosscurrent."):
        if not each.name.startswith("crosscurrent.operators.") and not each.name.endswith(".__main__"):
            importlib.import_module(each.name)


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("module", MODULES)
def test_no_compiled_class_is_the_base_of_one_that_is_not(module: str) -> None:
    """Unless it says so, such a subclass cannot even be made."""
    for each in classes_of(module):
        for derived in each.__subclasses__():
            if derived.__module__.startswith("crosscurrent."):
                assert derived.__module__ in MODULES, f"{derived.__qualname__} has {each.__qualname__}"


@pytest.mark.parametrize("source", SOURCES)
def test_compiled_code_asks_for_frames_by_way_of_an_interpreted_module(source: str) -> None:
    """The innermost frame may be one that must not be looked at; see ``crosscurrent.trace.frames``."""
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "_getframe"]
    assert len(asked) == (source.endswith("sites.py"))  # which is for the form that is interpreted


def test_what_is_interpreted_on_purpose() -> None:
    """Dispatch modes and what is of one thread have bases that are written in C; ``frames`` asks for one."""
    assert {
        "crosscurrent.trace.cuda",
        "crosscurrent.trace.frames",
        "crosscurrent.trace.simulate.dispatch",
    }.isdisjoint(MODULES)
