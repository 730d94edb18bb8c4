"""The tables of the page: host waits, advice, what was not understood, sections, the environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crosscurrent.report.document import Need, Report, Section
from crosscurrent.report.html.findings import prose
from crosscurrent.report.html.markup import Child, Markup, element
from crosscurrent.report.source import place_of
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
    blocking = [wait for wait in report.host_waits if wait.record.kind != "query"]
    queries = sum(wait.times for wait in report.host_waits if wait.record.kind == "query")
    names = {lane.index: lane.name for lane in report.info.lanes}
    rows = [
        [
            wait.record.kind,
            ", ".join(names.get(lane, f"lane {lane}") for lane in wait.lanes) or "nothing to order",
            f"{wait.times:,}",
            _place(_site(report, wait.record.site)),
        ]
        for wait in sorted(blocking, key=lambda wait: -wait.times)
    ]
    return element(
        "section",
        element("h2", "Host waits"),
        element("p", "While the host waits, it issues nothing: streams run dry.", class_="muted")
        if rows
        else None,
        table(("Call", "Waits for", "Times", "Where"), rows, numeric=(2,))
        if rows
        else element("p", "The host waited nowhere."),
        element(
            "p", f"Queries that found work done, which orders it as well: {queries:,}.", class_="muted small"
        )
        if queries
        else None,
    )


def advice(report: Report) -> Markup:
    """Which sync calls are needed, and which are not."""
    if not report.advice_given:
        body = element("p", "Not asked for in this run.", class_="muted")
    elif not report.advice:
        body = element("p", "There is no sync call to advise on.")
    else:
        ordered = sorted(report.advice, key=lambda item: item.need is Need.NECESSARY)
        rows = [
            [
                element(
                    "span",
                    item.need.value,
                    class_="tag strong" if item.need is Need.NECESSARY else "tag unsure",
                ),
                element("code", item.call),
                f"{item.times:,}",
                _place(item.site),
                prose(item.text),
            ]
            for item in ordered
        ]
        body = table(("Verdict", "Call", "Times", "Where", "Why"), rows, numeric=(2,))
    return element("section", element("h2", "Sync calls"), body)


def unknown(report: Report) -> Markup | None:
    """What could not be understood: the verdict does not cover it."""
    if not report.unknown:
        return None
    rows = [
        [
            element("code", item.record.op),
            item.record.reason,
            f"{item.times:,}",
            _place(_site(report, item.record.site)),
        ]
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


def _site(report: Report, site: int) -> Site:
    return report.info.sites[site] if 0 <= site < len(report.info.sites) else Site("", 0, "")


def _place(site: Site) -> Markup:
    return element("span", element("code", place_of(site)), f" {site.function}" if site.function else None)
