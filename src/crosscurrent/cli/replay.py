"""``crosscurrent replay``: run a saved program again, in one order or in many."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from crosscurrent.cli.arguments import command_parser
from crosscurrent.cli.console import Bar, progress, say
from crosscurrent.cli.exits import ExitCode, WrongUseError, as_wrong_use

if TYPE_CHECKING:
    from rich.progress import TaskID
    from torch import Tensor

    from crosscurrent.schedules import Exploration, Program, Strategy

_ELEMENTS = 4
"""Elements shown of each value."""

_VALUES = 8
"""Values that did not change are shown if there are at most so many, else counted."""

_ENGINES = ("serial", "processes", "ray")
"""Those of ``schedules.engines``, which is not imported to show the options: it imports torch."""

_BINDING = 4
"""Runs that take as long as to find out how the program is best run again. They are even more if its values
are small, but then runs take no time."""


def parser() -> ArgumentParser:
    """The options of the command."""
    options = command_parser(
        "replay",
        "Run a program that was saved from a watch (crosscurrent.schedules.save) again on this machine: in "
        "the order of a schedule, which a finding names; without one in program order, and then in as many "
        "others as asked for. Exit code: 0 the values of program order, 1 others, 2 wrong use (a file or a "
        "schedule that is damaged, of another version, or of another program), 3 the program does not "
        "give its recorded values.",
        "crosscurrent replay step.ccp cc1:3fa9c1d2e0b4:random.17:-:8c1f",
        usage="[OPTIONS] TRACE [SCHEDULE]",
    )
    options.add_argument("trace", metavar="TRACE", help="The saved program.")
    options.add_argument("schedule", metavar="SCHEDULE", nargs="?", help="The schedule, as it was printed.")
    options.add_argument(
        "--schedules", type=int, default=0, metavar="N", help="Try N random schedules and N of PCT."
    )
    options.add_argument("--seed", type=int, default=0, metavar="S", help="The first seed of these.")
    options.add_argument(
        "--exhaustive",
        type=int,
        default=0,
        metavar="N",
        help="Try one schedule of every class, at most N for each choice of memory.",
    )
    options.add_argument(
        "--engine", choices=_ENGINES, default="serial", help="Where to try them: here, or spread."
    )
    options.add_argument("--workers", type=int, metavar="N", help="How many processes or Ray workers.")
    return options


def run(arguments: Namespace) -> int:
    """Run the schedules, say what came out, and give the exit code."""
    from crosscurrent.schedules import load
    from crosscurrent.schedules.engines import engine_of, spread

    strategies = _strategies(arguments)
    if arguments.schedule is not None and strategies:
        raise WrongUseError("either one SCHEDULE is run, or --schedules and --exhaustive are tried")
    with as_wrong_use():
        with progress(transient=True, share=True) as bar:
            program = load(arguments.trace, told=partial(bar.count, bar.begin("load program", total=None)))
        if arguments.schedule is not None:
            return _one(program, arguments.schedule)
        engine = engine_of(arguments.engine, arguments.workers)
    with closing(engine):
        code = _program_order(program)
        if code is not ExitCode.GOOD or not strategies:
            return code
        with progress() as bar:
            task = bar.begin("schedules", total=_most(program, arguments))
            found = spread(
                program,
                strategies,
                engine,
                limit=arguments.exhaustive,
                told=lambda done: bar.update(task, completed=done),
            )
        return _tell_all(found)


def _most(program: Program, arguments: Namespace) -> int:
    """How many schedules will be tried at most: all that the strategies may propose, for each memory."""
    from crosscurrent.schedules.explore import memory_choices

    random = 2 * (len(program.order().lanes) + arguments.schedules) if arguments.schedules else 0
    choices = sum(1 for _ in memory_choices(program, every=bool(arguments.exhaustive)))
    return int(choices * (random + arguments.exhaustive))


def _one(program: Program, text: str) -> ExitCode:
    """Run one schedule, and show its values beside those of program order."""
    from crosscurrent.report.wording import readable
    from crosscurrent.schedules import NotReplayableError, Replayer, Schedule
    from crosscurrent.schedules.program import View

    schedule = Schedule.parse(text, program)
    views: dict[str, View] = dict(program.names) | {read.name: read.view for read in program.host_reads}
    try:
        with progress(transient=True, share=True) as bar:
            task = bar.begin("schedule", total=_BINDING + 2)
            replayer = Replayer(program, schedule.reuse, told=partial(_bound, bar, task))
            replayer.run(replayer.order.program)
            expected = {name: _shown(replayer.final(view)) for name, view in views.items()}
            bar.advance(task)
            outcome = replayer.run(schedule.linear)
            bar.advance(task)
    except NotReplayableError as error:
        say(f"the program cannot be run again: {error}")
        return ExitCode.NO_VERDICT
    if outcome.failure is not None:
        say(readable(str(outcome.failure)))
        return ExitCode.BAD
    for change in outcome.changes:
        say(readable(str(change)))
        if (view := views.get(change.name)) is not None:
            say(f"  program order: {expected[change.name]}")
            say(f"  this schedule: {_shown(replayer.final(view))}")
    same = [name for name in views if name not in {change.name for change in outcome.changes}]
    if outcome.same:
        say("the same values as in program order")
    if len(same) <= _VALUES:
        for name in same:
            say(f"{readable(name)}: as in program order\n  {expected[name]}")
    else:
        say(f"{len(same)} other values are as in program order")
    return ExitCode.GOOD if outcome.same else ExitCode.BAD


def _bound(bar: Bar, task: TaskID, done: float, most: int) -> None:
    """So much of the program is bound to memory."""
    bar.update(task, completed=_BINDING * done / most)


def _shown(value: Tensor) -> str:
    """The first elements of a value."""
    first = value.flatten()[:_ELEMENTS].tolist()
    more = ", ..." if value.numel() > _ELEMENTS else ""
    return ", ".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in first) + more


def _strategies(arguments: Namespace) -> list[Strategy]:
    from crosscurrent.schedules import PCT, Classes, LatestAndEarliest, RandomWalk

    if min(arguments.schedules, arguments.exhaustive, arguments.seed) < 0:
        raise WrongUseError("--schedules, --exhaustive and --seed are not negative")
    strategies: list[Strategy] = []
    if arguments.schedules:
        count, start = arguments.schedules, arguments.seed
        strategies += [
            LatestAndEarliest(),
            RandomWalk(count=count, start=start),
            PCT(count=count, start=start),
        ]
    if arguments.exhaustive:
        strategies.append(Classes())
    return strategies


def _program_order(program: Program) -> ExitCode:
    from crosscurrent.report.wording import readable
    from crosscurrent.schedules import NotReplayableError, Replayer

    try:
        with progress(transient=True, share=True) as bar:
            task = bar.begin("program order", total=_BINDING + 1)
            replayer = Replayer(program, told=partial(_bound, bar, task))
            wrong = replayer.unfaithful()
            bar.advance(task)
    except NotReplayableError as error:
        say(f"the program cannot be run again: {error}")
        return ExitCode.NO_VERDICT
    if wrong:
        say("program order does not give the recorded values of:")
        for name in wrong:
            say(f"  {readable(name)}")
        return ExitCode.NO_VERDICT
    say("program order: the recorded values")
    return ExitCode.GOOD


def _tell_all(exploration: Exploration) -> ExitCode:
    from crosscurrent.report.wording import readable

    say(str(exploration))
    for difference in exploration.differences:
        say(readable(str(difference)))
    return ExitCode.GOOD if exploration.same else ExitCode.BAD
