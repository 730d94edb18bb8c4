"""Racing pairs as the detector collects them: integers, and one example of each cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from crosscurrent.trace.records import Access, HostWait, MemoryKind, Op, RecordEvent, WaitEvent


class RaceKind(Enum):
    """How two accesses conflict, in the order in which the program issued them."""

    READ_AFTER_WRITE = "read-after-write"
    WRITE_AFTER_WRITE = "write-after-write"
    WRITE_AFTER_READ = "write-after-read"
    REUSE = "reuse"


class Freed(NamedTuple):
    """The block that was given back while an access to it was not known to be done."""

    block: int
    owner: int
    allocated: int
    """The call site of its allocation."""

    free: int
    """The call site of the free."""


class Context(NamedTuple):
    """Which sync calls there were around a race, so that a report can say what they missed."""

    early: tuple[RecordEvent, WaitEvent | HostWait] | None
    """The second lane's last wait for the first lane: it waited for too little."""

    ready: RecordEvent | None
    """A recording on the first lane that does cover the first access: nobody waited for it."""

    unrecorded: WaitEvent | None
    """The last wait, on either lane, for an event that nobody had recorded."""

    elsewhere: tuple[RecordEvent | None, WaitEvent | HostWait] | None
    """The second lane's last wait between the two accesses, if it was for another lane."""


class LackedWait(NamedTuple):
    """A wait that is not there: right before an access, for all that another lane was given so far."""

    lane: int
    """The lane to be waited for."""

    second: int
    """The lane that has to wait."""

    site: int
    """Where: before which call, of which op."""

    op: str


@dataclass(slots=True, kw_only=True)
class Cause:
    """Racing pairs that share their kind, lanes, ops and call sites; the first of them in full."""

    kind: RaceKind
    first_lane: int
    first: Op
    first_access: Access
    second_lane: int
    second: Op
    second_access: Access
    memory: MemoryKind
    certain: bool
    context: Context
    freed: Freed | None = None
    count: int = 1
    last: tuple[int, int] = (0, 0)

    lacks: set[LackedWait] = field(default_factory=set)
    """The waits that mend it, as far as those that other causes lack do not."""

    lacks_care: bool = False
    """Whether it takes ``record_stream``, or a longer life of the freed tensor."""

    mended_by: set[LackedWait] = field(default_factory=set)
    """The waits of other causes that mend it, or some of its pairs."""
