"""What became of the mutants, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One mutant, and what noticed it."""

    kind: str
    place: str
    what: str
    """The edge or buffer, and what was done to it."""

    killed_by: str
    """What failed; empty if nothing did."""

    reason: str = ""
    """Why it survived."""

    @property
    def killed(self) -> bool:
        """Whether anything noticed."""
        return bool(self.killed_by)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """All mutants of a run."""

    mutants: tuple[Mutant, ...]

    @property
    def num_killed(self) -> int:
        """Mutants that something noticed."""
        return sum(mutant.killed for mutant in self.mutants)

    @property
    def survivors(self) -> tuple[Mutant, ...]:
        """Mutants that nothing noticed."""
        return tuple(mutant for mutant in self.mutants if not mutant.killed)

    def __str__(self) -> str:
        total = len(self.mutants)
        share = f" ({self.num_killed / total:.1%})" if total else ""
        return f"{self.num_killed} of {total} mutants killed{share}"

    def counts(self) -> dict[tuple[str, str], tuple[int, int]]:
        """By kind and place: how many were killed, and how many there are."""
        total = Counter((mutant.kind, mutant.place) for mutant in self.mutants)
        killed = Counter((mutant.kind, mutant.place) for mutant in self.mutants if mutant.killed)
        return {key: (killed[key], count) for key, count in total.items()}

    def as_json(self) -> dict[str, Any]:
        """The score, the counts and each survivor, as plain values."""
        return {
            "mutants": len(self.mutants),
            "killed": self.num_killed,
            "by_kind_and_place": [
                {"kind": kind, "place": place, "killed": killed, "mutants": count}
                for (kind, place), (killed, count) in self.counts().items()
            ],
            "survivors": [
                {"kind": each.kind, "place": each.place, "what": each.what, "reason": each.reason}
                for each in self.survivors
            ],
        }


def mutations_table(score: Score) -> Table:
    """Kinds by places, killed of all; below, each survivor with its reason."""
    from rich.markup import escape
    from rich.table import Table

    counts = score.counts()
    kinds, places = (list(dict.fromkeys(key[i] for key in counts)) for i in (0, 1))
    table = Table(title=str(score), show_edge=False, pad_edge=False)
    table.add_column("mutation")
    for place in places:
        table.add_column(place, justify="right")
    for kind in kinds:
        table.add_row(kind, *(_cell(counts.get((kind, place))) for place in places))
    for mutant in score.survivors:
        table.add_section()
        table.add_row(f"[bold red]survived[/] {escape(mutant.what)}: {escape(mutant.reason)}")
    return table


def merged(scores: Sequence[Score]) -> Score:
    """The score of several runs together."""
    return Score(mutants=tuple(mutant for score in scores for mutant in score.mutants))


def _cell(count: tuple[int, int] | None) -> str:
    if count is None:
        return ""
    killed, total = count
    return f"{killed}/{total}" if killed == total else f"[bold red]{killed}/{total}[/]"
