"""Who listens to a simulation, and what the simulation tells them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from crosscurrent.trace.records import Region


class Taps(Protocol):
    """A tracer, as a simulation sees it. Streams are (device index, stream id)."""

    @property
    def observers(self) -> Sequence[object]:
        """Who wants to see values; usually nobody."""
        ...

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to run. Called only while there are observers."""
        ...

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An op ran. ``out`` are its results, already known as device or pinned memory."""
        ...

    def failed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op raised an error. It may have resized what it was to write to."""
        ...

    def event_recorded(self, event: Hashable, device: int, stream: int, via: str = "record") -> None:
        """A stream was given an event to record."""
        ...

    def event_waited(self, event: Hashable, device: int, stream: int, via: str = "wait_event") -> None:
        """A stream waits for the latest recording of an event, if there is one."""
        ...

    def event_synchronized(self, event: Hashable, kind: str = "event") -> None:
        """The host waited for an event."""
        ...

    def event_queried_true(self, event: Hashable) -> None:
        """The host saw that an event is done."""
        ...

    def event_gone(self, event: Hashable) -> None:
        """An event that was recorded is no more."""
        ...

    def stream_synchronized(self, device: int, stream: int) -> None:
        """The host waited for a stream."""
        ...

    def stream_queried_true(self, device: int, stream: int) -> None:
        """The host saw that a stream is idle."""
        ...

    def device_synchronized(self, device: int) -> None:
        """The host waited for all streams of a device."""
        ...

    def stream_used(self, tensor: torch.Tensor, device: int, stream: int) -> None:
        """``tensor.record_stream`` was called."""
        ...

    def pool_used(self, pool: Hashable, device: int) -> None:
        """A graph is launched that shares its memory pool with other graphs."""
        ...

    def unknown(self, name: str, reason: str) -> None:
        """Something that cannot be followed."""
        ...

    def looked_at(self, tensor: torch.Tensor, name: str) -> None:
        """The host looks at a tensor's content without an op, wherever it lies; it waits for a device."""
        ...

    def host_access(self, tensor: torch.Tensor, write: bool, name: str) -> None:
        """The host itself touches a tensor, outside of any op."""
        ...

    def host_bytes(
        self, tensor: torch.Tensor, access: tuple[Region, tuple[int, ...], str], write: bool, name: str
    ) -> None:
        """The host touches some bytes of a tensor's storage, through a NumPy array."""
        ...

    def released(self, storage: torch.UntypedStorage) -> None:
        """A storage gave back its memory and lives on."""
        ...
