"""The strategies, with exact counts where they are known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from math import comb, factorial
from random import Random
from typing import TYPE_CHECKING

import pytest

from crosscurrent.schedules.conflicts import conflicts
from crosscurrent.schedules.order import Linear, PartialOrder, inverse
from crosscurrent.schedules.strategies import (
    PCT,
    Classes,
    Directed,
    Exhaustive,
    LatestAndEarliest,
    RandomWalk,
    Space,
    Strategy,
    from_recipe,
)
from crosscurrent.schedules.strategies.pct import bound, prioritized

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Script

MAIN, SIDE, THIRD = 1, 2, 3


def space_of(script: Script) -> Space:
    order = script.order
    return Space(order, conflicts(order))


def linears(strategy: Strategy, space: Space) -> list[Linear]:
    found = [proposal.linear for proposal in strategy.proposals(space)]
    assert all(space.order.allows(linear) for linear in found)
    return found


def class_of(space: Space, linear: Linear) -> tuple[bool, ...]:
    when = inverse(linear)
    return tuple(when[first] < when[second] for first, second in space.conflicts)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5])
def test_two_lanes_of_free_operations_have_a_binomial_number_of_schedules(script: Script, n: int) -> None:
    for i in range(n):
        script.op(MAIN, (2 * i, "w"))
        script.op(SIDE, (2 * i + 1, "w"))
    space = space_of(script)
    found = linears(Exhaustive(), space)
    assert len(found) == len(set(found)) == comb(2 * n, n)
    assert len(linears(Classes(), space)) == 1


@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 2, 1), (1, 1, 1, 1), (2, 2, 1, 1)])
def test_lanes_of_free_operations_have_a_multinomial_number_of_schedules(
    script: Script, lengths: tuple[int, ...]
) -> None:
    for lane, length in enumerate(lengths):
        for i in range(length):
            script.op(lane + 1, (10 * lane + i, "w"))
    multinomial = factorial(sum(lengths))
    for length in lengths:
        multinomial //= factorial(length)
    space = space_of(script)
    found = linears(Exhaustive(), space)
    assert len(found) == len(set(found)) == multinomial
    assert len(linears(Classes(), space)) == 1


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_nothing_is_reduced_where_everything_conflicts(script: Script, n: int) -> None:
    for _ in range(n):
        script.op(MAIN, (0, "w"))
        script.op(SIDE, (0, "w"))
    assert len(linears(Classes(), space_of(script))) == comb(2 * n, n)


@pytest.mark.parametrize("pairs", [1, 2, 5, 8])
def test_independent_conflicts_have_two_classes_each(script: Script, pairs: int) -> None:
    for i in range(pairs):
        script.op(2 * i + 1, (i, "w"))
        script.op(2 * i + 2, (i, "r"))
    assert len(linears(Classes(), space_of(script))) == 2**pairs


def test_a_wait_leaves_one_class(script: Script) -> None:
    script.op(MAIN, (0, "w"))
    script.edge(MAIN, SIDE)
    script.op(SIDE, (0, "r"))
    assert linears(Classes(), space_of(script)) == [(0, 1)]


def random_scripts(new_script: Callable[[], Script], count: int) -> Iterator[Script]:
    draw = Random(7)
    for _ in range(count):
        script = new_script()
        for _ in range(draw.randint(2, 7)):
            if draw.random() < 0.3:
                script.edge(*draw.sample((0, MAIN, SIDE, THIRD), 2))
            script.op(draw.randint(0, 3), (draw.randint(0, 2), draw.choice("rw")))
        yield script


def test_there_is_exactly_one_schedule_of_every_class(new_script: Callable[[], Script]) -> None:
    for script in random_scripts(new_script, 150):
        space = space_of(script)
        every = {class_of(space, linear) for linear in linears(Exhaustive(), space)}
        reduced = [class_of(space, linear) for linear in linears(Classes(), space)]
        assert len(reduced) == len(set(reduced))
        assert set(reduced) == every


def test_program_order_comes_first_in_both_exhaustive_strategies(new_script: Callable[[], Script]) -> None:
    for script in random_scripts(new_script, 30):
        space = space_of(script)
        assert linears(Exhaustive(), space)[0] == space.order.program
        assert linears(Classes(), space)[0] == space.order.program


def test_a_directed_schedule_reverses_the_pair_and_leaves_alone_what_it_can(
    new_script: Callable[[], Script],
) -> None:
    reversals = 0
    for script in random_scripts(new_script, 150):
        space = space_of(script)
        for first, second in space.conflicts:
            for linear in linears(Directed(first=first, second=second), space):
                reversals += 1
                when = inverse(linear)
                assert when[second] < when[first]
                for early, late in space.conflicts:
                    moved = when[late] < when[early]
                    follows = early == first or space.order.before(first, early)
                    needed = late == second or space.order.before(late, second)
                    assert not moved or follows or needed
    assert reversals > 200


def test_two_free_pairs_are_reversed_one_by_one(script: Script) -> None:
    script.op(MAIN, (0, "w"))
    script.op(SIDE, (0, "r"))
    script.op(MAIN, (1, "w"))
    script.op(THIRD, (1, "r"))
    space = space_of(script)
    assert linears(Directed(first=0, second=1), space)[0] == (1, 0, 2, 3)
    assert linears(Directed(first=2, second=3), space)[0] == (0, 1, 3, 2)


def test_a_pair_that_is_ordered_cannot_be_reversed(script: Script) -> None:
    script.op(MAIN, (0, "w"))
    script.edge(MAIN, SIDE)
    script.op(SIDE, (0, "r"))
    with pytest.raises(ValueError, match="are ordered"):
        linears(Directed(first=0, second=1), space_of(script))


def test_latest_and_earliest_are_the_extremes_of_a_lane(script: Script) -> None:
    for i in range(3):
        script.op(MAIN, (i, "w"))
    for i in range(3):
        script.op(SIDE, (i + 3, "w"))
    script.edge(MAIN, THIRD)
    script.op(THIRD, (0, "r"))
    order = script.order
    assert from_recipe(order, f"latest.{MAIN}") == (3, 4, 5, 0, 1, 2, 6)
    assert from_recipe(order, f"earliest.{SIDE}") == (3, 4, 5, 0, 1, 2, 6)
    assert from_recipe(order, f"earliest.{THIRD}") == (0, 1, 2, 6, 3, 4, 5)
    assert len(linears(LatestAndEarliest(), space_of(script))) == 6


def test_seeds_name_schedules_and_differ(new_script: Callable[[], Script]) -> None:
    script = new_script()
    for i in range(20):
        script.op(i % 3 + 1, (i, "w"))
    space = space_of(script)
    for strategy in (RandomWalk(count=50), PCT(count=50, depth=3)):
        proposals = list(strategy.proposals(space))
        assert proposals == list(strategy.proposals(space))
        assert [from_recipe(space.order, proposal.recipe) for proposal in proposals] == [
            proposal.linear for proposal in proposals
        ]
        assert len({proposal.linear for proposal in proposals}) > 20
        assert all(space.order.allows(proposal.linear) for proposal in proposals)


def test_the_random_walk_is_the_same_on_every_machine(script: Script) -> None:
    for i in range(8):
        script.op(i % 2 + 1, (i, "w"))
    assert from_recipe(script.order, "random.1") == (0, 2, 4, 1, 3, 5, 7, 6)


def test_a_part_of_the_seeds_gives_a_part_of_the_schedules(script: Script) -> None:
    for i in range(8):
        script.op(i % 2 + 1, (i, "w"))
    space = space_of(script)
    whole = linears(RandomWalk(count=10), space)
    assert whole == linears(RandomWalk(count=4), space) + linears(RandomWalk(count=6, start=4), space)


def deep_bug(order: PartialOrder, constraints: list[tuple[int, int]]) -> Callable[[Linear], bool]:
    def found(linear: Linear) -> bool:
        when = inverse(linear)
        return all(when[first] < when[second] for first, second in constraints)

    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pct_finds_a_bug_of_known_depth_as_often_as_the_paper_promises(script: Script, depth: int) -> None:
    """All priorities and all change points, counted: the probability is exact, and not a sample of it.

    The bug needs 1, 2 or 3 orderings: the first of SIDE before the second of MAIN; then the third of
    MAIN before the second of SIDE; then the third of SIDE before the fourth of MAIN.
    """
    main = [2 * i for i in range(4)]
    side = [2 * i + 1 for i in range(4)]
    for i in range(4):
        script.op(MAIN, (2 * i, "w"))
        script.op(SIDE, (2 * i + 1, "w"))
    order = script.order
    bug = deep_bug(order, [(side[0], main[1]), (main[2], side[1]), (side[2], main[3])][:depth])
    outcomes = [
        bug(prioritized(order, priorities, changes))
        for priorities in permutations(range(2))
        for changes in product(range(len(order)), repeat=depth - 1)
    ]
    assert sum(outcomes) / len(outcomes) >= bound(order, depth) > 0


def test_pct_of_too_small_a_depth_never_finds_the_bug(script: Script) -> None:
    """The twin: without a change point, a lane that comes first stays first."""
    for i in range(4):
        script.op(MAIN, (2 * i, "w"))
        script.op(SIDE, (2 * i + 1, "w"))
    bug = deep_bug(script.order, [(1, 2), (4, 3)])
    assert not any(bug(prioritized(script.order, priorities, [])) for priorities in permutations(range(2)))


def test_the_bound_is_that_of_the_paper(script: Script) -> None:
    for i in range(6):
        script.op(i % 3 + 1, (i, "w"))
    assert bound(script.order, 1) == 1 / 3
    assert bound(script.order, 3) == 1 / (3 * 6**2)


@pytest.mark.parametrize("recipe", ["", "randm.1", "random", "random.x", "random.-1", "pct.1", "random.1.2"])
def test_a_recipe_that_names_nothing_is_an_error(script: Script, recipe: str) -> None:
    script.op(MAIN, (0, "w"))
    with pytest.raises(ValueError, match=r"recipe|takes"):
        from_recipe(script.order, recipe)


def test_a_depth_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PCT(count=1, depth=0)
