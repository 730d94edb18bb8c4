"""The page: verdict first, then what to do about it, then everything else.

Text from the program under test (names, paths, messages) is escaped by construction, see ``markup``;
and a content security policy lets the browser run only the page's own script and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path

from crosscurrent.files import in_one_act
from crosscurrent.report.document import Report, Verdict
from crosscurrent.report.html.findings import findings, prose
from crosscurrent.report.html.markup import Child, Markup, element
from crosscurrent.report.html.tables import advice, environment, host_waits, overlap, sections, unknown
from crosscurrent.report.html.timeline import timeline
from crosscurrent.report.missing import num_missing
from crosscurrent.report.source import time_of


def write(report: Report, path: Path) -> None:
    """Write the page in one act: a reader never finds half of it."""
    with in_one_act(path) as partial:
        # Names of files that are no text (undecodable bytes) must not cost the report.
        partial.write_text(render(report), encoding="utf-8", errors="backslashreplace")


def render(report: Report) -> str:
    """The page as text."""
    style, script = _asset("style.css"), _asset("timeline.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{report.headline} \u00b7 {report.title}"),
        element("style", style),
    )
    body = element(
        "body",
        element(
            "main",
            _verdict(report),
            [] if report.verdict is Verdict.MEASURED else _races(report),
            overlap(report),
            timeline(report),
            environment(report),
            _limits(report),
        ),
        element("script", script),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _races(report: Report) -> list[Child]:
    said: list[Child] = [findings(report), sections(report)]
    # What ran many times has tables of its own; that it says nothing of waits does not mean there were none.
    if report.host_waits or not report.sections:
        said.append(host_waits(report))
    if report.advice is not None or not report.sections:
        said.append(advice(report))
    return [*said, unknown(report)]


def _verdict(report: Report) -> Markup:
    bad = bool(report.findings) or report.verdict in (Verdict.RACES, Verdict.FAILED)
    moods = {Verdict.RACE_FREE: "good", Verdict.HELD: "good", Verdict.MEASURED: "measured"}
    mood = "bad" if bad else moods.get(report.verdict, "unsure")
    mark = {"bad": "\u2717", "good": "\u2713", "unsure": "?", "measured": "%"}[mood]
    return element(
        "header",
        element("p", "crosscurrent", element("span", report.title, class_="what"), class_="eyebrow"),
        element(
            "div",
            element("span", mark, class_="mark", aria_hidden="true"),
            element(
                "div",
                element("h1", report.headline),
                [element("p", prose(line)) for line in report.sentence.splitlines()],
            ),
            class_=f"verdict {mood}",
        ),
        _facts(report),
    )


def _facts(report: Report) -> Markup:
    facts = _measured(report) if report.verdict is Verdict.MEASURED else _counted(report)
    facts.append(("simulated" if report.simulated else "real", "CUDA"))
    return element(
        "ul", [element("li", element("strong", value), " ", name) for value, name in facts], class_="facts"
    )


def _measured(report: Report) -> list[tuple[str, str]]:
    found = report.overlap
    if found is None:
        return []
    return [
        (time_of(found.total), "in all"),
        (time_of(found.exposed), "of transfers exposed"),
        (time_of(found.blocked), "host blocked"),
    ]


def _counted(report: Report) -> list[tuple[str, str]]:
    waits = sum(wait.times for wait in report.blocking)
    facts = []
    if report.findings or not report.sections:
        missing = num_missing(report.findings)
        facts.append((f"{missing:,}", "missing edge" + "s" * (missing != 1)))
    if report.host_waits or not report.sections:
        facts.append((f"{waits:,}", "host wait" + "s" * (waits != 1)))
    if report.info.lanes:
        facts.append((f"{len(report.info.lanes)}", "lanes"))
    if report.unknown:
        facts.append((f"{sum(item.times for item in report.unknown):,}", "calls not understood"))
    return facts


def _limits(report: Report) -> Markup:
    text = (
        "The verdict is about the run that was watched: its inputs, its branches, the calls it made. For "
        "that run it is complete: whatever the sync edges leave open was considered, however unlikely."
    )
    return element(
        "footer",
        None if report.verdict is Verdict.MEASURED else element("p", text),
        element("p", "To repeat: ", element("code", report.command)) if report.command else None,
    )


def _asset(name: str) -> Markup:
    return Markup(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
