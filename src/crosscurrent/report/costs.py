"""What the operations of a trace would take: a model, from bytes and operations over stated rates.

A kernel takes the longer of two times, that of its arithmetic and that of the bytes it reads and
writes, and never less than ``kernel_floor``. A transfer takes its bytes over the rate of the link. The
host takes ``issue`` to launch anything. Nothing gets in anything's way: caches, clocks, copies that
share a link and kernels that share a device are not modelled. Arithmetic is counted for matrix
products, convolutions and attention; all else is taken to be bound by its bytes. Attention counts as
if no key were masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from crosscurrent.report.makespan import Mark, Step, Stop, Wait, Work
from crosscurrent.trace.records import (
    HOST,
    Access,
    Alloc,
    HostWait,
    MemoryKind,
    Op,
    Record,
    RecordEvent,
    Region,
    TraceInfo,
    WaitEvent,
)


class Direction(Enum):
    """Where the bytes of a transfer go."""

    HOST_TO_DEVICE = "host to device"
    DEVICE_TO_HOST = "device to host"
    PEER = "device to device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The machine that the model stands for. The defaults are near what was measured on one H200."""

    operations_per_second: int = 600 * 10**12
    """Arithmetic of matrix products, in bfloat16."""

    wide_operations_per_second: int = 50 * 10**12
    """The same in float32; float64 is taken to run at this rate, too."""

    device_bytes_per_second: int = 3_000 * 10**9
    link_bytes_per_second: int = 55 * 10**9
    host_bytes_per_second: int = 10 * 10**9
    """What the host itself moves when it has to touch pinned or pageable memory."""

    kernel_floor: int = 3_000
    """The least time of a kernel, in nanoseconds."""

    copy_floor: int = 2_000
    issue: int = 7_600
    """Time of the host for one launch, in nanoseconds."""

    def __post_init__(self) -> None:
        for name in (
            "operations_per_second",
            "wide_operations_per_second",
            "device_bytes_per_second",
            "link_bytes_per_second",
            "host_bytes_per_second",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("kernel_floor", "copy_floor", "issue"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def __str__(self) -> str:
        return (
            f"{self.operations_per_second / 1e12:g} TFLOP/s ({self.wide_operations_per_second / 1e12:g} in "
            f"float32), device memory {self.device_bytes_per_second / 1e9:g} GB/s, "
            f"link {self.link_bytes_per_second / 1e9:g} GB/s each way, {self.issue / 1e3:g} us a launch"
        )


class Cost(NamedTuple):
    """What one operation would take, in nanoseconds."""

    duration: int
    direction: Direction | None = None
    """None: no transfer."""

    nbytes: int = 0
    """Of a transfer: the bytes moved."""

    pageable: bool = False


class CostModel:
    """Prices the operations of one trace. Feed it every record in order: it learns the blocks on the way."""

    def __init__(self, info: TraceInfo, rates: Rates) -> None:
        self._info = info
        self._rates = rates
        self._memory: dict[int, MemoryKind] = {}
        self._device: dict[int, int | None] = {}

    def see(self, record: Alloc) -> None:
        """Learn what kind of memory a block is."""
        self._memory[record.block] = record.memory
        self._device[record.block] = self._device_of(record.lane)

    def cost(self, op: Op) -> Cost:
        """What an operation takes on its lane."""
        rates = self._rates
        if op.lane == HOST:
            touched = sum(size(access.region) for access in op.accesses)
            return Cost(_time(touched, rates.host_bytes_per_second))
        direction, pageable = self._direction(op)
        if direction is not None:
            # A copy of many tensors moves the bytes of all of them, and each byte has two sides.
            written = sum(size(access.region) for access in op.accesses if access.write)
            read = sum(size(access.region) for access in op.accesses if not access.write)
            nbytes = max(read, written)
            duration = _time(nbytes, rates.link_bytes_per_second)
            return Cost(max(duration, rates.copy_floor), direction, nbytes, pageable)
        touched = sum(size(access.region) for access in op.accesses)
        wide = any(access.dtype.endswith(("float32", "float64")) for access in op.accesses)
        rate = rates.wide_operations_per_second if wide else rates.operations_per_second
        return Cost(
            max(
                _time(touched, rates.device_bytes_per_second),
                _time(arithmetic(op), rate),
                rates.kernel_floor,
            )
        )

    def _direction(self, op: Op) -> tuple[Direction | None, bool]:
        reads = [access for access in op.accesses if not access.write]
        writes = [access for access in op.accesses if access.write]
        if base_name(op.name) not in _COPIES:
            is_item = base_name(op.name) in _ITEMS and bool(reads)
            return (Direction.DEVICE_TO_HOST if is_item else None), False
        from_host = any(self._is_pinned(access) for access in reads)
        to_host = any(self._is_pinned(access) for access in writes)
        if from_host != to_host:
            return (Direction.HOST_TO_DEVICE if from_host else Direction.DEVICE_TO_HOST), False
        if writes and not reads:  # the other side is pageable memory, which a trace does not follow
            return Direction.HOST_TO_DEVICE, True
        if reads and not writes:
            return Direction.DEVICE_TO_HOST, True
        devices = {self._device.get(access.block, self._device_of(op.lane)) for access in op.accesses}
        return (Direction.PEER, False) if len(devices) > 1 else (None, False)

    def _is_pinned(self, access: Access) -> bool:
        return self._memory.get(access.block) is MemoryKind.PINNED

    def _device_of(self, lane: int) -> int | None:
        lanes = self._info.lanes
        return lanes[lane].device if 0 <= lane < len(lanes) else None


_COPIES = frozenset({"copy_", "copy", "_to_copy", "_foreach_copy_", "_copy_from", "_pin_memory"})
_ITEMS = frozenset({"_local_scalar_dense", "item"})
_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmm_", "baddbmm_", "linear", "_addmm_activation"}
)


def base_name(name: str) -> str:
    """``aten.copy_.default`` is ``copy_``."""
    parts = name.replace("::", ".").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def size(region: Region) -> int:
    """How many bytes a region has."""
    return region.run * math.prod(count for count, _ in region.dims)


def arithmetic(op: Op) -> int:
    """Multiplications and additions of one operation, from its shapes; 0 where bytes decide."""
    name = base_name(op.name)
    reads = [access.shape for access in op.accesses if not access.write and access.shape]
    writes = [access.shape for access in op.accesses if access.write and access.shape]
    if not reads or not writes:
        return 0
    if name in _PRODUCTS:
        left = reads[-2] if len(reads) > 1 else reads[-1]  # one tensor times itself
        return 2 * math.prod(writes[0]) * left[-1]
    if "attention" in name or name.startswith("attend"):
        return _attention(name, [shape for shape in reads if len(shape) == 4])
    if name == "convolution" and len(reads) > 1:
        return 2 * math.prod(writes[0]) * math.prod(reads[1][1:])
    return 0


def _attention(name: str, shapes: list[tuple[int, ...]]) -> int:
    """Queries, keys and values come first, in backward after the gradient of the output."""
    backward = "backward" in name
    if len(shapes) < 2 + backward:
        return 0
    query, key = shapes[backward : backward + 2]
    # The kernels behind scaled_dot_product_attention have the sequence before the heads.
    sequence = 1 if name.startswith(("_flash_attention", "_efficient_attention")) else 2
    forward = 4 * math.prod(query) * key[sequence]
    return forward * 5 // 2 if backward else forward


def program_of(
    records: Iterable[Record], info: TraceInfo, rates: Rates
) -> tuple[list[Step], list[Record], list[Cost]]:
    """A trace as a program to play: its steps, and of each step the record and the cost."""
    model = CostModel(info, rates)
    steps: list[Step] = []
    sources: list[Record] = []
    costs: list[Cost] = []
    for record in records:
        cost = Cost(0)
        step: Step
        match record:
            case Alloc():
                model.see(record)
                continue
            case Op():
                cost = model.cost(record)
                kind = "kernels" if cost.direction is None else f"copies, {cost.direction.value}"
                if cost.pageable and steps and _stages(sources[-1], record):
                    # The host itself moves the bytes into a buffer of the driver before it goes on.
                    steps[-1] = Stop(None, (), _time(cost.nbytes, rates.host_bytes_per_second))
                if record.lane == HOST:
                    kind = "work of the host"
                step = Work(record.lane, cost.duration, rates.issue, kind)
            case RecordEvent():
                step = Mark(record.lane, record.event)
            case WaitEvent():
                step = Wait(record.lane, record.event)
            case HostWait():
                step = Stop(record.event, record.lanes)
            case _:
                continue
        steps.append(step)
        sources.append(record)
        costs.append(cost)
    return steps, sources, costs


def _stages(record: Record, op: Op) -> bool:
    return isinstance(record, HostWait) and not record.lanes and record.event is None and record.op == op.name


def _time(amount: int, per_second: int) -> int:
    """Nanoseconds, rounded up."""
    return -(-amount * 10**9 // per_second)
