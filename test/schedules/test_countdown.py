"""How much is left at most: it never grows, and what is not needed is gone at once."""

from __future__ import annotations

from contextlib import suppress

from crosscurrent.schedules.countdown import Countdown


def test_steps_are_counted_against_what_is_left_at_most() -> None:
    told: list[tuple[int, int]] = []
    countdown = Countdown(lambda taken, most: told.append((taken, most)))
    countdown.expect(10)
    countdown.take()
    countdown.take(3)
    countdown.skip(4)
    countdown.take(2)
    assert told == [(0, 10), (1, 10), (4, 10), (4, 6), (6, 6)]


def test_what_a_part_did_not_need_is_no_longer_left() -> None:
    told: list[tuple[int, int]] = []
    countdown = Countdown(lambda taken, most: told.append((taken, most)))
    countdown.expect(20)
    with countdown.part(8):
        with countdown.part(5):
            countdown.take(2)
        assert told[-1] == (2, 17)
        countdown.take(1)
    assert told[-1] == (3, 15)
    with countdown.part(12):
        countdown.take(12)
    assert told[-1] == (15, 15)


def test_a_part_that_fails_is_over_too() -> None:
    told: list[tuple[int, int]] = []
    countdown = Countdown(lambda taken, most: told.append((taken, most)))
    countdown.expect(6)
    with suppress(ZeroDivisionError), countdown.part(4):
        countdown.take()
        raise ZeroDivisionError
    assert told[-1] == (1, 3)


def test_steps_may_be_told_in_part_before_they_are_taken() -> None:
    told: list[tuple[float, int]] = []
    countdown = Countdown(lambda taken, most: told.append((taken, most)))
    countdown.expect(5)
    countdown.take()
    countdown.amid(0.5)
    countdown.amid(1.75)
    countdown.take(2)
    assert told[2:] == [(1.5, 5), (2.75, 5), (3, 5)]


def test_steps_that_nobody_expected_are_counted_all_the_same() -> None:
    told: list[tuple[int, int]] = []
    countdown = Countdown(lambda taken, most: told.append((taken, most)))
    with countdown.part(3):
        countdown.take(2)
    assert told[-1] == (2, 2)
