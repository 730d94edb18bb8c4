"""The timeline of the whole run, as data for the page's script."""

from __future__ import annotations

import json
from typing import Final

from crosscurrent.report.document import Report
from crosscurrent.report.html.markup import Markup, element
from crosscurrent.report.slices import Slices, slices_of, thinned
from crosscurrent.report.source import place_of, time_of

MAX_SLICES: Final = 20_000
"""What a phone still draws at once."""

MAX_ARROWS: Final = 4_000


def timeline(report: Report) -> Markup | None:
    """The section with the timeline; None for a report without a trace."""
    if not report.records:
        return None
    everything = slices_of(report.records, report.info, report.rates, report.findings)
    if not everything.slices:
        return None
    drawn = thinned(everything, max_slices=MAX_SLICES, max_arrows=MAX_ARROWS)
    notes = [
        f"{everything.num_ops:,} operations and host waits, {everything.num_arrows:,} sync edges; "
        f"{time_of(everything.makespan)} on the model clock ({report.rates})."
    ]
    thinning = _thinning(everything, drawn)
    return element(
        "section",
        element("h2", "Timeline"),
        element(
            "p",
            "When everything would run, by a model of its cost. This is no measurement. "
            "Drag to move; pinch, scroll with Ctrl, or use the buttons to zoom; tap a slice to read it.",
            class_="muted",
        ),
        element("p", element("strong", "Thinned: "), thinning, class_="thinned") if thinning else None,
        element(
            "div",
            element(
                "div",
                _button("in", "+", "Zoom in"),
                _button("out", "\u2212", "Zoom out"),
                _button("fit", "Fit", "Show everything"),
                _button("axis", "Issue order", "Show in the order of issue, every operation equally wide"),
                class_="tools",
            ),
            element("canvas", id="timeline", tabindex=0, role="img", aria_label="Timeline of all lanes"),
            element("p", "Nothing chosen.", id="chosen", class_="chosen", aria_live="polite"),
            element(
                "noscript", element("p", "The timeline needs JavaScript; all else on this page does not.")
            ),
            class_="timeline",
        ),
        element("p", notes, class_="muted small"),
        element("script", _data(drawn, report), type="application/json", id="timeline-data"),
        id="timeline-section",
    )


def _thinning(everything: Slices, drawn: Slices) -> str:
    parts = []
    if len(drawn.slices) < len(everything.slices):
        parts.append(
            f"{everything.num_ops:,} operations are drawn as {len(drawn.slices):,} slices; "
            "neighbours on a lane are joined, and a joined slice says how many it stands for"
        )
    if len(drawn.arrows) < len(everything.arrows):
        parts.append(f"{len(drawn.arrows):,} of {everything.num_arrows:,} sync edges are drawn")
    return "; ".join(parts) + ". Racing operations are always drawn on their own." if parts else ""


def _button(action: str, label: str, title: str) -> Markup:
    return element("button", label, type="button", data_do=action, title=title, aria_label=title)


def _data(drawn: Slices, report: Report) -> Markup:
    """Lists of numbers, with each name and place written once."""
    names: dict[str, int] = {}
    places: dict[int, int] = {}
    lanes: dict[int, int] = {}
    for lane in sorted({piece.lane for piece in drawn.slices}):
        lanes[lane] = len(lanes)
    slices = [
        [
            lanes[piece.lane],
            piece.start,
            piece.stop,
            piece.record,
            piece.last,
            names.setdefault(piece.name, len(names)),
            places.setdefault(piece.site, len(places)),
            int(piece.wait),
        ]
        for piece in drawn.slices
    ]
    arrows = [
        [
            arrow.source,
            arrow.target,
            names.setdefault(arrow.via, len(names)),
            places.setdefault(arrow.site, len(places)),
            arrow.start,
            arrow.stop,
            arrow.before + 1,
            arrow.after,
        ]
        for arrow in drawn.arrows
    ]
    titles = {lane.index: lane.name for lane in report.info.lanes}
    content = {
        "lanes": [titles.get(lane, f"lane {lane}") for lane in lanes],
        "names": list(names),
        "places": [_place(report, site) for site in places],
        "slices": slices,
        "arrows": arrows,
        "races": [list(race) for race in drawn.races],
    }
    # Inside a script element, only "<" can end the element or open a comment.
    return Markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))


def _place(report: Report, site: int) -> str:
    found = report.info.site_at(site)
    return "" if found is None else f"{place_of(found)} ({found.function})"
