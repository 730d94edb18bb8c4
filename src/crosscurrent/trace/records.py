"""The records of a trace: plain integers and names, in the order in which the host issued them.

A trace is a sequence of records. Whoever watches a program (simulated or real) produces them;
detectors, schedules and reports consume them and never see a tensor. Every record carries its
``index``, its position in the trace (which hides the method of that name that tuples have).

Lanes. Lane 0 is the host; every stream of every device is a lane of its own. All host threads
share lane 0: their order is taken as it was observed.

What each record orders:

- ``Op`` on a stream lane comes after everything the host did before issuing it, and after all
  earlier work of its lane. ``Op`` on lane 0 comes after all earlier acts of the host.
- ``RecordEvent`` marks what its lane had been given. ``event`` numbers this one recording: the
  same CUDA event recorded twice has two numbers. ``DropEvent`` says that a number is of no more use.
- ``WaitEvent`` orders the marked work before whatever is issued later on its lane.
- ``HostWait`` orders the marked work of an event, or all work so far of some lanes, before the
  host's later acts, and so before all that it issues later.
- ``Alloc`` hands out a block from the pool of ``lane``: it may be memory that an earlier block of
  that pool gave back, and is ordered with that lane (and the host) only.
- ``Free`` gives it back. ``UseStream`` (``record_stream``) makes the reuse wait, too, for what
  ``lane`` had been given at the time of the free; it is no access.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final, NamedTuple

HOST: Final = 0
"""The lane of the host."""

GRAPH_POOL = "graph memory pool"
"""The name of an op that computes nothing: a launch uses memory which other graphs of its pool use, too."""

NO_EVENT: Final = -1
"""The event number of a wait on an event that nobody has recorded: it orders nothing."""


class MemoryKind(Enum):
    """The memory that a trace follows. Pageable memory is the host's alone, and is not followed."""

    DEVICE = "device"
    PINNED = "pinned"


class Region(NamedTuple):
    """Bytes of one block, exactly: ``run`` contiguous bytes, repeated along ``dims``.

    ``dims`` holds ``(count, stride in bytes)`` from the outermost loop to the innermost, all counts
    at least 2, all strides positive and at least ``run``; ``()`` for a contiguous region. ``stop``
    is one past the last byte. A region is never empty.
    """

    start: int
    stop: int
    run: int
    dims: tuple[tuple[int, int], ...] = ()


class Access(NamedTuple):
    """A read or a write of a region of a block by one op."""

    block: int
    region: Region
    write: bool
    shape: tuple[int, ...] = ()
    dtype: str = ""
    kept: bool = False
    """The allocator itself keeps the block until this access is done (PyTorch's own copies from and
    to pinned memory do that): freeing the block early is no hazard for this access."""


class Site(NamedTuple):
    """Where user code made a call: the innermost frame outside of torch and crosscurrent."""

    file: str
    line: int
    function: str
    stack: tuple[tuple[str, int, str], ...] = ()
    """The whole stack, outermost first, when it was asked for."""


class Lane(NamedTuple):
    """The host, or one stream of one device."""

    index: int  # type: ignore[assignment]
    name: str
    device: int | None = None
    stream: int | None = None


class Op(NamedTuple):
    """One operation on one lane."""

    index: int  # type: ignore[assignment]
    lane: int
    name: str
    site: int
    accesses: tuple[Access, ...]


class Alloc(NamedTuple):
    """A block was allocated while ``lane`` was current."""

    index: int  # type: ignore[assignment]
    block: int
    lane: int
    nbytes: int
    memory: MemoryKind
    site: int
    fresh: bool = True
    """False: the block was first seen when it was used, and is older than that (than the trace, mostly).
    It takes no memory that an earlier block gave back; ``lane`` is the best guess at its pool."""


class Free(NamedTuple):
    """A block was given back."""

    index: int  # type: ignore[assignment]
    block: int
    site: int


class UseStream(NamedTuple):
    """``tensor.record_stream``: the block is also used on ``lane``."""

    index: int  # type: ignore[assignment]
    block: int
    lane: int
    site: int


class RecordEvent(NamedTuple):
    """An event was recorded on ``lane``; ``via`` is the call (``record``, ``wait_stream``, ...)."""

    index: int  # type: ignore[assignment]
    lane: int
    event: int
    site: int
    via: str


class DropEvent(NamedTuple):
    """Recording ``event`` can no longer be waited for: its event is gone, or was recorded again."""

    index: int  # type: ignore[assignment]
    event: int


class WaitEvent(NamedTuple):
    """``lane`` waits for recording ``event``, or for nothing (``NO_EVENT``)."""

    index: int  # type: ignore[assignment]
    lane: int
    event: int
    site: int
    via: str


WAIT_KINDS = (
    "synchronize",
    "event",
    "query",
    "item",
    "blocking copy",
    "pageable copy",
    "strided copy",
    "allocation",
    "data-dependent shape",
)
"""How the host can be made to wait."""


class HostWait(NamedTuple):
    """The host waited: for recording ``event`` if that is not None, else for all work of ``lanes``.

    ``kind`` is one of ``WAIT_KINDS``. ``query`` did not block; it is an edge all the same. ``pageable copy``
    to a device and ``allocation`` hold up the host without ordering anything: they have no lanes and no
    event.
    """

    index: int  # type: ignore[assignment]
    kind: str
    event: int | None
    lanes: tuple[int, ...]
    site: int
    op: str = ""


class Unknown(NamedTuple):
    """Something that could not be understood, and why. It is reported, never dropped."""

    index: int  # type: ignore[assignment]
    op: str
    site: int
    reason: str


Record = Op | Alloc | Free | UseStream | RecordEvent | DropEvent | WaitEvent | HostWait | Unknown


_new: Final[Any] = tuple.__new__


class Sink:
    """Takes in the records of a trace, one after the other.

    ``op``, ``alloc`` and ``free`` are for those who make most of them: a sink that keeps no records need
    not have them made.
    """

    __slots__ = ()

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        raise NotImplementedError

    def op(self, record: Op) -> None:
        """The same for an ``Op``."""
        self.feed(record)

    def alloc(
        self, index: int, number: int, owner: int, nbytes: int, memory: MemoryKind, site: int, fresh: bool
    ) -> None:
        """The same for an ``Alloc`` of block ``number`` from the pool of lane ``owner``."""
        self.feed(_new(Alloc, (index, number, owner, nbytes, memory, site, fresh)))

    def free(self, index: int, number: int, site: int) -> None:
        """The same for the ``Free`` of block ``number``."""
        self.feed(_new(Free, (index, number, site)))


class Through(Sink):
    """Hands each record to some functions."""

    __slots__ = ("_functions",)

    def __init__(self, *functions: Callable[[Record], None]) -> None:
        self._functions = functions

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        for function in self._functions:
            function(record)


class TraceInfo(NamedTuple):
    """What the integers of a trace's records refer to. The lists grow while the program runs."""

    lanes: list[Lane]
    sites: list[Site]

    def site_at(self, number: int) -> Site | None:
        """The call site with this number; None where the trace does not know it."""
        return self.sites[number] if 0 <= number < len(self.sites) else None
