"""The time left: from the first step on, for steps of any length, and legible on every terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from crosscurrent.cli import verify
from crosscurrent.cli.console import Bar, output, progress
from crosscurrent.stress.history import Shown, history_table
from crosscurrent.stress.mutations import Mutant, Score, mutations_table
from crosscurrent.suite.layer import Outcome, Verdict
from crosscurrent.suite.scenario import Scenario
from crosscurrent.suite.verification import Cuda, Result


class _Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def bar(clock: _Clock) -> Bar:
    made = progress()
    made.get_time = clock
    return made


@pytest.mark.parametrize("seconds", [0.5, 60.0, 3600.0])
def test_steps_of_any_length_tell_from_the_first_on_how_much_is_left(
    bar: Bar, clock: _Clock, seconds: float
) -> None:
    task = bar.begin("verify", total=8)
    assert bar.tasks[0].time_remaining is None
    for left in range(7, -1, -1):
        clock.now += seconds
        bar.advance(task)
        assert bar.tasks[0].time_remaining == pytest.approx(left * seconds, abs=1)


def test_what_was_done_by_an_earlier_run_took_this_one_no_time(bar: Bar, clock: _Clock) -> None:
    task = bar.begin("train", total=100, completed=90)
    clock.now += 10
    bar.update(task, completed=91)
    assert bar.tasks[0].time_remaining == 90


def test_work_that_turns_out_to_be_less_takes_less_time(bar: Bar, clock: _Clock) -> None:
    task = bar.begin("prove", total=None)
    bar.count(task, 0, 80)
    clock.now += 10
    bar.count(task, 2, 80)
    assert bar.tasks[0].time_remaining == 390
    bar.count(task, 2, 22)
    assert bar.tasks[0].time_remaining == 100
    clock.now += 5
    bar.count(task, 3, 4)
    assert bar.tasks[0].time_remaining == 5


def test_small_steps_are_shown_as_a_share() -> None:
    bar = progress(share=True)
    task = bar.begin("save", total=None)
    bar.count(task, 250_000_000, 1_000_000_000)
    console = Console(file=StringIO(), width=120)
    console.print(bar.get_renderable())
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert " 25% " in shown
    assert "000" not in shown


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_time_left_is_whole_where_the_description_is_not(
    width: int, monkeypatch: pytest.MonkeyPatch, clock: _Clock
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    bar = progress()
    bar.get_time = clock
    task = bar.begin("a description of which eighty columns cannot show all, or anything else", total=840)
    clock.now += 61
    bar.advance(task)
    console = Console(file=StringIO(), width=width)
    console.print(bar.get_renderable())
    assert isinstance(console.file, StringIO)
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("a description")
    assert line.rstrip().endswith("1/840 0:01:01 gone, 14:12:59 left")


def test_tables_show_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = r"a\[red]b"
    output().print(history_table([Shown(race=None, finding=text)]))
    assert text in capsys.readouterr().out
    output().print(mutations_table(Score(mutants=(Mutant(kind="k", place="p", what=text, killed_by=""),))))
    assert text in capsys.readouterr().out
    scenario = Scenario(policy="lastrec", quantizer="default")
    result = Result(layer="parity", scenario=scenario, outcome=Outcome(Verdict.FAILED, text), seconds=0.0)
    verify._show([result], Cuda.NONE)
    assert text in capsys.readouterr().out
