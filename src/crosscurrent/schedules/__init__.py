"""Running a recorded program again, in other orders: does a race matter, and what does it do?

    with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
        loss = step()
        keeper.name({"loss": loss})
    program = keeper.program()
    for finding in prove(program, seen.findings):
        print(finding.witness, finding.schedule)
    print(explore(program, [RandomWalk(count=1000)]))

What leads to what: ``recording`` makes a ``program`` (``storage`` writes and reads it); ``order`` says what
must come before what, ``reuse`` whose memory can be whose, ``conflicts`` which pairs are open; ``strategies``
propose orders; ``replay`` runs them, and ``values`` compares; ``explore`` searches, on ``engines``;
``witness`` looks for the schedule that shows a finding; a ``schedule`` is a string.
"""

from __future__ import annotations

from crosscurrent.schedules.errors import (
    DamagedError,
    NotReplayableError,
    ProgramMismatchError,
    ReplayError,
    VersionError,
)
from crosscurrent.schedules.explore import Exploration, Share, explore, merge
from crosscurrent.schedules.program import Program
from crosscurrent.schedules.recording import Keeper, keep_values
from crosscurrent.schedules.replay import Outcome, Replayer
from crosscurrent.schedules.schedule import Schedule
from crosscurrent.schedules.storage import load, save
from crosscurrent.schedules.strategies import (
    PCT,
    Classes,
    Directed,
    Exhaustive,
    LatestAndEarliest,
    RandomWalk,
    Strategy,
)
from crosscurrent.schedules.witness import Prover, Witness, prove

__all__ = [
    "PCT",
    "Classes",
    "DamagedError",
    "Directed",
    "Exhaustive",
    "Exploration",
    "Keeper",
    "LatestAndEarliest",
    "NotReplayableError",
    "Outcome",
    "Program",
    "ProgramMismatchError",
    "Prover",
    "RandomWalk",
    "ReplayError",
    "Replayer",
    "Schedule",
    "Share",
    "Strategy",
    "VersionError",
    "Witness",
    "explore",
    "keep_values",
    "load",
    "merge",
    "prove",
    "run_schedule",
    "save",
]


def run_schedule(program: Program, text: str) -> Outcome:
    """Run the schedule that a string names, and say what came out otherwise than in program order.

    Raises a ``ReplayError`` that says what is wrong, with nothing run, if the string is damaged, of another
    version or of another program.
    """
    schedule = Schedule.parse(text, program)
    return Replayer(program, schedule.reuse).run(schedule.linear)
