"""The ways to choose schedules: one small file each, behind one small protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from crosscurrent.schedules.order import Linear, PartialOrder
from crosscurrent.schedules.strategies.classes import Classes
from crosscurrent.schedules.strategies.directed import Directed
from crosscurrent.schedules.strategies.exhaustive import Exhaustive
from crosscurrent.schedules.strategies.lanes import LatestAndEarliest, earliest, latest
from crosscurrent.schedules.strategies.pct import PCT, pct
from crosscurrent.schedules.strategies.protocol import Proposal, Space, Strategy
from crosscurrent.schedules.strategies.random_walk import RandomWalk, random_walk

__all__ = [
    "PCT",
    "Classes",
    "Directed",
    "Exhaustive",
    "LatestAndEarliest",
    "Proposal",
    "RandomWalk",
    "Space",
    "Strategy",
    "from_recipe",
]

_RECIPES: Mapping[str, tuple[int, Callable[..., Linear]]] = {
    "program": (0, lambda order: order.program),
    "latest": (1, latest),
    "earliest": (1, earliest),
    "random": (1, random_walk),
    "pct": (2, pct),
}


def from_recipe(order: PartialOrder, recipe: str) -> Linear:
    """The schedule that a recipe such as ``random.17`` names. Raises ``ValueError`` if it names none."""
    name, *numbers = recipe.split(".")
    if name not in _RECIPES:
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(_RECIPES)}")
    arity, make = _RECIPES[name]
    if len(numbers) != arity or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"{name!r} takes {arity} numbers, got {recipe!r}")
    return make(order, *map(int, numbers))
