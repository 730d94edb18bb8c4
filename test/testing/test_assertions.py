"""The assertions of ``crosscurrent.testing``: each has something that holds, and something that does not."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

import crosscurrent
from crosscurrent.errors import RaceError, WrongUseError
from crosscurrent.testing import (
    NoVerdictError,
    assert_bit_identical,
    assert_no_host_wait,
    assert_race_free,
    assert_races,
    drop_edge,
)


def fetch() -> Tensor:
    """A copy to the device on a stream of its own, and work on it."""
    incoming = torch.cuda.Stream()
    source = torch.ones(4, pin_memory=True)
    with torch.cuda.stream(incoming):
        fetched = source.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(incoming)
    fetched.record_stream(torch.cuda.current_stream())
    return fetched * 2


def not_understood() -> None:
    from torch._higher_order_ops.out_dtype import out_dtype

    a = torch.ones(4, 4, device="cuda")
    out_dtype(torch.ops.aten.mm.default, torch.float32, a, a)


# -- races -------------------------------------------------------------------------------------------------


def test_an_ordered_step_is_race_free() -> None:
    assert assert_race_free(fetch).findings == []


def test_the_wait_is_why() -> None:
    with drop_edge("test_assertions.py:fetch", call="wait_stream"):
        (finding,) = assert_races(fetch, match=r"read-after-write on device memory")
    assert finding.second.site.function == "fetch"
    with (
        drop_edge("test_assertions.py:fetch", call="wait_stream"),
        pytest.raises(RaceError, match="read-after-write"),
    ):
        assert_race_free(fetch)


def test_no_race_and_another_race_are_no_race_that_matches() -> None:
    with pytest.raises(AssertionError, match="no race was found, expected one"):
        assert_races(fetch)
    with (
        drop_edge("test_assertions.py:fetch", call="wait_stream"),
        pytest.raises(AssertionError, match="no race matches 'reuse'; these were found:\n\nread-after-write"),
    ):
        assert_races(fetch, match="reuse")


def test_what_is_not_understood_is_not_race_free() -> None:
    with pytest.raises(
        NoVerdictError, match=r"could not be understood.*\n  out_dtype at .*a higher-order op"
    ):
        assert_race_free(not_understood)


def test_a_watch_that_was_left_will_do() -> None:
    with ExitStack() as contexts:
        if not torch.cuda.is_available():
            contexts.enter_context(crosscurrent.simulate())
        with crosscurrent.watch() as seen:
            fetch()
        assert assert_race_free(seen) is seen
        assert assert_race_free(fetch).findings == []  # in the simulation that there is


def test_something_else_will_not() -> None:
    with pytest.raises(WrongUseError, match="a function without arguments, or a watch, not int"):
        assert_race_free(3)  # type: ignore[arg-type]


# -- the host ----------------------------------------------------------------------------------------------


def test_a_step_that_never_waits() -> None:
    tensor: list[Tensor] = []

    def step() -> None:
        tensor.append(torch.ones(4, device="cuda").mul_(2))
        torch.cuda.current_stream().record_event().query()

    assert_no_host_wait(step)


def test_a_step_that_waits_is_told_where() -> None:
    def step() -> float:
        tensor = torch.ones(4, device="cuda", dtype=torch.float32)
        return sum(tensor[0].item() for _ in range(3))

    with pytest.raises(AssertionError, match=r"item in .* at .*test_assertions\.py:\d+ .*, 3 times"):
        assert_no_host_wait(step)
    assert_no_host_wait(step, allow=["item"])


# -- bits --------------------------------------------------------------------------------------------------


def results() -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model(torch.ones(4, 3) * torch.arange(4).unsqueeze(1)).square().sum().backward()
    return {"model": model, "losses": [1.5, torch.tensor(2.5), math.nan], "name": "a"}


def test_the_same_bits() -> None:
    assert_bit_identical(results, results)
    assert_bit_identical(results(), results())


@pytest.mark.parametrize(
    ("one", "other", "advice"),
    [
        (torch.zeros(3), torch.tensor([0.0, -0.0, 0.0]), "value: 1 of 3 elements differ, by up to 0"),
        (torch.ones(2), torch.tensor([1.0, math.nan]), "1 of 2 elements differ, by up to 0; 0 and 1 NaN"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), r"torch.float32 \[2\] and torch.float64 \[2\]"),
        (torch.ones(2), torch.ones(1, 2), r"float32 \[2\] and torch.float32 \[1, 2\]"),
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.5]}, "a.1: 2.0 and 2.5"),
        ({"a": 0.0}, {"a": -0.0}, "a: 0.0 and -0.0"),
        ({"a": 1}, {"a": True}, "a: 1 and True"),
        ({"a": 1}, {"b": 1}, "only one side has a, b"),
        ({}, {}, "nothing to compare"),
        (torch.arange(4) + 1j, torch.arange(4) + 2j, "4 of 4 elements differ, by up to 1"),
        (torch.tensor([1, 2]), torch.tensor([1, 5]), "1 of 2 elements differ, by up to 3"),
        (torch.ones(2, 2).T, torch.tensor([[1.0, 1], [0, 1]]).T, "1 of 4 elements differ"),
        (torch.zeros(9)[::5][:1], torch.ones(1), "1 of 1 elements differ, by up to 1"),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]), "1 of 1 elements differ, by up to 4"),
    ],
)
def test_other_bits(one: object, other: object, advice: str) -> None:
    with pytest.raises(AssertionError, match=advice):
        assert_bit_identical(one, other)


def test_a_gradient_that_differs_is_named() -> None:
    off, on = results(), results()
    model = on["model"]
    assert isinstance(model, nn.Sequential)
    weight = model[0].weight
    assert weight.grad is not None
    weight.grad[0, 0] += 1
    with pytest.raises(AssertionError, match=r"1 of \d+ values differ:\n  model\.0\.weight\.grad: 1 of 6"):
        assert_bit_identical(off, on)


def test_the_same_nan_is_the_same_and_another_is_not() -> None:
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert_bit_identical(quiet, quiet.clone())
    with pytest.raises(AssertionError, match="1 of 1 elements differ"):
        assert_bit_identical(quiet, other)
    assert_bit_identical(torch.empty(0), torch.empty(0))
