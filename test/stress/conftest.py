"""A gradient with a mistake in it, and what was delayed."""

from __future__ import annotations

import itertools

import pytest

from crosscurrent.gradient import transfer
from crosscurrent.stress import DelayConfig, Delays, delays

FORGETFUL_FETCH = 6
"""The fetch that forgets to wait: in the backward pass of the first batch, with slots in use."""


@pytest.fixture
def _forgotten_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fetch refills a slot without waiting for who still reads it: the fifth of the races of the past."""
    right = transfer.Incoming.fetch
    fetches = itertools.count()

    def fetch(self: transfer.Incoming, source: transfer.HostBuffer, num_bytes: int) -> None:
        # With the flag off there is one lane, and nothing to wait for.
        asynchronous = self._lanes.host_to_device is not self._lanes.main
        if asynchronous and next(fetches) == FORGETFUL_FETCH:
            self._consumed = [None for _ in self._consumed]
        right(self, source, num_bytes)

    monkeypatch.setattr(transfer.Incoming, "fetch", fetch)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Delays]:
    """All delays that the suite makes, in order."""
    found: list[Delays] = []

    def remembered(config: DelayConfig, *, length: int = 1) -> Delays:
        found.append(delays(config, length=length))
        return found[-1]

    for module in ("stressed", "history"):
        monkeypatch.setattr(f"crosscurrent.suite.{module}.delays", remembered)
    return found
