"""Assertions for a project's own races: as regressions, they can never come back unseen.

    def test_the_prefetcher_is_ordered() -> None:
        assert_race_free(step)

    def test_and_the_wait_is_why() -> None:
        with drop_edge("prefetch.py:fill"):
            assert_races(step, match="read-after-write")

Each takes a function without arguments, which is run under watch (on simulated CUDA where there is no GPU),
or a watch that was left already. What is asserted holds for every schedule of what the function did.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crosscurrent.bits import difference
from crosscurrent.errors import CrosscurrentError, WrongUseError
from crosscurrent.races.findings import Finding
from crosscurrent.races.watch import Watch, watch
from crosscurrent.stress import edges
from crosscurrent.stress.edges import ChangedEdge
from crosscurrent.trace.records import WAIT_KINDS
from crosscurrent.trace.simulate import active, simulate

__all__ = [
    "ChangedEdge",
    "NoVerdictError",
    "assert_bit_identical",
    "assert_no_host_wait",
    "assert_race_free",
    "assert_races",
    "drop_edge",
    "weaken_edge",
]


class NoVerdictError(CrosscurrentError, AssertionError):
    """Nothing bad was found, but not everything could be looked at; the message says what not."""


def assert_race_free(step: Callable[[], object] | Watch) -> Watch:
    """Assert that no schedule of ``step`` can give other values.

    Raises ``RaceError`` with all findings, or ``NoVerdictError`` if some call could not be understood. What
    ``step`` returns is kept until the watch is left: returned tensors are not freed in it.
    """
    seen = _watched(step)
    seen.raise_for_races()
    if seen.unknown:
        calls = Counter(
            f"{what.op} at {what.site.file}:{what.site.line}: {what.reason}" for what in seen.unknown
        )
        raise NoVerdictError(
            "no race was found, but these calls could not be understood (crosscurrent.access declares what "
            "they touch):\n" + "\n".join(f"  {call}" for call in calls)
        )
    return seen


def assert_races(
    step: Callable[[], object] | Watch, *, match: str | re.Pattern[str] | None = None
) -> list[Finding]:
    """Assert that ``step`` has a race whose text contains the regular expression ``match``.

    Gives the findings that do. Raises ``AssertionError`` with those that do not.
    """
    if match is not None:
        _require_pattern(match)
    findings = _watched(step).findings
    if not findings:
        raise AssertionError("no race was found, expected one")
    found = [finding for finding in findings if match is None or re.search(match, str(finding))]
    if not found:
        others = "\n\n".join(map(str, findings))
        raise AssertionError(f"no race matches {match!r}; these were found:\n\n{others}")
    return found


def assert_no_host_wait(step: Callable[[], object] | Watch, *, allow: Iterable[str] = ()) -> Watch:
    """Assert that ``step`` never makes the host wait.

    ``allow`` names kinds of waits that are all right, such as ``allocation``; see ``Watch.host_waits``. A
    query is no wait. Raises ``AssertionError`` with the calls and their places.
    """
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        raise TypeError(f"allow must list kinds of waits, such as ['allocation'], got {allow!r}")
    fine = set(allow)
    if odd := [kind for kind in fine if kind not in WAIT_KINDS]:
        raise ValueError(f"there is no wait called {odd[0]!r}; the kinds are {', '.join(WAIT_KINDS)}")
    seen = _watched(step)
    waits = Counter(wait for wait in seen.host_waits if wait.kind not in fine)
    if waits:
        lines = [
            f"  {wait.kind}{f' in {wait.op}' if wait.op else ''} at {wait.site.file}:{wait.site.line} "
            f"({wait.site.function})" + (f", {times} times" if times > 1 else "")
            for wait, times in waits.items()
        ]
        raise AssertionError("the host waited, expected it not to:\n" + "\n".join(lines))
    return seen


def assert_bit_identical(off: object, on: object) -> None:
    """Assert that two results are the same to the last bit, NaN payloads and signs of zeros included.

    Both are tensors, modules (their parameters, gradients and buffers), numbers or strings, or mappings and
    sequences of such; or functions without arguments that give one, which are run in turn. Raises
    ``AssertionError`` that names the values that differ, and by how much.
    """
    first = dict(_flat("", off() if callable(off) and not _is_value(off) else off))
    second = dict(_flat("", on() if callable(on) and not _is_value(on) else on))
    if first.keys() != second.keys():
        odd = sorted(first.keys() ^ second.keys())
        raise AssertionError(f"only one side has {', '.join(name or 'a value' for name in odd)}")
    if all(value is None for value in first.values()) and all(value is None for value in second.values()):
        raise AssertionError("there is nothing to compare on either side; let both give what they computed")
    said = [
        f"  {name or 'value'}: {apart}"
        for name, value in first.items()
        if (apart := _difference(value, second[name])) is not None
    ]
    if said:
        raise AssertionError(f"{len(said)} of {len(first)} values differ:\n" + "\n".join(said))


@contextmanager
def drop_edge(where: str, *, call: str | None = None, occurrence: int | None = None) -> Iterator[ChangedEdge]:
    """Leave out the sync calls that are made at ``where``, on simulated CUDA where there is no GPU.

    ``where`` is ``file:line``, ``file:function``, ``file:Class.method``, or the same without a file; of files
    and of names the end is enough. ``call`` (``record``, ``record_event``, ``wait``, ``wait_event``,
    ``wait_stream``, ``synchronize``) tells calls in one place apart, and ``occurrence``, from 0, the times.
    The value tells what was ``matched``. Raises ``WrongUseError`` at the end if there was no such call, with
    the nearest ones, and if there were some in several functions.
    """
    with _cuda(), edges.drop_edge(where, call=call, occurrence=occurrence) as edge:
        yield edge


@contextmanager
def weaken_edge(
    where: str,
    *,
    call: str | None = None,
    occurrence: int | None = None,
    stream: edges.StreamOrMaker | None = None,
    earlier: int | None = None,
) -> Iterator[ChangedEdge]:
    """Make a sync call at ``where`` on the wrong stream, or too early; else as ``drop_edge``.

    See ``crosscurrent.stress.edges.weaken_edge``.
    """
    with (
        _cuda(),
        edges.weaken_edge(where, call=call, occurrence=occurrence, stream=stream, earlier=earlier) as edge,
    ):
        yield edge


@contextmanager
def _cuda() -> Iterator[None]:
    """CUDA, real or simulated. What wraps its classes has to come after, so this is the outermost."""
    if active() is not None or torch.cuda.is_available():
        yield
        return
    with simulate():
        yield


def _require_pattern(match: object) -> None:
    if not isinstance(match, str | re.Pattern):
        raise TypeError(f"match must be a regular expression, such as 'read-after-write', got {match!r}")
    try:
        re.search(match, "")
    except (re.error, TypeError) as error:
        raise ValueError(
            f"match must be a regular expression for text, got {match!r} ({error}); re.escape quotes a text"
        ) from error


def _watched(step: Callable[[], object] | Watch) -> Watch:
    """The watch of a run of ``step``."""
    if isinstance(step, Watch):
        return step
    if not callable(step):
        raise WrongUseError(f"pass a function without arguments, or a watch, not {type(step).__name__}")
    with ExitStack() as contexts:
        contexts.enter_context(_cuda())
        seen = contexts.enter_context(watch())
        kept = step()
        contexts.close()
        del kept
    return seen


def _is_value(value: object) -> bool:
    return isinstance(value, Tensor | torch.nn.Module)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a result, with their names."""
    if isinstance(value, torch.nn.Module):
        for key, parameter in value.named_parameters():
            yield from _flat(_join(name, key), parameter)
            if parameter.grad is not None:
                yield from _flat(_join(name, f"{key}.grad"), parameter.grad)
        for key, buffer in value.named_buffers():
            yield from _flat(_join(name, key), buffer)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(_join(name, str(key)), item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, item in enumerate(value):
            yield from _flat(_join(name, str(index)), item)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield name, torch.from_numpy(value)
    else:
        yield name, value


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _difference(one: Any, other: Any) -> str | None:
    """In what two leaves differ; None if in nothing."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return None if _same(one, other) else f"{one!r} and {other!r}"
    if not (one.layout is other.layout is torch.strided):
        raise TypeError(
            f"{one.layout} and {other.layout} have no bits to compare; pass what they are made of"
        )
    return difference(one, other)


def _same(one: Any, other: Any) -> bool:
    """Whether two values that are not both tensors are the same."""
    for value in (one, other):
        if value is not None and getattr(type(value), "__eq__", None) is getattr(object, "__eq__", None):
            raise TypeError(f"values of type {type(value).__name__} cannot be compared; pass their tensors")
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex):
        return repr(one) == repr(other)  # which tells -0.0 from 0.0, and finds NaN equal to itself
    try:
        return bool(one == other)
    except (RuntimeError, ValueError) as error:  # of many values at once, as arrays have
        raise TypeError(
            f"values of type {type(one).__name__} cannot be compared; pass their tensors"
        ) from error
