"""Vector clocks over the lanes of a trace: who has waited for how much of whom.

The n-th op of a lane has epoch n. A lane's clock says for each lane up to which epoch its work is
known to be done before anything that this lane does next. The host's own acts have no epochs:
whatever is issued comes after all that the host did, so nothing can ever run before them.

A clock is a plain list indexed by lane, changed in place. A stream's clock takes in the host's clock
when the stream is next used (the host's clock only ever grows, so its version tells whether there
is anything to take in), and event recordings keep a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from crosscurrent.trace.records import HOST, HostWait, RecordEvent, WaitEvent

Clock = list[int]


class Recording(NamedTuple):
    """One recording of an event: what its lane had been given."""

    record: RecordEvent
    clock: tuple[int, ...]

    @property
    def epoch(self) -> int:
        """The last op of the lane that the recording marks."""
        return self.clock[self.record.lane]


class Clocks:
    """The clocks of all lanes, and the recordings that may still be waited for."""

    def __init__(self) -> None:
        self._clocks: list[Clock] = [[0]]
        self._taken_in: list[int] = [0]
        self._host_version = 0
        self._recordings: dict[int, Recording] = {}
        self._sweep_at = 1024

    @property
    def host(self) -> Clock:
        """What the host has waited for."""
        return self._clocks[HOST]

    @property
    def all_done(self) -> bool:
        """Whether the host has waited for all work that any lane was given."""
        host = self.host
        return all(clock[lane] <= host[lane] for lane, clock in enumerate(self._clocks) if lane != HOST)

    @property
    def num_recordings(self) -> int:
        """Recordings kept."""
        return len(self._recordings)

    def of(self, lane: int) -> Clock:
        """The clock of ``lane``, with what the host has waited for; a caller may count up its own epoch."""
        try:
            if self._taken_in[lane] == self._host_version:
                return self._clocks[lane]
        except IndexError:
            self._grow(lane)
        clock = self._clocks[lane]
        if lane != HOST:
            take_in(clock, self._clocks[HOST])
        self._taken_in[lane] = self._host_version
        return clock

    def record(self, record: RecordEvent) -> Recording:
        """Mark what a lane has been given."""
        recording = Recording(record, tuple(self.of(record.lane)))
        self._recordings[record.event] = recording
        if len(self._recordings) > self._sweep_at:
            self._sweep()
        return recording

    def recording(self, event: int | None) -> Recording | None:
        """The recording with this number; None where it orders nothing (any more, or ever)."""
        return None if event is None else self._recordings.get(event)

    def drop(self, event: int) -> None:
        """Nobody will wait for ``event`` any more."""
        self._recordings.pop(event, None)

    def wait(self, wait: WaitEvent) -> Recording | None:
        """Order a recording before what its waiter is given later; returns the recording."""
        recording = self._recordings.get(wait.event)
        if recording is not None:
            self._join(wait.lane, recording.clock)
        return recording

    def host_wait(self, wait: HostWait) -> Recording | None:
        """Order a recording, or all work of some lanes, before the host's later acts."""
        if wait.event is not None:
            recording = self._recordings.get(wait.event)
            if recording is not None:
                self._join(HOST, recording.clock)
            return recording
        for lane in wait.lanes:
            self._join(HOST, self.of(lane))
        return None

    def _join(self, lane: int, clock: Sequence[int]) -> None:
        if take_in(self.of(lane), clock) and lane == HOST:
            self._host_version += 1
            self._taken_in[HOST] = self._host_version

    def _grow(self, lane: int) -> None:
        more = lane + 1 - len(self._clocks)
        for clock in self._clocks:
            clock.extend([0] * more)
        self._clocks.extend([0] * (lane + 1) for _ in range(more))
        self._taken_in.extend([-1] * more)

    def _sweep(self) -> None:
        """Forget recordings of work that the host has waited for: waiting for them orders nothing more."""
        host = self.host
        self._recordings = {
            event: recording
            for event, recording in self._recordings.items()
            if any(marked > done for marked, done in zip(recording.clock, host, strict=False))
        }
        self._sweep_at = max(1024, 2 * len(self._recordings))


def take_in(clock: Clock, other: Sequence[int]) -> bool:
    """Make ``clock`` the later of the two in every lane; whether that changed it."""
    changed = False
    # A recording made before a lane appeared is shorter, and knows nothing of that lane.
    for lane, epoch in enumerate(other):
        if epoch > clock[lane]:
            clock[lane] = epoch
            changed = True
    return changed
