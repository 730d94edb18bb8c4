"""The races of the past: what each was, and whether it would be caught today.

Each is shown three ways: the detector names it, with the right pair of accesses; a schedule of the recorded
trace gives other values; and on a real GPU, when what should come first is delayed, so does the program.
This module holds the stories and the table. The variants of the gradient that bring the races back, and the
runs, are in ``crosscurrent.suite``: this half of the package knows no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crosscurrent.races.causes import RaceKind
from crosscurrent.races.findings import Finding, RacingAccess
from crosscurrent.stress.lanes import DEVICE_TO_HOST, HOST_TO_DEVICE, MAIN
from crosscurrent.trace.records import HOST, MemoryKind

if TYPE_CHECKING:
    from rich.table import Table

HOST_LANE = "host"
"""What the host's lane is called here, beside the roles of streams."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRace:
    """A race that happened once, and the pair of accesses by which the detector has to name it."""

    number: int
    name: str
    story: str
    kind: RaceKind
    memory: MemoryKind
    first: str
    """The role of the lane whose access must come first."""
    second: str

    def pair_in(self, findings: Iterable[Finding], roles: Mapping[int, str]) -> Finding | None:
        """The finding whose headline, or a further pair of which, is this race. Roles are by lane."""
        for finding in findings:
            pairs = [(finding.kind, finding.first, finding.second)]
            pairs += [(pair.kind, pair.first, pair.second) for pair in finding.also]
            if finding.memory is self.memory and any(self._is(*pair, roles) for pair in pairs):
                return finding
        return None

    def _is(
        self, kind: RaceKind, first: RacingAccess, second: RacingAccess, roles: Mapping[int, str]
    ) -> bool:
        def role(access: RacingAccess) -> str | None:
            return HOST_LANE if access.lane_index == HOST else roles.get(access.lane_index)

        return (kind, role(first), role(second)) == (self.kind, self.first, self.second)


_DEVICE, _PINNED = MemoryKind.DEVICE, MemoryKind.PINNED

PAST_RACES: tuple[PastRace, ...] = (
    PastRace(
        number=1,
        name="layer-input-sent-early",
        story="the copy of a layer's input to the CPU starts before the op that produces it has run",
        kind=RaceKind.READ_AFTER_WRITE,
        memory=_DEVICE,
        first=MAIN,
        second=DEVICE_TO_HOST,
    ),
    PastRace(
        number=2,
        name="embedding-sent-early",
        story="the same for layer 0 and the embedding",
        kind=RaceKind.READ_AFTER_WRITE,
        memory=_DEVICE,
        first=MAIN,
        second=DEVICE_TO_HOST,
    ),
    PastRace(
        number=3,
        name="checkpoint-read-while-written",
        story="backward reads checkpoints from CPU memory that the forward is still writing",
        kind=RaceKind.READ_AFTER_WRITE,
        memory=_PINNED,
        first=DEVICE_TO_HOST,
        second=HOST_TO_DEVICE,
    ),
    PastRace(
        number=4,
        name="row-start-without-main",
        story="at the start of a row, the transfer lanes do not wait for main",
        kind=RaceKind.WRITE_AFTER_READ,
        memory=_DEVICE,
        first=MAIN,
        second=HOST_TO_DEVICE,
    ),
    PastRace(
        number=5,
        name="slot-refilled-early",
        story="prefetch refills a slot that main still reads",
        kind=RaceKind.WRITE_AFTER_READ,
        memory=_DEVICE,
        first=MAIN,
        second=HOST_TO_DEVICE,
    ),
    PastRace(
        number=6,
        name="head-gradient-sent-early",
        story="the bottom head gradient is sent out before backward has produced it",
        kind=RaceKind.READ_AFTER_WRITE,
        memory=_DEVICE,
        first=MAIN,
        second=DEVICE_TO_HOST,
    ),
    PastRace(
        number=7,
        name="source-freed-while-copied",
        story="the source of a copy is freed, and its memory reused by main, while the copy runs",
        kind=RaceKind.REUSE,
        memory=_DEVICE,
        first=DEVICE_TO_HOST,
        second=MAIN,
    ),
    PastRace(
        number=8,
        name="scratch-shared",
        story="a quantization scratch buffer is shared by two lanes",
        kind=RaceKind.WRITE_AFTER_READ,
        memory=_DEVICE,
        first=DEVICE_TO_HOST,
        second=MAIN,
    ),
    PastRace(
        number=9,
        name="head-gradient-overwritten",
        story="the head gradient's CPU slice is overwritten before it was read",
        kind=RaceKind.WRITE_AFTER_READ,
        memory=_PINNED,
        first=HOST_TO_DEVICE,
        second=DEVICE_TO_HOST,
    ),
    PastRace(
        number=10,
        name="last-write-not-awaited",
        story="the last cell's write is not waited for before the next row, or the next batch, starts",
        kind=RaceKind.READ_AFTER_WRITE,
        memory=_PINNED,
        first=DEVICE_TO_HOST,
        second=HOST_TO_DEVICE,
    ),
    PastRace(
        number=11,
        name="second-batch-only",
        story="a staging buffer is used again without asking: it only shows in the second batch",
        kind=RaceKind.WRITE_AFTER_READ,
        memory=_PINNED,
        first=MAIN,
        second=HOST_LANE,
    ),
)
"""The eleven, in the order in which they are told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What became of one race of the past, or (``race`` is None) of the code as it is."""

    race: PastRace | None
    finding: str = ""
    """What the detector said; empty if it did not name the race, or any race for the code as it is."""
    witness: str = ""
    """What a schedule changed; empty if none that was tried changed anything."""
    delayed: str | None = None
    """What differed on a real GPU under delay; empty: nothing; None: there was no GPU to try it on."""

    @property
    def as_expected(self) -> bool:
        """A race shows every way that could be tried; the code as it is, none."""
        ways = [self.finding, self.witness, *([] if self.delayed is None else [self.delayed])]
        return all(ways) if self.race is not None else not any(ways)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "number": None if self.race is None else self.race.number,
            "name": "unchanged" if self.race is None else self.race.name,
            "as_expected": self.as_expected,
            "finding": self.finding,
            "witness": self.witness,
            "delayed": self.delayed,
        }


@dataclass(frozen=True, slots=True)
class HistoryEvidence:
    """All that was shown in one run."""

    shown: tuple[Shown, ...]

    def as_json(self) -> list[dict[str, Any]]:
        """Plain values, race by race; the code as it is comes last."""
        return [each.as_json() for each in self.shown]


def history_table(shown: Sequence[Shown]) -> Table:
    """One row for each race of the past, and one for the code as it is."""
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    longest = max((len(each.race.name) for each in shown if each.race is not None), default=0)
    table.add_column("race of the past", overflow="fold", min_width=longest)  # names are there to be searched
    for column in ("detector", "witness", "delayed on a GPU"):
        table.add_column(column, overflow="fold")
    for each in shown:
        race = each.race
        style = "green" if each.as_expected else "bold red"
        table.add_row(
            "" if race is None else f"[{style}]{race.number}[/]",
            f"[{style}]{'the code as it is' if race is None else race.name}[/]"
            + ("" if race is None else f"\n{race.story}"),
            _cell(each.finding, race),
            _cell(each.witness, race),
            "not tried: no GPU" if each.delayed is None else _cell(each.delayed, race),
        )
    return table


def _cell(said: str, race: PastRace | None) -> str:
    from rich.markup import escape

    if not said:
        return "[green]nothing[/]" if race is None else "[bold red]not shown[/]"
    return escape(said.partition("\n")[0])
