"""Which ops wait before they run, and for how long. Names and numbers only; no device, no tensor.

Four ways (``How``):

- *everywhere*: every op of one lane waits; which lane, the seed says in turn.
- *random*: every op of the lanes waits with probability 1/4, up to the longest delay.
- *PCT*, after Burckhardt et al. (ASPLOS 2010): lanes have random priorities, and the lower its priority, the
  longer each op of a lane waits; at ``depth - 1`` random moments the lane at work falls to the lowest.
  Unlike in the paper a lane of high priority cannot keep the others from running, it only leads.
- *directed*: the ops at one call site wait, so that what should come after them can overtake.

The same seed gives the same delays in every process, on every machine and version of Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from crosscurrent.races.findings import Finding
from crosscurrent.stress.lanes import DEVICE_TO_HOST, HOST_TO_DEVICE, MAIN, ROLES
from crosscurrent.trace.records import Site

RANDOM_SHARE = 0.25
"""The share of ops that wait when the ops are chosen at random: long quiet stretches matter as well."""


class How(Enum):
    """Which ops are chosen to wait."""

    EVERYWHERE = "everywhere"
    RANDOM = "random"
    PCT = "pct"
    DIRECTED = "directed"

    @property
    def is_seeded(self) -> bool:
        """Whether another seed gives other delays."""
        return self is not How.DIRECTED


class Target(NamedTuple):
    """An op at a call site."""

    op: str
    file: str
    line: int

    @classmethod
    def of(cls, finding: Finding) -> Target:
        """What has to be late for a finding to show: its first access."""
        site = finding.first.site
        return cls(finding.first.op, site.file, site.line)

    def is_at(self, op: str, site: Site) -> bool:
        """Whether this is the op."""
        return (op, site.file, site.line) == self


class Step(NamedTuple):
    """An op that is about to be issued, or to be put in a schedule."""

    lane: str
    """The role of its lane."""

    number: int
    """How many ops, of all lanes, were issued before."""

    op: str = ""
    site: Site | None = None
    """Where it was called; known to directed plans only."""


Decide = Callable[[Step], float]
"""The delay of a step in microseconds; 0 for none. To be asked once for every step, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayConfig:
    """A plan of delays."""

    how: How = How.RANDOM
    seed: int = 0
    lanes: tuple[str, ...] = (DEVICE_TO_HOST, HOST_TO_DEVICE, MAIN)
    """The roles of the lanes that may be delayed."""

    delay_us: float = 100.0
    """The longest delay, in microseconds. Some kernels long: shorter ones reorder nothing."""

    depth: int = 3
    """For PCT: how many ordering constraints the bug needs. Nearly all known ones need one or two."""

    target: Target | None = None
    """For directed plans: the op that waits."""

    def __post_init__(self) -> None:
        if unknown := [lane for lane in self.lanes if lane not in ROLES]:
            raise ValueError(f"there is no lane {unknown[0]!r}; the lanes are {', '.join(ROLES)}")
        if not self.lanes:
            raise ValueError(f"lanes must name at least one of {', '.join(ROLES)}")
        if not (self.delay_us > 0 and math.isfinite(self.delay_us)):
            raise ValueError(f"delay_us must be a number above 0, got {self.delay_us}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")
        if (self.how is How.DIRECTED) != (self.target is not None):
            raise ValueError("a plan has a target exactly when it is directed")

    def start(self, length: int) -> Decide:
        """Begin a run of about ``length`` ops."""
        match self.how:
            case How.EVERYWHERE:
                return self._everywhere
            case How.RANDOM:
                return self._at_random
            case How.DIRECTED:
                return self._directed
            case How.PCT:
                return _Priorities(self, max(1, length)).decide

    def _everywhere(self, step: Step) -> float:
        return self.delay_us if step.lane == self.lanes[self.seed % len(self.lanes)] else 0.0

    def _at_random(self, step: Step) -> float:
        if step.lane not in self.lanes:
            return 0.0
        drawn = draw(self.seed, step.number) / RANDOM_SHARE
        return self.delay_us * drawn if drawn < 1 else 0.0

    def _directed(self, step: Step) -> float:
        assert self.target is not None, "checked when the plan was made"
        hit = step.site is not None and self.target.is_at(step.op, step.site)
        return self.delay_us if hit else 0.0


def plan_of(
    seed: int, *, lanes: Sequence[str], delay_us: float, how: How | None = None, target: Target | None = None
) -> DelayConfig:
    """The plan of a seed of a campaign; where nobody says how, seeds take turns at all seeded ways."""
    if how is None:
        ways = [way for way in How if way.is_seeded]
        how, seed = ways[seed % len(ways)], seed // len(ways)
    return DelayConfig(how=how, seed=seed, lanes=tuple(lanes), delay_us=delay_us, target=target)


class _Priorities:
    """The state of a PCT plan: the lanes, the one that leads first."""

    def __init__(self, config: DelayConfig, length: int) -> None:
        self._longest = config.delay_us
        self._order = shuffled(config.lanes, config.seed)
        self._falls = {int(draw(config.seed, "fall", i) * length) for i in range(config.depth - 1)}

    def decide(self, step: Step) -> float:
        order = self._order
        if step.lane not in order:
            return 0.0
        if self._falls and step.number >= min(self._falls):
            self._falls.remove(min(self._falls))
            order.remove(step.lane)
            order.append(step.lane)
        if len(order) == 1:  # it competes with lanes that are never delayed
            return self._longest
        return self._longest * order.index(step.lane) / (len(order) - 1)


def draw(*key: object) -> float:
    """A number in [0, 1) that depends on the key alone."""
    digest = blake2b(repr(key).encode(), digest_size=7).digest()  # 56 bits; a float holds 53
    return (int.from_bytes(digest, "big") >> 3) / (1 << 53)


def shuffled(lanes: Sequence[str], seed: int) -> list[str]:
    """The lanes in an order that depends on the seed alone."""
    return sorted(dict.fromkeys(lanes), key=lambda lane: draw(seed, lane))
