"""The races layer: no schedule of the gradient's work gives other values, and the host waits nowhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from crosscurrent.races.findings import Finding
from crosscurrent.races.summary import finding_as_json
from crosscurrent.races.watch import Watch, watch
from crosscurrent.races.wording import place
from crosscurrent.suite.experiment import make_batches, make_model
from crosscurrent.suite.layer import Outcome
from crosscurrent.suite.scenario import Scenario
from crosscurrent.trace.records import Record, TraceInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The trace that was judged, to be drawn."""

    findings: tuple[Finding, ...]
    info: TraceInfo
    records: tuple[Record, ...]

    @classmethod
    def of(cls, seen: Watch) -> Seen:
        """What a watch saw."""
        return cls(findings=tuple(seen.findings), info=seen.info, records=tuple(seen.records))

    def as_json(self) -> Any:
        """The findings; the trace is too much for a document."""
        return {"findings": [finding_as_json(finding) for finding in self.findings]}


@dataclass(frozen=True)
class RaceFreedom:
    """Two batches with the flag on, both kinds of checkpoints stored with the scenario's quantizer. The
    allocation of pinned memory holds up the host, too; that it happens once is a matter of the contracts."""

    name: str = "races"
    claim: str = "with async_cpu_transfer on nothing races, and forward and backward never make the host wait"
    needs_cuda: bool = True
    needs_quiet: bool = False

    def takes(self, scenario: Scenario) -> bool:
        """All of them."""
        return True

    def check(self, scenario: Scenario) -> Outcome:
        """Watch both batches, twice: some errors only show when buffers are used again."""
        model = make_model(scenario)
        with watch(trace=True) as seen:
            for ids, targets in make_batches() * 2:
                model.zero_grad(set_to_none=True)
                model(ids, targets).backward()
        return judge(seen)


def judge(seen: Watch) -> Outcome:
    """Held if nothing races, nothing waits and everything was understood."""
    shown = Seen.of(seen) if seen.keeps_trace else None
    if findings := seen.findings:
        return Outcome.failed(f"{len(findings)} races; first: {_in_one_line(findings[0])}", shown)
    waits = Counter(
        f"{wait.kind} at {place(wait.site)}" for wait in seen.host_waits if wait.kind != "allocation"
    )
    if waits:
        return Outcome.failed(f"the host waits: {', '.join(waits)}", shown)
    if unknown := seen.unknown:
        ops = sorted({what.op for what in unknown})
        return Outcome.failed(f"not understood: {', '.join(ops)}", shown)
    return Outcome.held(f"no race on {len(seen.lanes)} lanes, no host wait", shown)


def _in_one_line(finding: Finding) -> str:
    what = f"{finding.kind.value} on {finding.memory.value} memory [{finding.id}]"
    return f"{what}: {finding.first}; {finding.second}"
