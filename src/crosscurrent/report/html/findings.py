"""The findings: what happens, what is missing, and the code of both sides."""

from __future__ import annotations

import re
from typing import Final

from crosscurrent.races.findings import Finding, RacingAccess, RacingPair
from crosscurrent.report.document import Report
from crosscurrent.report.html.markup import Child, Markup, element
from crosscurrent.report.html.picture import picture
from crosscurrent.report.source import excerpt, place_of, shape_of, short_op
from crosscurrent.report.wording import capital, readable, title
from crosscurrent.trace.records import Site

MAX_PICTURES: Final = 50
"""Findings that are drawn; those after them are told in words only."""

MAX_PAIRS: Final = 100
"""Further pairs listed for one finding."""


def findings(report: Report) -> Markup | None:
    """The section with all findings; None if there are none."""
    if not report.findings:
        return None
    shown = [
        _finding(finding, number, report, drawn=number < MAX_PICTURES)
        for number, finding in enumerate(report.findings)
    ]
    note = (
        f"Drawings are left out after the first {MAX_PICTURES} findings."
        if len(report.findings) > MAX_PICTURES
        else None
    )
    return element(
        "section",
        element("h2", "Findings"),
        element("p", note, class_="thinned") if note else None,
        shown,
    )


def _finding(finding: Finding, number: int, report: Report, *, drawn: bool) -> Markup:
    times = f"{finding.count:,} racing pairs" if finding.count > 1 else "1 racing pair"
    return element(
        "article",
        element(
            "div",
            element("h3", f"{number + 1}. {title(finding)}"),
            element(
                "p",
                element("span", finding.kind.value, class_="tag"),
                element("span", f"{finding.memory.value} memory", class_="tag"),
                element("span", times, class_="tag"),
                _proof(finding),
                element("code", finding.id, class_="id"),
                class_="tags",
            ),
        ),
        element(
            "dl",
            element("dt", "Missing"),
            element("dd", prose(sentence(finding.missing))),
            element("dt", "Fix"),
            element("dd", prose(sentence(finding.fix)), class_="fix"),
            [(element("dt", "Note"), element("dd", prose(sentence(note)))) for note in finding.notes],
            class_="explained",
        ),
        element(
            "div",
            element(
                "div",
                _side(finding.first, "First in program order"),
                _side(finding.second, "Second, not ordered after it"),
                _freed(finding),
                class_="sides",
            ),
            _drawing(finding, number, report) if drawn else None,
            class_="evidence" if drawn else "evidence alone",
        ),
        _witness(finding, report.replay),
        _also(finding.also),
        id=f"finding-{finding.id}",
        class_="finding",
    )


def _proof(finding: Finding) -> Markup | None:
    if finding.schedule is not None:
        return element("span", "witnessed", class_="tag strong")
    if finding.witness is not None:
        return element("span", "no value changed", class_="tag unsure")
    if not finding.certain:
        return element("span", "overlap undecided", class_="tag unsure")
    return None


def _side(side: RacingAccess, heading: str) -> Markup:
    does = "writes" if side.write else "reads"
    shape = shape_of(side.shape, side.dtype)
    return element(
        "div",
        element("h4", heading),
        element(
            "p",
            element("code", short_op(side.op)),
            " on ",
            element("strong", side.lane),
            f" {does} {shape or 'memory'}",
            element(
                "span", f"block {side.block}, bytes {side.start:,} to {side.stop:,}", class_="muted small"
            ),
        ),
        code(side.site),
        class_="side",
    )


def _freed(finding: Finding) -> Markup | None:
    site = finding.freed_at
    if site is None:
        return None
    shown = site in (finding.first.site, finding.second.site)
    where = element("p", element("code", place_of(site)), f" in {site.function}, shown above")
    return element("div", element("h4", "Freed in between"), where if shown else code(site), class_="side")


def code(site: Site) -> Markup:
    """The source around a call site, or only its place where there is no source."""
    lines = excerpt(site)
    stack = (
        element(
            "details",
            element("summary", "Call stack"),
            element(
                "ol", [element("li", f"{file}:{line} in {function}") for file, line, function in site.stack]
            ),
        )
        if site.stack
        else None
    )
    return element(
        "figure",
        element("figcaption", element("code", place_of(site)), f" in {site.function}"),
        element(
            "pre",
            [
                element(
                    "span",
                    element("span", f"{line.number:>5} ", class_="number"),
                    line.text or " ",
                    "\n",
                    class_="called" if line.called else None,
                )
                for line in lines
            ],
            tabindex=0,
        )
        if lines
        else element("p", "The source is not at hand.", class_="muted small"),
        stack,
        class_="code",
    )


def _drawing(finding: Finding, number: int, report: Report) -> Markup:
    return element(
        "div",
        element("h4", "The lanes around it, time downwards"),
        element("div", picture(finding, report.records, report.info), class_="scroll"),
        element(
            "p",
            element("span", "racing operations", class_="key racing"),
            element("span", "missing edge", class_="key missing"),
            element("span", "sync edge", class_="key edge"),
            element("a", "Show in the timeline", href="#timeline-section", data_finding=number, class_="jump")
            if report.records
            else None,
            class_="legend",
        ),
        class_="drawing",
    )


def _witness(finding: Finding, replay: str) -> Markup | None:
    if finding.witness is None and finding.schedule is None:
        return None
    return element(
        "div",
        element("h4", "Witness" if finding.witness is not None else "Schedule"),
        element("pre", readable(finding.witness), tabindex=0) if finding.witness is not None else None,
        element("p", "Schedule: ", element("code", f"{replay} {finding.schedule}".strip(), class_="schedule"))
        if finding.schedule is not None
        else None,
        class_="witness",
    )


def _also(pairs: tuple[RacingPair, ...]) -> Markup | None:
    if not pairs:
        return None
    listed: list[Child] = [
        element(
            "li",
            f"{pair.kind.value}: ",
            _brief(pair.first),
            " and ",
            _brief(pair.second),
            f", {pair.count:,} times" if pair.count > 1 else None,
        )
        for pair in pairs[:MAX_PAIRS]
    ]
    if len(pairs) > MAX_PAIRS:
        listed.append(element("li", f"and {len(pairs) - MAX_PAIRS:,} more that are not listed here"))
    noun = "pair" if len(pairs) == 1 else "pairs"
    return element(
        "details",
        element("summary", f"{len(pairs)} more {noun} of call sites that the same edge would order"),
        element("ul", listed),
    )


def _brief(side: RacingAccess) -> Markup:
    return element(
        "span",
        element("code", short_op(side.op)),
        f" on {side.lane} at ",
        element("code", place_of(side.site)),
    )


def sentence(text: str) -> str:
    """A clause of a finding as a sentence with short names."""
    return readable(capital(text))


def prose(text: str) -> list[Child]:
    """Words with code in backquotes."""
    return [
        element("code", part) if odd else part
        for i, part in enumerate(re.split(r"`([^`]*)`", text))
        for odd in (i % 2 == 1,)
    ]
