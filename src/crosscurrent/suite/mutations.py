"""The mutations layer: whatever sync edge or buffer of the gradient is weakened, something notices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from crosscurrent.gradient.long_context import LongContextGradientModel
from crosscurrent.races.causes import Cause
from crosscurrent.races.detector import Detector
from crosscurrent.races.findings import Finding, findings_of
from crosscurrent.schedules import Prover, Witness
from crosscurrent.stress.edges import CALLS, ChangedEdge, drop_edge, weaken_edge
from crosscurrent.stress.lanes import DEVICE_TO_HOST, HOST_TO_DEVICE, MAIN, roles_in
from crosscurrent.stress.mutations import (
    Kind,
    Mutant,
    Mutation,
    Score,
    first_races,
    mutated,
    mutations_of,
    thinned,
)
from crosscurrent.suite.experiment import make_batches, make_model
from crosscurrent.suite.layer import Outcome
from crosscurrent.suite.recorded import Batches, Recording, racy, record
from crosscurrent.suite.scenario import Scenario
from crosscurrent.suite.structure import structural_mutants
from crosscurrent.trace.records import Record, Site

Judged = tuple[Mutation, Cause | None]

PROGRAMS = 6
"""Mutants of an ordinary run that are tried on the running program, too."""

WITNESSES = 2
"""And mutants for which a schedule that changes values is looked for."""


@dataclass(frozen=True)
class Mutations:
    """Each end of each sync edge of two batches, dropped and weakened, one occurrence at a time: judged by
    the detector on the trace that comes of it, and for some by really running the program so. Each double
    buffer with one slot, each pinned buffer shared with another."""

    name: str = "mutations"
    claim: str = (
        "every sync edge of the gradient that is dropped or weakened, every double buffer of one slot and "
        "every pinned buffer that is reused early is noticed"
    )
    needs_cuda: bool = True
    needs_quiet: bool = False

    def takes(self, scenario: Scenario) -> bool:
        """Without graphs: sync edges are made outside of them, and what a graph holds has none."""
        return not scenario.graphs

    def check(self, scenario: Scenario) -> Outcome:
        """Kill them all."""
        runnable = racy(scenario)
        recording = recorded(scenario, keep=runnable == scenario)
        edges = judged(recording)
        mutants = [edge_mutant(recording, *each) for each in edges]
        score = Score(mutants=(*mutants, *structural_mutants(scenario)))
        if score.survivors:
            reasons = "; ".join(f"{each.what}: {each.reason}" for each in score.survivors[:3])
            return Outcome.failed(f"{score}; survivors: {reasons}", score)
        if wrong := disagreement_with_advice(recording, edges):
            return Outcome.failed(wrong, score)
        if runnable != scenario:
            recording = recorded(runnable, keep=True)
        proven = [witness_of(recording, each).proven for each in sample(edges_of(recording), WITNESSES)]
        chosen = sample(edges_of(recording), PROGRAMS)
        for mutation in chosen:
            if wrong := disagreement_with_program(recording, runnable, mutation):
                return Outcome.failed(wrong, score)
        ran = "" if runnable == scenario else f" of {runnable.policy}"
        return Outcome.held(
            f"{score}; {len(chosen)} of them run as programs{ran}, with the same findings; for {sum(proven)} "
            f"of {len(proven)} a schedule that changes values",
            score,
        )


def recorded(scenario: Scenario, batches: Batches | None = None, *, keep: bool = False) -> Recording:
    """The trace whose edges are mutated; ``keep`` what it takes to run it again, for witnesses."""
    return record(make_model(scenario), make_batches() if batches is None else batches, keep=keep)


def edges_of(recording: Recording) -> list[Mutation]:
    """Every mutation of every sync edge that the gradient makes."""
    return mutations_of(
        recording.seen.records,
        recording.seen.info,
        owns=_is_ours,
        place=lambda index: recording.parts.of(index).value,
    )


def judged(recording: Recording) -> list[Judged]:
    """Every mutation of a sync edge, and the first race that the detector finds in the mutant."""
    return list(first_races(thinned(recording.seen.records), edges_of(recording)))


def edge_mutant(recording: Recording, mutation: Mutation, cause: Cause | None) -> Mutant:
    """One of these, in words."""
    return Mutant(
        kind=mutation.kind.value,
        place=mutation.place,
        what=str(mutation),
        killed_by="" if cause is None else f"the detector: {_words(cause, recording)}",
        reason="" if cause is not None else _reason(mutation),
    )


def disagreement_with_advice(recording: Recording, edges: Sequence[Judged]) -> str:
    """Where dropping a wait makes no race though the advice calls it needed, or the other way round."""
    needed = {index for advice in recording.seen.advice for index in advice.needed_at}
    for mutation, cause in edges:
        if mutation.kind is Kind.WAIT_DROPPED and (cause is not None) != (mutation.index in needed):
            says = "needed" if mutation.index in needed else "not needed"
            return f"{mutation}: the advice says {says}, the detector does not"
    return ""


def witness_of(recording: Recording, mutation: Mutation) -> Witness:
    """A schedule that the mutant allows and the gradient does not, and what it changes."""
    program = recording.program
    assert program is not None, "record with keep=True"
    records = mutated(program.records, mutation)
    finding = _findings(records, recording)[0]
    return Prover(replace(program, records=tuple(records))).prove(finding)


def disagreement_with_program(
    recording: Recording, scenario: Scenario, mutation: Mutation, batches: Batches | None = None
) -> str:
    """Whether a mutated program has other findings than the mutated trace; what, if so.

    ``batches`` are those of the recording.
    """
    findings = _findings(mutated(recording.seen.records, mutation), recording)
    expected = {finding.id for finding in findings}
    model = make_model(scenario)
    with _changed_program(model, recording, mutation):
        seen = record(model, make_batches() if batches is None else batches).seen
    found = {finding.id for finding in seen.findings}
    if found == expected:
        return ""
    return f"{mutation}: the program has the findings {sorted(found)}, the trace {sorted(expected)}"


def sample(mutations: Sequence[Mutation], count: int) -> list[Mutation]:
    """Some mutations, one of each kind at each call site and in each part before a second of any.

    The same every time. None of those at the very start, when the wrong streams may not exist yet.
    """
    tried = [mutation for mutation in mutations if mutation.call in CALLS and mutation.occurrence > 0]
    groups: dict[tuple[object, ...], list[Mutation]] = {}
    for mutation in tried:
        groups.setdefault((mutation.kind, mutation.site.line, mutation.place), []).append(mutation)
    firsts = [group[len(group) // 2] for group in groups.values()]
    if count <= len(firsts):
        return [firsts[i * len(firsts) // count] for i in range(count)]
    rest = [mutation for mutation in tried if mutation not in firsts]
    return [*firsts, *rest[: count - len(firsts)]]


def _findings(records: Sequence[Record], recording: Recording) -> list[Finding]:
    detector = Detector()
    for each in records:
        detector.feed(each)
    return detector.findings(recording.seen.info)


def _changed_program(
    model: LongContextGradientModel, recording: Recording, mutation: Mutation
) -> AbstractContextManager[ChangedEdge]:
    """What makes the running program the mutant."""
    where = f"{mutation.site.file}:{mutation.site.line}"
    call = mutation.call
    match mutation.kind:
        case Kind.WAIT_DROPPED | Kind.RECORD_DROPPED:
            return drop_edge(where, call=call, occurrence=mutation.occurrence)
        case Kind.EARLY:
            return weaken_edge(where, call=call, occurrence=mutation.occurrence, earlier=mutation.earlier)
        case _:
            assert mutation.lane is not None
            role = roles_in(recording.seen.records, recording.seen.lanes)[mutation.lane]
            return weaken_edge(
                where, call=call, occurrence=mutation.occurrence, stream=lambda: _stream(model, role)
            )


def _stream(model: LongContextGradientModel, role: str) -> torch.cuda.Stream:
    lanes = model._lanes
    assert lanes is not None, "a wait or a recording is made by lanes"
    by_role = {MAIN: lanes.main, HOST_TO_DEVICE: lanes.host_to_device, DEVICE_TO_HOST: lanes.device_to_host}
    return by_role[role].stream


def _is_ours(site: Site) -> bool:
    return "/crosscurrent/gradient/" in site.file.replace("\\", "/")


def _words(cause: Cause, recording: Recording) -> str:
    (finding,) = findings_of([cause], recording.seen.info)
    return f"{finding.kind.value} [{finding.id}]: {finding.first}; {finding.second}"


def _reason(mutation: Mutation) -> str:
    if mutation.kind in (Kind.WAIT_DROPPED, Kind.RECORD_DROPPED):
        return "redundant: nothing in the trace needs it, so that the gradient should drop it"
    return "the weakened edge still orders all that it is there for"
