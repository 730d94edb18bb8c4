"""The seam of the suite: a layer asks one question of every scenario.

A layer answers ``Outcome.held`` with what it looked at, or ``Outcome.failed`` with what it found. One
that raises has failed. Whether it can be asked at all is not its own business: it says what it needs,
and whoever runs it provides that or reports that it could not be run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from crosscurrent.suite.scenario import Scenario


class Verdict(Enum):
    """What is known of a layer in a scenario. Only ``HELD`` is good news."""

    HELD = "held"
    FAILED = "failed"
    NOT_RUN = "not run"


class Evidence(Protocol):
    """What a layer looked at, one by one."""

    def as_json(self) -> Any:
        """Plain values."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict with its evidence."""

    verdict: Verdict
    detail: str
    evidence: Evidence | None = None
    """More than fits in a line, where there is more."""

    @classmethod
    def held(cls, detail: str, evidence: Evidence | None = None) -> Outcome:
        """The property held; ``detail`` says what was compared."""
        return cls(Verdict.HELD, detail, evidence)

    @classmethod
    def failed(cls, detail: str, evidence: Evidence | None = None) -> Outcome:
        """The property does not hold; ``detail`` says what was seen and what was expected."""
        return cls(Verdict.FAILED, detail, evidence)


class Layer(Protocol):
    """One question."""

    @property
    def name(self) -> str:
        """The name on the command line and in the table."""

    @property
    def claim(self) -> str:
        """What holds when the layer held, in one sentence."""

    @property
    def needs_cuda(self) -> bool:
        """Whether the question needs a CUDA device, real or simulated."""

    @property
    def needs_quiet(self) -> bool:
        """Whether the answer depends on time, so that nothing else may run on a real device meanwhile."""

    def takes(self, scenario: Scenario) -> bool:
        """Whether the question is one of its own in this scenario, and not the same as in another."""

    def check(self, scenario: Scenario) -> Outcome:
        """Ask it. Where ``needs_cuda``, ``torch.cuda`` works when this is called."""
