"""Does anything notice when a sync edge is missing, or too weak?

Each wait and each recording of a trace is dropped and weakened in turn, one occurrence at a time, and the
detector judges the trace that would have come of it. A mutant is *killed* when it is judged a race. One that
survives says that the edge does nothing, or that the judge is blind: both are worth knowing.

What leads to what: ``kinds`` finds the edges of a trace and changes its records; ``thinned`` leaves out what
cannot matter, and ``judge`` feeds only once what mutants share, so that thousands are judged in seconds;
``score`` says what became of them. ``crosscurrent.stress.edges`` does the same to a running program.
"""

from crosscurrent.stress.mutations.judge import first_races
from crosscurrent.stress.mutations.kinds import Kind, Mutation, mutated, mutations_of
from crosscurrent.stress.mutations.score import Mutant, Score, merged, mutations_table
from crosscurrent.stress.mutations.thinned import thinned

__all__ = [
    "Kind",
    "Mutant",
    "Mutation",
    "Score",
    "first_races",
    "merged",
    "mutated",
    "mutations_of",
    "mutations_table",
    "thinned",
]
