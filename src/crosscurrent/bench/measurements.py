"""What is known of a configuration when it is measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from crosscurrent.bench.comparison import Comparison
from crosscurrent.bench.configurations import Configuration
from crosscurrent.bench.rates import Rates
from crosscurrent.bench.roofline import Roofline
from crosscurrent.report.overlap import BlockedPart, Overlap


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of one step."""

    forward: float
    backward: float
    host_forward: float
    host_backward: float

    @property
    def step(self) -> float:
        """Both passes."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The most memory of a step, in bytes."""

    device: int
    pinned: int
    pinned_is_measured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What the profiler saw of a step."""

    overlap: Overlap
    """Without call sites: finding them out slows the host, and so tears the kernels apart."""
    waits: tuple[BlockedPart, ...]
    """The host waits of another step, with their call sites; none if there was none without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagResult:
    """What was measured with the flag off, or on."""

    times: tuple[StepTimes, ...]
    peaks: Peaks
    profile: Profile

    def median(self, what: Callable[[StepTimes], float]) -> float:
        """The median of a time."""
        return statistics.median(map(what, self.times))


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What was measured of a configuration."""

    configuration: Configuration
    device: str
    off: FlagResult
    on: FlagResult
    comparison: Comparison
    rates: Rates
    roofline: Roofline

    def ratio(self, what: Callable[[StepTimes], float]) -> float:
        """How many times faster the flag makes a time; medians over medians."""
        return self.off.median(what) / self.on.median(what)
