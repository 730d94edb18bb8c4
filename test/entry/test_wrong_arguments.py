"""Everything public, called wrongly: each error says what was seen, and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import crosscurrent
from crosscurrent import testing
from crosscurrent.cli import main
from crosscurrent.report.profile import overlap_of_profile
from crosscurrent.schedules import Schedule, load

NO_COUNTS = [None, "2", 1.5, float("nan"), True, [], "\N{SNOWMAN}"]
ANY: Any = None


def nothing() -> None:
    """Does nothing."""


def racy() -> None:
    """Has a race."""
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)


@pytest.mark.parametrize("name", ["devices", "capacity"])
@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
def test_what_counts_nothing_is_no_number_of_devices(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a whole number of at least 1.*, got ") as caught:
        crosscurrent.simulate(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, -(10**30)])
def test_no_device_and_no_memory_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"devices must be at least 1, got {value}"):
        crosscurrent.simulate(value)
    with pytest.raises(ValueError, match=f"capacity must be at least 1 byte, got {value}"):
        crosscurrent.simulate(capacity=value)


def test_more_devices_than_pytorch_has_numbers_for_are_refused() -> None:
    with pytest.raises(ValueError, match=f"at most 120.*got {10**30}"):
        crosscurrent.simulate(10**30)
    assert crosscurrent.simulate(np.int64(2)).num_devices == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, "yes", 0, 1, float("nan")], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (crosscurrent.watch, "trace"),
        (crosscurrent.watch, "full_stack"),
        (crosscurrent.proving, "full_stack"),
        (crosscurrent.overlap, "call_sites"),
    ],
)
def test_flags_are_true_or_false(make: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False, got {re.escape(repr(value))}"):
        make(**{name: value})


def test_the_rates_of_a_model_are_rates() -> None:
    with pytest.raises(TypeError, match="rates must be"):
        crosscurrent.overlap(rates="fast")  # type: ignore[arg-type]


@pytest.mark.simulation
@pytest.mark.parametrize("value", [None, 3, "x", [None], [[torch.ones(2)]]], ids=repr)
def test_what_is_declared_is_tensors(value: Any) -> None:
    with (
        crosscurrent.simulate(),
        crosscurrent.watch(),
        pytest.raises(TypeError, match=r"writes must be tensors, as in writes=\[a, b\], got "),
    ):
        crosscurrent.access(writes=value)


@pytest.mark.simulation
def test_one_tensor_is_declared_as_a_whole() -> None:
    with crosscurrent.simulate(), crosscurrent.watch(trace=True) as watch:
        x = torch.empty(3, 2, device="cuda")
        crosscurrent.access(writes=x)
    (op,) = [record for record in watch.records if getattr(record, "accesses", ())]
    assert [(access.region.start, access.region.stop) for access in op.accesses] == [(0, 24)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "check", [testing.assert_race_free, testing.assert_races, testing.assert_no_host_wait]
)
@pytest.mark.parametrize("step", [None, "step", 3, [nothing]], ids=lambda step: type(step).__name__)
def test_only_functions_and_watches_are_asserted_about(check: Callable[..., Any], step: Any) -> None:
    with pytest.raises(
        crosscurrent.WrongUseError, match="pass a function without arguments, or a watch, not "
    ):
        check(step)


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("match", "kind"), [(3, TypeError), (b"x", TypeError), (["x"], TypeError), ("(", ValueError)]
)
def test_a_race_is_matched_by_a_regular_expression(match: Any, kind: type[Exception]) -> None:
    for step in (racy, nothing):
        with pytest.raises(kind, match="match must be a regular expression"):
            testing.assert_races(step, match=match)
    assert testing.assert_races(racy, match=re.compile("write-after-write"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allow", "says"),
    [
        (None, "allow must list kinds of waits"),
        (3, "allow must list kinds of waits"),
        ("allocation", "allow must list kinds of waits"),  # and not its letters
        (["allocatoin"], "there is no wait called 'allocatoin'; the kinds are synchronize, "),
    ],
)
def test_allowed_waits_are_kinds_of_waits(allow: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        testing.assert_no_host_wait(nothing, allow=allow)


def test_comparing_nothing_is_no_success() -> None:
    """A function that forgets its ``return`` gives None, twice."""
    for pair in ((None, None), (nothing, nothing), ({}, {}), ([None], [None])):
        with pytest.raises(AssertionError, match="nothing to compare on either side"):
            testing.assert_bit_identical(*pair)
    testing.assert_bit_identical([None, 1], [None, 1])
    with pytest.raises(AssertionError, match="1 of 1 values differ"):
        testing.assert_bit_identical(torch.ones(2), None)


@pytest.mark.parametrize(
    "value",
    [object(), torch.ones(2).to_sparse(), np.array([None, 1])],
    ids=lambda v: type(v).__name__,
)
def test_what_has_no_bits_is_not_compared(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be compared; pass|no bits to compare; pass"):
        testing.assert_bit_identical(value, value)


def test_arrays_are_compared_by_their_bits() -> None:
    testing.assert_bit_identical({"a": np.array([0.0, np.nan])}, {"a": np.array([0.0, np.nan])})
    with pytest.raises(AssertionError, match="a: 1 of 2 elements differ"):
        testing.assert_bit_identical({"a": np.array([0.0, 1.0])}, {"a": np.array([-0.0, 1.0])})


@pytest.mark.parametrize("read", [load, overlap_of_profile])
def test_files_that_cannot_be_read_are_told_apart(read: Callable[[Any], object], tmp_path: Path) -> None:
    garbage = tmp_path / "garbage \N{SNOWMAN}"
    garbage.write_bytes(b"\0\1")
    for path, says in (
        (None, r"path must be the path of a file, got None \(NoneType\)"),
        (3, r"path must be the path of a file, got 3 \(int\)"),
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "none", "there is no file '.*none'; look at its name"),
        ("\0", "there is no file"),
        (Path("/dev/null"), "is no ordinary file"),
        (garbage, "garbage \N{SNOWMAN} is (damaged|no JSON)"),
    ):
        with pytest.raises(Exception, match=says) as caught:
            read(path)
        assert isinstance(caught.value, TypeError | OSError | ValueError | crosscurrent.CrosscurrentError)


@pytest.mark.parametrize("text", [None, 3, b"cc1"], ids=repr)
def test_a_schedule_is_a_text(text: Any) -> None:
    with pytest.raises(TypeError, match="a schedule is a text such as cc1:"):
        Schedule.parse(text, ANY)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check", "--devices", "two", "x.py"], "--devices must be a whole number, got 'two'"),
        (["check", "--devices=", "x.py"], "--devices must be a whole number, got ''"),
        (["check", "--simulate"], "the following arguments are required: the program to run"),
        (["overlap", "--devices", "1.5", "x.py"], "--devices must be a whole number, got '1.5'"),
        (["replay", "x", "--workers", "nan"], "--workers must be a whole number, got 'nan'"),
        (["stress", "--delay_us", "nan"], "--delay_us must be a number, got 'nan'"),
        (["stress", "--seeds", "-3"], "--seeds must be at least 1, got -3"),
        (["train", "--grad.chunk_size", "x"], "--grad.chunk_size must be a whole number, got 'x'"),
        (["replay", "none.ccp"], "there is no file 'none.ccp'; look at its name"),
        (["replay", "."], ". is a folder; name a file in it"),
    ],
)
def test_options_are_refused_in_one_line_and_plain_words(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert "class" not in error
