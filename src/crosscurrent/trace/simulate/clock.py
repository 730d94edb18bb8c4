"""The model clock: what a program would take on a device, in nanoseconds, always the same.

The numbers are a model and are not meant to predict a machine. They exist so that events have times,
``query`` is False for a while and becomes True, and ``_sleep`` makes one queue slow.
"""

from __future__ import annotations

ISSUE = 2_000
"""Time of the host to issue one op."""

KERNEL = 5_000
"""Time of one op on a device."""

QUERY = 1_000
"""Time of the host to ask whether work is done."""

COPY_BYTES_PER_NANOSECOND = 25
"""About what a PCIe link moves."""

CYCLES_PER_MICROSECOND = 1_500
"""Clock rate behind ``torch.cuda._sleep``."""


class Clock:
    """The time of the host. Devices run ahead of it: each queue knows when it will be free."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def wait_until(self, time: int) -> None:
        """The host waits for a moment, which may have passed."""
        if time > self.now:
            self.now = time
