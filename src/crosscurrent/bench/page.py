"""The measured tables for the documentation, made from the JSON document alone.

What is between the two marks in a page is replaced, and nothing else:

    text = with_tables(text, document)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BEGIN = "<!-- measured: begin -->"
END = "<!-- measured: end -->"

Row = tuple[str, ...]


def with_tables(page: str, document: dict[str, Any]) -> str:
    """The page with the tables of a document between its marks.

    Raises:
        ValueError: the page does not have both marks, once each and in order, or the document is none.
    """
    require_marks(page)
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(document)}\n{END}{rest.split(END)[1]}"


def require_marks(page: str) -> None:
    """Raise ValueError for a page without the two marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs one line {BEGIN!r} and below it one line {END!r}")


def tables(document: dict[str, Any]) -> str:
    """The tables in Markdown."""
    require_document(document)
    results: list[dict[str, Any]] = document["results"]
    devices = ", ".join(sorted({result["device"] for result in results}))
    command = " ".join(["crosscurrent bench", *(result["name"] for result in results)])
    parts = [
        f"Measured by `{command}` on: {devices}, PyTorch {document['torch']}. Verdict of the comparison of "
        f"losses and gradients, off against on: {document['verdict']}.",
        _markdown(TIME_COLUMNS, time_rows(document)),
        _markdown(OVERLAP_COLUMNS, overlap_rows(document)),
        _markdown(ROOFLINE_COLUMNS, roofline_rows(document)),
        "\n".join(f"- `{result['name']}`: {result['description']}." for result in results),
        "\n".join(f"- `{name}` could not be measured: {why}" for name, why in document["errors"].items()),
        "\n".join(document["notes"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def require_document(document: object) -> None:
    """Raise ValueError for what is no document of ``crosscurrent bench``, or of another version."""
    found = document if isinstance(document, dict) else {}
    if found.get("format") != "crosscurrent bench" or found.get("version") != 1:
        raise ValueError(
            "this is no document of `crosscurrent bench --json`, version 1, but "
            f"{found.get('format')!r}, version {found.get('version')!r}"
        )


TIME_COLUMNS: Row = ("", "flag", "forward", "backward", "step", "off / on", "of the roofline", "bits")


def time_rows(document: dict[str, Any]) -> list[Row]:
    """Times, the ratio, the share of the roofline and the comparison."""
    rows: list[Row] = []
    for result, flag, measured in _flags(document):
        last = flag == "on"
        rows.append(
            (
                result["name"],
                flag,
                _seconds(measured["forward_seconds"]),
                _seconds(measured["backward_seconds"]),
                _seconds(measured["step_seconds"]),
                f"{result['ratio']['step']:.2f}" if last else "",
                f"{measured['roofline_share']:.0%}",
                ("equal" if result["comparison"]["equal"] else "DIFFERENT") if last else "",
            )
        )
    return rows


OVERLAP_COLUMNS: Row = (
    "",
    "flag",
    "hidden",
    "transfers",
    "kernels",
    "host waits",
    "host time",
    "device peak",
    "pinned peak",
)


def overlap_rows(document: dict[str, Any]) -> list[Row]:
    """What the profiler saw, and memory."""
    return [
        (
            result["name"],
            flag,
            "-" if (share := measured["overlap"]["hidden_share"]) is None else f"{share:.1%}",
            _seconds(measured["overlap"]["transfer"] / 1e9),
            _seconds(measured["overlap"]["kernel"] / 1e9),
            f"{measured['overlap']['host_waits']}",
            _seconds(measured["host_forward_seconds"] + measured["host_backward_seconds"]),
            _bytes(measured["peak_device_bytes"]),
            _bytes(measured["peak_pinned_bytes"]) + ("" if measured["pinned_is_measured"] else " (planned)"),
        )
        for result, flag, measured in _flags(document)
    ]


ROOFLINE_COLUMNS: Row = (
    "",
    "pass",
    "operations",
    "bytes in",
    "bytes out",
    "operations need",
    "bytes need",
    "bound",
)


def roofline_rows(document: dict[str, Any]) -> list[Row]:
    """What each pass has to do, and what that takes at the measured rates."""
    rows: list[Row] = []
    for result in document["results"]:
        for name in ("forward", "backward"):
            bound = result["roofline"][name]
            rows.append(
                (
                    result["name"],
                    name,
                    f"{bound['operations'] / 1e12:.3g} T",
                    _bytes(bound["bytes_to_device"]),
                    _bytes(bound["bytes_to_host"]),
                    _seconds(bound["operation_seconds"]),
                    _seconds(bound["byte_seconds"]),
                    _seconds(bound["seconds"]),
                )
            )
    return rows


def rate_lines(document: dict[str, Any]) -> list[str]:
    """The measured rates of each configuration, in a line."""
    lines = []
    for result in document["results"]:
        rates = result["rates"]
        single = [product["operations_per_second"] for product in rates["products"]]
        lines.append(
            f"{result['name']}: matrix products {rates['operations_per_second'] / 1e12:.3g} TFLOP/s "
            f"({min(single) / 1e12:.3g} to {max(single) / 1e12:.3g}); copies to the device "
            f"{rates['bytes_per_second_to_device'] / 1e9:.3g} GB/s, to the host "
            f"{rates['bytes_per_second_to_host'] / 1e9:.3g}, both at once "
            f"{rates['bytes_per_second_to_device_both_ways'] / 1e9:.3g} and "
            f"{rates['bytes_per_second_to_host_both_ways'] / 1e9:.3g}"
        )
    return lines


def _flags(document: dict[str, Any]) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    return [(result, flag, result[flag]) for result in document["results"] for flag in ("off", "on")]


def _markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def _seconds(seconds: float) -> str:
    """Milliseconds from a tenth of a second down; four significant digits."""
    return f"{seconds:.4g} s" if seconds >= 0.1 else f"{seconds * 1000:.4g} ms"


def _bytes(num: int) -> str:
    """Gigabytes, or megabytes where that would be little; decimal, as rates are."""
    return f"{num / 1e9:.3g} GB" if num >= 10**9 else f"{num / 1e6:.3g} MB"
