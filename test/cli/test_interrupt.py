"""Stopping between steps."""

from __future__ import annotations

import signal
import threading

import pytest

from crosscurrent.cli.interrupt import StopRequests


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_the_second_insists(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with StopRequests() as stop:
        assert stop.received is None
        assert stop.exit_code == 0
        signal.raise_signal(number)
        assert stop.received is number
        assert stop.exit_code == code
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_outside_of_the_main_thread_signals_stay_as_they_are() -> None:
    before = signal.getsignal(signal.SIGINT)
    during: list[object] = []

    def work() -> None:
        with StopRequests():
            during.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert during == [before]
