"""The tables of the page: host waits, advice, what was not understood, sections, the environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crosscurrent.races.advice import Advice, Verdict
from crosscurrent.report.document import Report, Section
from crosscurrent.report.html.findings import prose, sentence
from crosscurrent.report.html.markup import Child, Markup, element
from crosscurrent.report.source import place_of
from crosscurrent.report.wording import reasons, set_up_note, wait_kind, wait_notes, waits_for, who_waits
from crosscurrent.trace.records import Site


def table(columns: Sequence[str], rows: Iterable[Sequence[Child]], *, numeric: Sequence[int] = ()) -> Markup:
    """A table that a phone shows as a list of small cards."""
    return element(
        "table",
        element("thead", element("tr", [element("th", name, scope="col") for name in columns])),
        element(
            "tbody",
            [
                element(
                    "tr",
                    [
                        element(
                            "td",
                            element("div", cell),
                            data_label=name,
                            class_="number" if i in numeric else None,
                        )
                        for i, (name, cell) in enumerate(zip(columns, row, strict=True))
                    ],
                )
                for row in rows
            ],
        ),
    )


def sections(report: Report) -> list[Markup]:
    """The tables that the command brought along."""
    return [_section(section) for section in report.sections]


def _section(section: Section) -> Markup:
    marks = {True: "\u2713 ", False: "\u2717 ", None: ""}
    good = section.good or (None,) * len(section.rows)
    rows = [
        [
            element("span", marks[mood], row[0], class_={True: "good", False: "bad", None: None}[mood]),
            *row[1:],
        ]
        for row, mood in zip(section.rows, good, strict=True)
    ]
    return element(
        "section",
        element("h2", section.title),
        element("p", prose(section.text)) if section.text else None,
        table(section.columns, rows) if rows else None,
    )


def host_waits(report: Report) -> Markup:
    """Where the host stood still."""
    rows = [
        [
            wait_kind(wait),
            waits_for(wait),
            f"{wait.times:,}",
            _place(wait.site),
        ]
        for wait in sorted(report.blocking, key=lambda wait: -wait.times)
    ]
    text = (
        "While the host waits, it issues nothing, and streams run dry."
        if rows
        else "The host waited nowhere."
    )
    return element(
        "section",
        element("h2", "Host waits"),
        element("p", text, class_="muted" if rows else None),
        table(("Call", "Waits for", "Times", "Where"), rows, numeric=(2,)) if rows else None,
        *(element("p", prose(note), class_="muted small") for note in wait_notes(report.blocking)),
        element("p", set_up_note(report.set_up), class_="muted small") if report.set_up else None,
    )


def advice(report: Report) -> Markup:
    """Which sync calls are needed, and which are not."""
    if report.advice is None:
        body = element("p", "Which of them are needed was not asked in this run.", class_="muted")
    elif not report.advice:
        body = element("p", "There is no sync call to advise on.")
    else:
        ordered = sorted(report.advice, key=lambda item: item.verdict is Verdict.NECESSARY)
        rows = [
            [
                element("span", item.verdict.value, class_=_tag(item.verdict)),
                [element("code", item.kind), element("div", who_waits(item), class_="muted small")],
                f"{item.count:,}",
                _place(item.site),
                [[element("div", prose(line)) for line in reasons(item)], _instead(item)],
            ]
            for item in ordered
        ]
        body = table(("Verdict", "Call", "Times", "Where", "Why"), rows, numeric=(2,))
    return element("section", element("h2", "Sync calls"), body)


def _instead(item: Advice) -> Markup | None:
    if not item.replacement:
        return None
    return element(
        "details",
        element("summary", "What to do instead"),
        element("div", prose(sentence(item.replacement))),
    )


def _tag(verdict: Verdict) -> str:
    return "tag strong" if verdict is Verdict.NECESSARY else "tag unsure"


def unknown(report: Report) -> Markup | None:
    """What could not be understood: the verdict does not cover it."""
    if not report.unknown:
        return None
    rows = [
        [element("code", item.op), item.reason, f"{item.times:,}", _place(item.site)]
        for item in report.unknown
    ]
    return element(
        "section",
        element("h2", "Not understood"),
        element("p", "The verdict does not cover these calls."),
        table(("Call", "Why", "Times", "Where"), rows, numeric=(2,)),
    )


def overlap(report: Report) -> Markup | None:
    """How much of the transfers ran behind kernels."""
    found = report.overlap
    if found is None:
        return None
    return element(
        "section",
        element("h2", "Overlap" + (" (model)" if found.modelled else "")),
        element("ul", [element("li", sentence) for sentence in found.sentences]),
        [
            (element("h3", title), table(columns, rows, numeric=range(1, len(columns))))
            for title, columns, rows in found.tables()
            if rows
        ],
        element("details", element("summary", "Definitions"), element("p", found.definitions)),
    )


def environment(report: Report) -> Markup | None:
    """Versions and machine."""
    if not report.environment:
        return None
    return element(
        "section",
        element("h2", "Environment"),
        element(
            "dl",
            [(element("dt", name), element("dd", value)) for name, value in report.environment],
            class_="environment",
        ),
    )


def _place(site: Site) -> Markup:
    return element("div", element("code", place_of(site)), _function(site))


def _function(site: Site) -> Markup | None:
    return element("div", site.function, class_="muted small") if site.function else None
