"""The roles of lanes, told from outside by what they do first.

A stream that starts by copying from a device to the host is ``device_to_host``, one that starts with the
opposite copy is ``host_to_device``, any other is ``other``. The stream that was current to begin with is
``main``. Streams of the same role share their name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crosscurrent.trace.records import HOST, Access, Alloc, Lane, MemoryKind, Op, Record

MAIN = "main"
HOST_TO_DEVICE = "host_to_device"
DEVICE_TO_HOST = "device_to_host"
OTHER = "other"

ROLES = (DEVICE_TO_HOST, HOST_TO_DEVICE, MAIN, OTHER)
"""Every role that a stream can have."""


def role_of(*, from_device: bool, to_host: bool, from_host: bool, to_device: bool) -> str:
    """The role of a stream that starts with an op that reads and writes these memories."""
    if from_device and to_host:
        return DEVICE_TO_HOST
    if from_host and to_device:
        return HOST_TO_DEVICE
    return OTHER


def roles_in(records: Sequence[Record], lanes: Sequence[Lane]) -> dict[int, str]:
    """By lane of a trace: its role. Default streams are main; the host has none."""
    memory = {record.block: record.memory for record in records if isinstance(record, Alloc)}
    roles = {lane.index: MAIN for lane in lanes if lane.stream == 0}
    for record in records:
        if isinstance(record, Op) and record.accesses and record.lane not in (HOST, *roles):
            roles[record.lane] = _first(record.accesses, memory)
    return roles


def _first(accesses: Sequence[Access], memory: Mapping[int, MemoryKind]) -> str:
    def has(kind: MemoryKind, *, write: bool) -> bool:
        return any(memory.get(access.block) is kind and access.write == write for access in accesses)

    reads_device = has(MemoryKind.DEVICE, write=False)
    writes_device = has(MemoryKind.DEVICE, write=True)
    return role_of(
        from_device=reads_device,
        # What is written, but not on a device, is host memory, followed or not.
        to_host=not writes_device,
        from_host=has(MemoryKind.PINNED, write=False),
        to_device=writes_device,
    )
