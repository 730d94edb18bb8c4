"""What a test asks for: by the fixture, by the marker, or by an option of the whole run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

MARKER = "crosscurrent"
FIXTURE = "crosscurrent"
SEED_FIXTURE = "stress_seed"
DEFAULT_SEEDS = 3

_COUNTS = ("schedules", "host_waits", "stress_seeds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """How a test is watched."""

    schedules: int = 0
    """How many other schedules of its trace to run."""

    host_waits: int | None = None
    """How often its body may make the host wait; None: as often as it likes."""

    seed: int | None = None
    """The seed of its delays, if it is stressed."""

    delay_us: float = 100.0

    strict: bool = True
    """Whether calls that could not be understood fail the test."""


def wishes_of(item: pytest.Item) -> Wishes | None:
    """What a test asks for; None: it is not watched."""
    marker = item.get_closest_marker(MARKER)
    arguments = {} if marker is None else dict(marker.kwargs)
    asked = FIXTURE in getattr(item, "fixturenames", ()) or bool(arguments.get("watch", marker is not None))
    if not asked and (not item.config.getoption("crosscurrent") or arguments.get("watch") is False):
        return None
    return Wishes(
        schedules=arguments.get("schedules", 0),
        host_waits=arguments.get("host_waits"),
        seed=_seed(item) if arguments.get("stress_seeds") else None,
        delay_us=item.config.getoption("delay_us"),
        strict=asked,
    )


def check_marker(item: pytest.Item) -> None:
    """Refuse a marker that cannot be: raises ``pytest.UsageError`` that names the test."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return
    where = f"{item.nodeid}: @pytest.mark.{MARKER}"
    if marker.args:
        raise pytest.UsageError(f"{where} takes keywords only: {', '.join((*_COUNTS, 'watch'))}")
    for name, value in marker.kwargs.items():
        if name == "watch":
            if not isinstance(value, bool):
                raise pytest.UsageError(f"{where}: watch is True or False, got {value!r}")
        elif name not in _COUNTS:
            raise pytest.UsageError(f"{where} has no {name}; there are {', '.join((*_COUNTS, 'watch'))}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise pytest.UsageError(f"{where}: {name} must be a number that is not negative, got {value!r}")
    if marker.kwargs.get("stress_seeds") and _seed(item) is None:
        raise pytest.UsageError(
            f"{where}: stress_seeds needs a test function; a method of unittest.TestCase runs once only"
        )


def seeds_for(config: pytest.Config, marker: pytest.Mark | None) -> list[int]:
    """The seeds that a stressed test is run with: the options win over the marker."""
    only = config.getoption("stress_seed")
    if only is not None:
        return [only]
    count = config.getoption("stress_seeds")
    if count is None:
        count = DEFAULT_SEEDS if marker is None else marker.kwargs.get("stress_seeds", DEFAULT_SEEDS)
    return list(range(count))


def _seed(item: pytest.Item) -> int | None:
    callspec = getattr(item, "callspec", None)
    seed = None if callspec is None else callspec.params.get(SEED_FIXTURE)
    return seed if isinstance(seed, int) else None
