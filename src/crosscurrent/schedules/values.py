"""The values that a run ends with, what to call them, and how far they are from another run's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from crosscurrent.schedules.arena import Arena
from crosscurrent.schedules.bound import different
from crosscurrent.schedules.program import Program, View, whole_views
from crosscurrent.schedules.reuse import blocks_of
from crosscurrent.trace.records import Alloc


class What(Enum):
    """What kind of value changed, the most telling first."""

    VALUE = "value"
    """A final value that the user has a name for."""

    HOST_READ = "host read"
    """Something that the host read on the way."""

    MEMORY = "memory"
    """A block that was still there at the end."""

    FREED = "freed memory"
    """A block that was given back; this is what was last in it."""


class Change(NamedTuple):
    """A value that came out otherwise than in program order."""

    name: str
    what: What
    elements: int
    total: int
    nan: int
    """How many elements are NaN, and were not."""

    distance: float
    """The largest absolute difference among the other elements that changed."""

    def __str__(self) -> str:
        said = []
        if self.nan:
            said.append(f"{self.nan} NaN" if self.nan != self.elements else "all of them NaN")
        if self.nan != self.elements:
            said.append(f"off by up to {self.distance:.6g}")
        later = ", freed later" if self.what is What.FREED else ""
        return f"{self.name}{later}: {self.elements} of {self.total} elements changed, {', '.join(said)}"


class Values:
    """Compares the memory of a run with that of another, value by value."""

    def __init__(self, program: Program, arena: Arena) -> None:
        self._program = program
        self._arena = arena
        blocks = blocks_of(program.records)
        self._sites = {r.block: r.site for r in program.records if isinstance(r, Alloc)}
        handed_on = set(arena.taken.values())
        self._alive: list[View] = []
        self._freed: list[View] = []
        for block, view in sorted(whole_views(program).items()):
            if block >= 0 and block not in handed_on:
                freed = block in blocks and blocks[block].stop is not None
                (self._freed if freed else self._alive).append(view)

    def named(self) -> Iterator[tuple[str, View]]:
        """What has a name of its own: the user's final values, and what the host read."""
        yield from self._program.names.items()
        for read in self._program.host_reads:
            yield read.name, read.view

    def changes(self, reference: Tensor) -> tuple[Change, ...]:
        """What is not as it is in ``reference``, another image of the same arena.

        Freed memory counts only when nothing else changed: it tells little to a user, but it is a value
        that the program computed.
        """
        found = [
            *self._compare(What.VALUE, self._program.names.items(), reference),
            *self._compare(What.HOST_READ, ((r.name, r.view) for r in self._program.host_reads), reference),
        ]
        told = {self._program.names[change.name].block for change in found if change.what is What.VALUE}
        others = [view for view in self._alive if view.block not in told]
        found += self._compare(What.MEMORY, self._described(others, reference), reference)
        return tuple(found or self._compare(What.FREED, self._described(self._freed, reference), reference))

    def _described(self, views: Iterable[View], reference: Tensor) -> Iterator[tuple[str, View]]:
        """The views whose bytes changed, each with words for its block."""
        for view in views:
            if not self._same_bytes(view, reference):
                words = f"{view.dtype} {list(view.shape)}"
                site = self._program.info.site_at(self._sites.get(view.block, -1))
                if site is not None:
                    words += f", from {site.file}:{site.line}"
                yield f"block {view.block} ({words})", view

    def _same_bytes(self, view: View, reference: Tensor) -> bool:
        return torch.equal(self._arena.span(view.block), self._arena.span(view.block, reference))

    def _compare(self, what: What, views: Iterable[tuple[str, View]], reference: Tensor) -> Iterator[Change]:
        for name, view in views:
            if self._same_bytes(view, reference):
                continue
            change = _change(name, what, self._arena.view(view), self._arena.view_in(view, reference))
            if change is not None:
                yield change


def _change(name: str, what: What, now: Tensor, before: Tensor) -> Change | None:
    apart = different(now, before)
    elements = int(apart.sum())
    if not elements:
        return None
    one, other = _wide(now[apart]), _wide(before[apart])
    gone = one.isnan() & ~other.isnan()
    distance = (one - other).abs()[~gone]
    finite = distance[~distance.isnan()]
    return Change(
        name, what, elements, now.numel(), int(gone.sum()), float(finite.max()) if finite.numel() else 0.0
    )


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.dtype.is_complex else torch.float64)
