"""The bounds, against a walk in small steps of time; and the rates, as the simulation's clock shows them."""

from __future__ import annotations

from collections import Counter
from itertools import product as pairs

import pytest
import torch

import crosscurrent
from crosscurrent.bench.counts import Counts, PassCount, Product, Role
from crosscurrent.bench.rates import Rates, measure
from crosscurrent.bench.roofline import byte_seconds, roofline
from crosscurrent.trace.simulate import clock

RATES = Rates(
    products={},
    overall=500.0,
    to_device=40.0,
    to_host=50.0,
    to_device_at_once=30.0,
    to_host_at_once=20.0,
    copy_bytes=1,
)


def _walk(to_device: float, to_host: float, step: float) -> float:
    """Move bytes for one small step of time after the other."""
    time = 0.0
    while to_device > 0 or to_host > 0:
        both = to_device > 0 and to_host > 0
        to_device -= step * (RATES.to_device_at_once if both else RATES.to_device)
        to_host -= step * (RATES.to_host_at_once if both else RATES.to_host)
        time += step
    return time


@pytest.mark.parametrize(("to_device", "to_host"), list(pairs((0, 60, 300), (0, 40, 300))))
def test_bytes_go_both_ways_at_once_and_then_the_rest(to_device: int, to_host: int) -> None:
    step = 1e-3
    # Each of the three changes of rate is seen at most one step late.
    assert byte_seconds(to_device, to_host, RATES) == pytest.approx(
        _walk(to_device, to_host, step), abs=3 * step
    )


def test_both_done_at_the_same_time() -> None:
    assert byte_seconds(60, 40, RATES) == 2.0


def test_a_pass_needs_the_longer_of_operations_and_bytes() -> None:
    products = Counter({Product(Role.OUTPUT, 5, 5, 5): 4})  # 4 x 250 operations
    computing = PassCount(products=products, attention=500, to_device=40, to_host=0)
    moving = PassCount(products=Counter(), attention=500, to_device=0, to_host=500)
    found = roofline(Counts(forward=computing, backward=moving), RATES)
    assert (found.forward.operations, found.forward.operation_seconds) == (1500, 3.0)
    assert (found.forward.byte_seconds, found.forward.seconds) == (1.0, 3.0)
    assert (found.backward.operation_seconds, found.backward.byte_seconds) == (1.0, 10.0)
    assert found.seconds == 13.0


@pytest.mark.simulation
def test_rates_are_what_the_clock_shows() -> None:
    small, large = Product(Role.INPUT, 8, 4, 2), Product(Role.WEIGHT, 16, 4, 2)
    with crosscurrent.simulate():
        rates = measure({small: 3, large: 1}, dtype=torch.float32, copy_bytes=1 << 20)
    # The model clock gives every kernel the same time, and so do 20 of them, one after the other.
    seconds = clock.KERNEL / 1e9
    assert rates.products == {
        small: pytest.approx(small.operations / seconds, rel=1e-6),
        large: pytest.approx(large.operations / seconds, rel=1e-6),
    }
    operations = 3 * small.operations + large.operations
    assert rates.overall == pytest.approx(operations / (4 * seconds), rel=1e-6)
    for rate in (rates.to_device, rates.to_host, rates.to_device_at_once, rates.to_host_at_once):
        assert 0 < rate <= clock.COPY_BYTES_PER_NANOSECOND * 1e9
