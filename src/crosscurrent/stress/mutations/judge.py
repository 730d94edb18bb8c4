"""Judges the mutants of one trace, one after the other.

A mutant's trace is the recorded one up to where it changes, so the detector is fed that only once: it is put
aside there, and each mutant goes on from a copy, until its first race. (A copy by way of bytes, in memory,
takes a tenth of the time of ``copy.deepcopy``.)
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from crosscurrent.races.causes import Cause
from crosscurrent.races.detector import Detector
from crosscurrent.stress.mutations.kinds import Mutation, mutated
from crosscurrent.trace.records import Op, Record


def first_races(
    records: Sequence[Record], mutations: Iterable[Mutation]
) -> Iterator[tuple[Mutation, Cause | None]]:
    """Each mutation with the first race of the trace that would have come of it; None if there is none.

    ``records`` may be a thinned trace. It must have no race itself. The mutations come back in the order in
    which they change the trace.
    """
    detector = Detector()
    fed = 0
    aside: bytes | None = None
    for mutation in sorted(mutations, key=_start):
        start = bisect_left(records, _start(mutation), key=lambda record: record.index)
        if start > fed or aside is None:
            _feed(detector, records[fed:start])
            assert not detector.causes, "the trace that was recorded has races: fix these first"
            aside, fed = pickle.dumps(detector, pickle.HIGHEST_PROTOCOL), start
        copy: Detector = pickle.loads(aside)
        yield mutation, _feed(copy, mutated(records, mutation)[start:])


def _start(mutation: Mutation) -> int:
    """Where the trace changes."""
    return mutation.index if mutation.previous is None else mutation.previous


def _feed(detector: Detector, records: Iterable[Record]) -> Cause | None:
    """Feed until there is a race."""
    for record in records:
        detector.feed(record)
        if isinstance(record, Op) and detector.causes:
            return detector.causes[0]
    return None
