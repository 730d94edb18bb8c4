"""Call sites: the innermost frame that is neither torch's nor the verifier's."""

from __future__ import annotations

import gc
import operator
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import crosscurrent
from crosscurrent.trace.sites import Sites

PACKAGE = crosscurrent.__file__.removesuffix("__init__.py")


def through(filename: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """``call``, called by a function that seems to come from a file."""
    names: dict[str, Any] = {}
    exec(compile("def f(call):\n    return call()\n", filename, "exec"), names)
    return partial(names["f"], call)


def tap(sites: Sites) -> Callable[[], Any]:
    """Stands for a tap, which ``Sites`` does not look at."""
    return through(f"{PACKAGE}trace/tap.py", sites.here)


def test_line_of_the_caller_is_found_once() -> None:
    sites = Sites()
    tapped = tap(sites)
    first, again = [tapped() for _ in range(2)]
    other = tapped()
    assert first == again
    assert first != other
    site = sites.sites[other]
    assert site.file == __file__
    assert site.function == "test_line_of_the_caller_is_found_once"
    assert site.line == test_line_of_the_caller_is_found_once.__code__.co_firstlineno + 4


@pytest.mark.parametrize(
    "filename",
    [torch.__file__, *(f"{PACKAGE}{part}" for part in ("trace/tracer.py", "races/watch.py"))],
)
def test_frames_of_torch_and_of_the_verifier_are_passed_over(filename: str) -> None:
    sites = Sites()
    through(filename, through(filename, tap(sites)))()
    assert [site.file for site in sites.sites] == [__file__]


@pytest.mark.parametrize("part", ["gradient/transfer.py", "kvcache/buffers.py", "model/transformer.py"])
def test_the_gradient_is_user_code(part: str) -> None:
    """The verifier looks at this package's own gradient, cache and models from outside."""
    sites = Sites()
    through(f"{PACKAGE}{part}", through(torch.__file__, tap(sites)))()
    assert [site.file for site in sites.sites] == [f"{PACKAGE}{part}"]


def test_place_is_turned_into_a_site_later() -> None:
    sites = Sites()
    place = through("user.py", through(f"{PACKAGE}trace/tap.py", sites.place))()
    assert sites.sites == []
    site = sites.sites[sites.at(place)]
    assert (site.file, site.line, site.function) == ("user.py", 2, "f")


def test_full_stack_has_no_internal_frames() -> None:
    sites = Sites(full_stack=True)
    through(torch.__file__, through("user.py", through(torch.__file__, tap(sites))))()
    (site,) = sites.sites
    assert site.file == "user.py"
    files = [file for file, _, _ in site.stack]
    assert files[-2:] == [__file__, "user.py"]
    assert torch.__file__ not in files


def test_a_thread_that_torch_started_is_told_by_its_function() -> None:
    """As the loader's thread that pins memory: there is no line of a user in it."""
    sites = Sites()
    sites.waiting.append(sites.here())  # and a backward pass of another thread is not to blame
    loop = through(torch.__file__, through(torch.__file__, tap(sites)))
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert [site.file for site in sites.sites][1:] == [torch.__file__]


def test_a_thread_of_the_user_is_told_by_its_line() -> None:
    sites = Sites()
    thread = threading.Thread(target=through("mine.py", tap(sites)))
    thread.start()
    thread.join()
    assert [site.file for site in sites.sites] == ["mine.py"]


@pytest.mark.parametrize("pool", [False, True])
def test_a_function_without_a_frame_is_told_by_its_name(pool: bool) -> None:
    """As a tensor's method that a thread or a pool is given. No line of Python's library is told: each Python
    has another one."""
    sites = Sites()
    sites.waiting.append(sites.here())
    if pool:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(operator.call, tap(sites)).result()
    else:
        thread = threading.Thread(target=operator.call, args=[tap(sites)])
        thread.start()
        thread.join()
    assert [site[:3] for site in sites.sites][1:] == [("<no Python frame>", 0, "call")]


class Thing:
    """Stands for a tensor."""


def test_looking_for_a_place_in_other_threads_keeps_nothing_alive() -> None:
    """A frame that held itself would hold its callers, and the tensors of the op that they tell of."""
    sites = Sites()

    def tell(thing: Thing) -> weakref.ref[Thing]:
        sites.at(None)
        return weakref.ref(thing)

    gc.disable()
    try:
        kept = tell(Thing())
    finally:
        gc.enable()
    assert kept() is None
    assert [site.file for site in sites.sites] == ["<no Python frame>"]
