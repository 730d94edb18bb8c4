"""The options, markers, fixtures and hooks. Nothing but pytest is imported until a test asks for more."""

from __future__ import annotations

import argparse
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from crosscurrent_pytest.wishes import DEFAULT_SEEDS, MARKER, SEED_FIXTURE, check_marker, seeds_for, wishes_of

if TYPE_CHECKING:
    from crosscurrent import Watch
    from crosscurrent_pytest.body import Body, Place

_BODY: pytest.StashKey[Body] = pytest.StashKey()
_PLACE: pytest.StashKey[Place] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("crosscurrent", "races between CUDA streams, pinned memory and the host")
    group.addoption(
        "--crosscurrent",
        action="store_true",
        help="Watch the body of every test, on simulated CUDA where there is no GPU, and fail it with the "
        f"races it has. @pytest.mark.{MARKER}(watch=False) leaves a test out.",
    )
    group.addoption(
        "--stress-seeds",
        type=_count,
        metavar="N",
        help="Run each stressed test with N seeds; without it as many as its marker says, or "
        f"{DEFAULT_SEEDS}.",
    )
    group.addoption(
        "--stress-seed",
        type=_seed,
        metavar="S",
        help="Run each stressed test with this seed only: repeats a failure.",
    )
    group.addoption(
        "--delay-us",
        type=_microseconds,
        metavar="US",
        default=100.0,
        help="The longest delay of a stressed test, in microseconds (default: 100).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The markers."""
    for line in (
        f"{MARKER}(schedules=N, host_waits=N, stress_seeds=N, watch=True): watch the test's body (on "
        "simulated CUDA where there is no GPU) and fail it with the races it has. schedules: also run N "
        "other schedules of what it did, and prove races by them. host_waits: fail if the host waits more "
        "often than that. stress_seeds: run it once for each of N seeds, with seeded delays on a GPU, in the "
        "schedules that these would lead to without one. watch=False: leave it out of --crosscurrent.",
        "stress: takes long, and is run before a change to stream code is merged (select with -m stress).",
    ):
        config.addinivalue_line("markers", line)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say so when every test is watched."""
    return "crosscurrent: the body of every test is watched" if config.getoption("crosscurrent") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run stressed tests once for each seed."""
    marker = metafunc.definition.get_closest_marker(MARKER)
    stressed = marker is not None and marker.kwargs.get("stress_seeds")
    if SEED_FIXTURE not in metafunc.fixturenames:
        if not stressed:
            return
        metafunc.fixturenames.append(SEED_FIXTURE)
    seeds = seeds_for(metafunc.config, marker)
    metafunc.parametrize(SEED_FIXTURE, seeds, indirect=True, ids=[f"seed{seed}" for seed in seeds])


@pytest.fixture
def stress_seed(request: pytest.FixtureRequest) -> int:
    """The seed of a stressed test, which is run once for each: see --stress-seeds and --stress-seed."""
    seed: int = request.param
    return seed


@pytest.fixture
def crosscurrent(request: pytest.FixtureRequest) -> Watch:
    """Watch the test's body for races, on simulated CUDA where there is no GPU; races fail the test.

    The value is the ``crosscurrent.Watch``: what was seen so far is in its ``findings`` and ``host_waits``.
    What fixtures do is not watched. @pytest.mark.crosscurrent says more about how the body is watched.
    """
    body: Body = request.node.stash[_BODY]
    return body.watch


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse bad markers before anything runs."""
    for item in items:
        check_marker(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """CUDA has to be there before the fixtures of a watched test are."""
    wishes = wishes_of(item)
    if wishes is not None:
        from crosscurrent_pytest.body import Body, Place

        place = item.session.stash.setdefault(_PLACE, Place())
        place.enter()
        item.stash[_BODY] = Body(wishes, place, item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Watch the body, and fail the test with what was found."""
    body = item.stash.get(_BODY, None)
    if body is None:
        return (yield)
    try:
        with body:
            result = yield
    except BaseException:
        if text := body.seen():
            item.add_report_section("call", "crosscurrent", text)
        raise
    item.user_properties += body.properties()
    body.judge()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Findings in color, where the terminal has any."""
    report = yield
    if item.stash.get(_BODY, None) is not None and call.excinfo is not None:
        from crosscurrent_pytest.failures import dress

        dress(report, call.excinfo.value)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Leave simulated CUDA once the next test does without.

    Tests that follow each other share it, since they may share fixtures that hold CUDA tensors.
    """
    try:
        return (yield)
    finally:
        if _BODY in item.stash:
            del item.stash[_BODY]
            if nextitem is None or wishes_of(nextitem) is None:
                _leave(item.session)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that was cut short may not have left it."""
    _leave(session)


def _leave(session: pytest.Session) -> None:
    place = session.stash.get(_PLACE, None)
    if place is not None:
        place.leave()


def _count(text: str) -> int:
    return _number(text, least=1)


def _seed(text: str) -> int:
    return _number(text, least=0)


def _number(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)


def _microseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value
