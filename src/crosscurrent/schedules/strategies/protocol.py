"""The one seam between the strategies and everything that runs what they propose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from crosscurrent.schedules.conflicts import Conflicts
from crosscurrent.schedules.order import Linear, PartialOrder


class Space(NamedTuple):
    """What there is to choose from, once it is decided who is handed whose memory."""

    order: PartialOrder
    conflicts: Conflicts
    """The pairs that the order leaves open and whose order can matter, earlier in program order first."""


class Proposal(NamedTuple):
    """One schedule, and how to say it in a few letters if it has a name."""

    linear: Linear
    recipe: str = ""
    """``name.number.number`` as ``strategies.from_recipe`` reads it, or nothing."""


class Strategy(Protocol):
    """Proposes schedules of a trace, one after the other. The same strategy proposes the same ones."""

    @property
    def exhausts(self) -> bool:
        """Whether every behaviour has been proposed once the proposals end by themselves."""

    def proposals(self, space: Space) -> Iterator[Proposal]:
        """The schedules, lazily: whoever asks may stop whenever it has seen enough."""
