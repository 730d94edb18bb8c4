"""What a watch saw, as plain text and as a JSON document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from crosscurrent.races.findings import Finding, RacingAccess
from crosscurrent.trace.records import Site

if TYPE_CHECKING:
    from crosscurrent.races.advice import Advice
    from crosscurrent.races.watch import Watch

VERSION = 1
"""Version of the document. It changes when a field changes its meaning or goes, not when one is added."""


def as_text(watch: Watch) -> str:
    """The findings, every call that made the host wait, what could not be understood, and the advice."""
    findings = watch.findings
    if findings:
        head = "1 race" if len(findings) == 1 else f"{len(findings)} races"
    elif watch.unknown:
        head = "no race in what was understood; what was not is listed below"
    else:
        head = "no race: every schedule of this trace gives the same values"
    waits, idle = Counter(watch.host_waits), watch.idle_waits
    parts = [head, *(str(finding) for finding in findings)]
    parts += _section(
        "the host waited",
        (
            f"{wait.kind}{f' in {wait.op}' if wait.op else ''} at {_place(wait.site)}"
            + (f", for {', '.join(wait.streams)}" if wait.streams else "")
            + (", for nothing: all work was done" if idle[wait] == waits[wait] else "")
            for wait in waits.elements()
        ),
    )
    parts += _section(
        "not understood", (f"{what.op} at {_place(what.site)}: {what.reason}" for what in watch.unknown)
    )
    if watch.keeps_trace:
        parts += _section("waits", (f"{advice}".replace("\n", "\n  ") for advice in watch.advice))
    return "\n\n".join(parts)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    counted = Counter(lines)
    if not counted:
        return []
    times = (f"  {line}" + ("" if count == 1 else f" ({count} times)") for line, count in counted.items())
    return ["\n".join([f"{title}:", *times])]


def _place(site: Site) -> str:
    return f"{site.file}:{site.line}" + (f" ({site.function})" if site.function else "")


def as_json(watch: Watch, *, advice: bool) -> dict[str, Any]:
    """The document: ``version``, ``findings``, ``host_waits``, ``unknown`` and ``lanes``.

    With ``advice`` there is that, too, which needs a trace that was kept.

    - A finding has ``id``, ``kind`` (``read-after-write``, ``write-after-read``, ``write-after-write``,
      ``reuse``), ``memory`` (``device``, ``pinned``), ``count`` (racing pairs of ops), ``certain``,
      ``first`` and ``second`` (accesses), ``missing_edge``, ``fix``, ``notes``, ``lacks`` (the waits of
      its own that it takes), ``mended_by`` (the ids of the findings whose waits it takes, too),
      ``freed_at`` (a site, for ``reuse``), ``also`` (further pairs that the same edge would order),
      ``witness`` and ``schedule`` (null unless somebody looked for one).
    - An access has ``op``, ``lane``, ``index`` (its position in the trace), ``file``, ``line``,
      ``function``, ``access`` (``read``, ``write``), ``shape``, ``dtype``, ``block`` and ``bytes``
      (``[start, stop]`` in the block).
    - A host wait has ``kind``, ``op``, a site, ``streams``, ``times``, and how often it was ``idle``: the
      device had nothing left to do.
    - What was not understood has ``op``, a site, ``reason`` and ``times``.
    - An advice is about the waits of one call site: ``kind``, ``op``, a site, ``waiter``, ``waited_for``,
      ``blocks_host``, ``times``, ``verdict`` (``necessary``, ``redundant``, ``value``, ``no edge``),
      ``needed`` (how many of them are needed even if the others stay), ``protects`` (findings that would
      appear without) and
      ``replacement`` (what a call that makes the host wait could be replaced by).
    - A site is ``file``, ``line``, ``function``, and ``stack`` when whole stacks were asked for.
    """
    idle = watch.idle_waits
    document: dict[str, Any] = {
        "version": VERSION,
        "findings": [finding_as_json(finding) for finding in watch.findings],
        "host_waits": [
            {
                "kind": wait.kind,
                "op": wait.op,
                **_site(wait.site),
                "streams": list(wait.streams),
                "times": times,
                "idle": min(idle[wait], times),
            }
            for wait, times in Counter(watch.host_waits).items()
        ],
        "unknown": [
            {"op": what.op, **_site(what.site), "reason": what.reason, "times": times}
            for what, times in Counter(watch.unknown).items()
        ],
        "lanes": [lane.name for lane in watch.lanes],
    }
    if advice:
        document["advice"] = [_advice(each) for each in watch.advice]
    return document


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "kind": advice.kind,
        "op": advice.op,
        **_site(advice.site),
        "waiter": advice.waiter,
        "waited_for": advice.waited_for,
        "blocks_host": advice.blocks_host,
        "times": advice.count,
        "verdict": advice.verdict.value,
        "needed": advice.num_needed,
        "protects": [finding_as_json(finding) for finding in advice.protects],
        "replacement": advice.replacement,
    }


def finding_as_json(finding: Finding) -> dict[str, Any]:
    """One finding as plain values."""
    return {
        "id": finding.id,
        "kind": finding.kind.value,
        "memory": finding.memory.value,
        "count": finding.count,
        "certain": finding.certain,
        "first": _access(finding.first),
        "second": _access(finding.second),
        "missing_edge": finding.missing,
        "fix": finding.fix,
        "notes": list(finding.notes),
        "lacks": [str(wait) for wait in finding.lacks],
        "mended_by": list(finding.mended_by),
        "freed_at": None if finding.freed_at is None else _site(finding.freed_at),
        "also": [
            {
                "kind": pair.kind.value,
                "count": pair.count,
                "first": _access(pair.first),
                "second": _access(pair.second),
            }
            for pair in finding.also
        ],
        "witness": finding.witness,
        "schedule": finding.schedule,
    }


def _access(access: RacingAccess) -> dict[str, Any]:
    return {
        "op": access.op,
        "lane": access.lane,
        "index": access.index,
        **_site(access.site),
        "access": "write" if access.write else "read",
        "shape": list(access.shape),
        "dtype": access.dtype,
        "block": access.block,
        "bytes": [access.start, access.stop],
    }


def _site(site: Site) -> dict[str, Any]:
    where: dict[str, Any] = {"file": site.file, "line": site.line, "function": site.function}
    if site.stack:
        where["stack"] = [{"file": file, "line": line, "function": name} for file, line, name in site.stack]
    return where
