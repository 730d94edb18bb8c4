"""What goes into a graph while it is captured, told from what runs meanwhile.

A capture begins on one stream, and takes in every stream that waits for an event of it. Streams that do not
take part go on as ever: those of other threads, and of other devices. Only the host's order of all that is
one. A capture allocates from a pool of the graph's own; what it frees of that stays there.
"""

from __future__ import annotations

from crosscurrent.trace.records import Alloc, DropEvent, Free, Op, Record, RecordEvent, UseStream, WaitEvent


class Capture:
    """One capture: the streams that take part in it, and what they were given."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        """Where it began, and has to end."""
        self.records: list[Record] = []
        self.blocks: set[int] = set()
        """Blocks of the graph's own."""
        self.lanes = {lane}
        self._events: set[int] = set()

    def takes(self, record: Record) -> bool:
        """Keep a record if it is one of the capture's, which does not happen now."""
        if not self._is_mine(record):
            return False
        self.records.append(record)
        return True

    def _is_mine(self, record: Record) -> bool:
        match record:
            case Op():
                return record.lane in self.lanes
            case Alloc():
                if not record.fresh or record.lane not in self.lanes:
                    return False
                self.blocks.add(record.block)
            case Free() | UseStream():
                return record.block in self.blocks
            case RecordEvent():
                if record.lane not in self.lanes:
                    return False
                self._events.add(record.event)
            case WaitEvent():
                if record.event not in self._events:
                    return record.lane in self.lanes
                self.lanes.add(record.lane)
            case DropEvent():
                return record.event in self._events
            case _:
                return False
        return True
