"""The time below which a pass cannot get on this machine: that of its operations, or that of its bytes.

- Operations: all of them over the rate of the matrix products at the configuration's own shapes. Attention
  counts at that rate, too, though its kernels reach less.
- Bytes: both directions begin together, each at the rate that it has while both are busy. When the one with
  less to move is done, the other goes on at the rate that it has alone.
- A pass takes the longer of the two, for copies can run behind kernels; a step takes both passes, for the
  backward pass begins when the loss is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from crosscurrent.bench.counts import Counts, PassCount
from crosscurrent.bench.rates import Rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What one pass needs."""

    operations: int
    to_device: int
    to_host: int
    operation_seconds: float
    byte_seconds: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.operation_seconds, self.byte_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """What a step needs."""

    forward: Bound
    backward: Bound

    @property
    def seconds(self) -> float:
        """Both passes, one after the other."""
        return self.forward.seconds + self.backward.seconds


def roofline(counts: Counts, rates: Rates) -> Roofline:
    """The bounds of both passes."""
    return Roofline(forward=_bound(counts.forward, rates), backward=_bound(counts.backward, rates))


def _bound(count: PassCount, rates: Rates) -> Bound:
    return Bound(
        operations=count.operations,
        to_device=count.to_device,
        to_host=count.to_host,
        operation_seconds=count.operations / rates.overall,
        byte_seconds=byte_seconds(count.to_device, count.to_host, rates),
    )


def byte_seconds(to_device: int, to_host: int, rates: Rates) -> float:
    """Seconds to move bytes both ways at once, as long as both have any, and then the rest."""
    together = min(to_device / rates.to_device_at_once, to_host / rates.to_host_at_once)
    rest_in = to_device - together * rates.to_device_at_once
    rest_out = to_host - together * rates.to_host_at_once
    return together + rest_in / rates.to_device + rest_out / rates.to_host
