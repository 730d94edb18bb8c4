"""Which races would be left if the waits that others lack were there.

From the first race on there is a second, better knowledge beside the clocks: what each lane would know if
every race so far had been mended, by a wait right before its second access for all that the other lane had
been given by then. A race that this knowledge orders lacks nothing of its own. What is kept is only what
the second knowledge has more than the clocks, and thanks to which waits: a program without races pays
nothing.

A reuse that ``record_stream`` would mend, or a longer life of the pinned tensor, is given no wait, because
these order nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from crosscurrent.races.causes import Cause, LackedWait, RaceKind
from crosscurrent.races.clocks import Clocks
from crosscurrent.trace.records import HOST, HostWait, MemoryKind, Op, RecordEvent, WaitEvent

_Thanks = frozenset[LackedWait]
_More = dict[int, tuple[int, _Thanks]]
"""By lane, up to where its work is known to be done, and thanks to which waits."""

_NOTHING: Final = (0, frozenset[LackedWait]())


class _Race(NamedTuple):
    """An access that is not ordered after the ``epoch``-th op of ``lane``."""

    number: int
    """The position of its op in the trace."""

    cause: Cause
    lane: int
    epoch: int
    given: int
    """How much the other lane had been given."""

    freed: int
    """The block that was given back, for a reuse; else -1."""

    wait: LackedWait


class Mending:
    """Told of every race and every sync call; writes into causes what they lack."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._lanes: dict[int, _More] = {}
        self._events: dict[int, _More] = {}
        self._freed: dict[int, _More] = {}
        self._races: list[_Race] = []
        self._sweep_at = self._sweep_freed_at = 1024

    def recorded(self, record: RecordEvent) -> None:
        """An event was recorded."""
        more = self._of(record.lane)
        if more:
            self._events[record.event] = dict(more)
            if len(self._events) > self._sweep_at:
                self._sweep()

    def waited(self, lane: int, record: RecordEvent | None, wait: WaitEvent | HostWait) -> None:
        """``lane`` waited for a recording, or (the host) for all work of some lanes."""
        if record is not None:
            self._take_in(lane, self._events.get(record.event, {}))
        elif isinstance(wait, HostWait):
            for other in wait.lanes:
                self._take_in(lane, self._of(other))

    def freed(self, block: int, lanes: Iterable[int]) -> None:
        """A block was given back that the allocator holds until ``lanes`` are done with what they have."""
        known: _More = {}
        for lane in lanes:
            for other, (epoch, thanks) in self._of(lane).items():
                if epoch > known.get(other, _NOTHING)[0]:
                    known[other] = (epoch, thanks)
        if known:
            self._freed[block] = known
            if len(self._freed) > self._sweep_freed_at:
                self._sweep_freed()

    def race(self, cause: Cause, lane: int, epoch: int, op: Op, freed: int = -1) -> None:
        """An access of ``op`` is not ordered after the ``epoch``-th op of ``lane``."""
        if self._races and self._races[0].number != op.index:
            self.settle()
        wait = LackedWait(lane, op.lane, op.site, op.name)
        self._races.append(_Race(op.index, cause, lane, epoch, self._clocks.of(lane)[lane], freed, wait))

    def settle(self) -> None:
        """Mend the races of the last op that had any, before the clocks change."""
        if not self._races:
            return
        races, self._races = self._races, []
        second = races[0].wait.second
        left = [race for race in races if _takes_wait(race.cause) and not self._is_mended(race, second)]
        while left:
            # Of several lanes the one that knows most of the others, so that one wait mends them, too.
            best = max(left, key=lambda race: sum(self._covers(race, other) for other in left))
            self._mend(best, second)
            for race in left:
                if race.lane == best.lane:
                    race.cause.lacks.add(best.wait)
            left = [race for race in left if race.lane != best.lane and not self._is_mended(race, second)]
        for race in races:
            if not _takes_wait(race.cause) and not self._is_mended(race, second):
                race.cause.lacks_care = True

    def _is_mended(self, race: _Race, second: int) -> bool:
        epoch, thanks = self._of(second).get(race.lane, _NOTHING)
        if epoch < race.epoch:
            epoch, thanks = self._freed.get(race.freed, {}).get(race.lane, _NOTHING)
        if epoch < race.epoch:
            return False
        race.cause.mended_by |= thanks
        return True

    def _covers(self, race: _Race, other: _Race) -> bool:
        """Whether a wait for the lane of ``race`` mends ``other``, too."""
        return other.lane == race.lane or self._known(race.lane, other.lane)[0] >= other.epoch

    def _known(self, lane: int, other: int) -> tuple[int, _Thanks]:
        known = self._clocks.of(lane)[other]
        return max((known, _NOTHING[1]), self._of(lane).get(other, _NOTHING), key=lambda each: each[0])

    def _mend(self, race: _Race, second: int) -> None:
        thanks = frozenset([race.wait])
        waited = {race.lane: (race.given, thanks)}
        for other in range(1, len(self._clocks.of(race.lane))):
            if other not in (race.lane, second):
                epoch, earlier = self._known(race.lane, other)
                waited[other] = (epoch, earlier | thanks)
        self._take_in(second, waited)

    def _of(self, lane: int) -> _More:
        more = self._lanes.setdefault(lane, {})
        if lane != HOST:
            self._take_in(lane, self._lanes.get(HOST, {}))
        return more

    def _take_in(self, lane: int, waited: _More) -> None:
        more = self._lanes.setdefault(lane, {})
        clock = self._clocks.of(lane)
        for other, (epoch, thanks) in waited.items():
            if epoch > clock[other] and epoch > more.get(other, _NOTHING)[0]:
                more[other] = (epoch, thanks)

    def _sweep(self) -> None:
        """Forget events that nobody can wait for any more."""
        recording = self._clocks.recording
        self._events = {event: more for event, more in self._events.items() if recording(event) is not None}
        self._sweep_at = max(1024, 2 * len(self._events))

    def _sweep_freed(self) -> None:
        """Forget blocks of which the host knows that all is done."""
        host = self._clocks.host
        self._freed = {
            block: known
            for block, known in self._freed.items()
            if any(epoch > host[lane] for lane, (epoch, _) in known.items())
        }
        self._sweep_freed_at = max(1024, 2 * len(self._freed))


def _takes_wait(cause: Cause) -> bool:
    """Whether it is a wait that is missing, in the words of the fix."""
    if cause.freed is None or cause.kind is not RaceKind.REUSE:
        return True
    return cause.memory is not MemoryKind.PINNED and cause.freed.owner == cause.first_lane
