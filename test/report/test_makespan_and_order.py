"""The model clock against the order that schedules are made of: both read the same records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crosscurrent.report.makespan import Mark, Step, Stop, Wait, Work, play
from crosscurrent.schedules.order import PartialOrder
from crosscurrent.trace.records import (
    HOST,
    Access,
    HostWait,
    Op,
    Record,
    RecordEvent,
    Region,
    WaitEvent,
)

LANES = st.integers(1, 3)
EVENTS = st.integers(0, 3)
STEPS = st.lists(
    st.one_of(
        st.builds(Work, st.integers(HOST, 3), st.integers(1, 9), st.integers(0, 5), st.just("kernels")),
        st.builds(Mark, LANES, EVENTS),
        st.builds(Wait, LANES, EVENTS),
        st.builds(Stop, EVENTS, st.just(()), st.integers(0, 5)),
        st.builds(Stop, st.none(), st.tuples(LANES), st.integers(0, 5)),
    ),
    max_size=24,
)


def renumbered(steps: list[Step]) -> list[Step]:
    """As in a trace: each recording has a number of its own, and a wait binds to the last one so far."""
    current: dict[int, int] = {}
    program: list[Step] = []
    for i, step in enumerate(steps):
        if isinstance(step, Mark):
            current[step.event] = i
            program.append(Mark(step.lane, i))
        elif isinstance(step, Wait):
            program.append(Wait(step.lane, current.get(step.event, -1)))
        elif isinstance(step, Stop) and step.event is not None:
            program.append(Stop(current.get(step.event, -1), (), step.duration))
        else:
            program.append(step)
    return program


def records_of(program: list[Step]) -> list[Record]:
    records: list[Record] = []
    for i, step in enumerate(program):
        match step:
            case Work(lane, _):
                records.append(Op(i, lane, "op", 0, (Access(i, Region(0, 1, 1), True),)))
            case Mark(lane, event):
                records.append(RecordEvent(i, lane, event, 0, "record"))
            case Wait(lane, event):
                records.append(WaitEvent(i, lane, event, 0, "wait_event"))
            case Stop(event, lanes):
                records.append(HostWait(i, "synchronize", event, lanes, 0))
    return records


@given(STEPS)
def test_work_starts_when_the_last_that_must_come_before_it_ends(steps: list[Step]) -> None:
    program = renumbered(steps)
    run = play(program, host_is_free=True)
    order = PartialOrder.of(records_of(program))
    positions = [i for i, step in enumerate(program) if isinstance(step, Work)]
    for node, position in enumerate(positions):
        ends = [run.stop[positions[below]] for below in order.predecessors[node]]
        assert run.start[position] == max(ends, default=0)
    assert run.makespan == max((run.stop[position] for position in positions), default=0)


@given(STEPS)
def test_the_critical_path_is_a_chain_as_long_as_the_makespan(steps: list[Step]) -> None:
    program = renumbered(steps)
    run = play(program, host_is_free=True)
    order = PartialOrder.of(records_of(program))
    node = {i: n for n, i in enumerate(i for i, step in enumerate(program) if isinstance(step, Work))}
    for one, other in zip(run.path, run.path[1:], strict=False):
        assert order.before(node[one], node[other])
        assert run.stop[one] == run.start[other]
    assert sum(run.stop[i] - run.start[i] for i in run.path) == run.makespan


@given(STEPS)
def test_issuing_takes_time_and_dropping_edges_never_adds_any(steps: list[Step]) -> None:
    program = renumbered(steps)
    free = play(program, host_is_free=True).makespan
    assert free <= play(program).makespan
    for dropped in range(len(program)):
        assert play(program, host_is_free=True, dropped={dropped}).makespan <= free
