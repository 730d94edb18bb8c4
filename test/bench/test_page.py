"""The tables of the documentation, made from a document alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.bench import page

DOCS = Path(__file__).parents[2] / "docs" / "performance.md"


def _table(text: str, columns: page.Row) -> list[dict[str, str]]:
    """The rows of the one Markdown table with these columns."""
    lines = text.split(f"| {' | '.join(columns)} |\n", 1)[1].splitlines()
    rows = []
    for line in lines[1:]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True)))
    return rows


@pytest.mark.simulation
def test_every_figure_comes_from_the_document(measured: dict[str, Any]) -> None:
    document = copy.deepcopy(measured)
    (result,) = document["results"]
    result["off"] |= {"forward_seconds": 0.05, "backward_seconds": 0.2, "step_seconds": 0.25}
    result["on"] |= {"forward_seconds": 0.04, "backward_seconds": 0.15, "step_seconds": 0.19}
    result["on"] |= {"roofline_share": 0.634, "peak_device_bytes": 3_512_000_000, "pinned_is_measured": True}
    result["on"] |= {
        "peak_pinned_bytes": 1_500_000,
        "host_forward_seconds": 0.02,
        "host_backward_seconds": 0.1,
    }
    result["on"]["overlap"] |= {"hidden_share": 0.9612, "transfer": 57_000_000, "kernel": 145_000_000}
    result["ratio"]["step"] = 1.3158
    off, on = _table(page.tables(document), page.TIME_COLUMNS)
    assert (off["forward"], off["backward"], off["step"]) == ("50 ms", "0.2 s", "0.25 s")
    assert (on["step"], on["off / on"], on["of the roofline"], on["bits"]) == (
        "0.19 s",
        "1.32",
        "63%",
        "equal",
    )
    _, on = _table(page.tables(document), page.OVERLAP_COLUMNS)
    assert (on["hidden"], on["transfers"], on["kernels"]) == ("96.1%", "57 ms", "0.145 s")
    assert (on["host time"], on["device peak"], on["pinned peak"]) == ("0.12 s", "3.51 GB", "1.5 MB")


@pytest.mark.simulation
def test_a_wrong_answer_stands_in_the_table(measured: dict[str, Any]) -> None:
    document = copy.deepcopy(measured)
    document["results"][0]["comparison"]["equal"] = False
    assert [row["bits"] for row in _table(page.tables(document), page.TIME_COLUMNS)] == ["", "DIFFERENT"]


@pytest.mark.simulation
def test_without_transfers_there_is_no_hidden_share(measured: dict[str, Any]) -> None:
    document = copy.deepcopy(measured)
    document["results"][0]["off"]["overlap"]["hidden_share"] = None
    assert _table(page.tables(document), page.OVERLAP_COLUMNS)[0]["hidden"] == "-"


@pytest.mark.simulation
def test_what_could_not_be_measured_is_said(measured: dict[str, Any]) -> None:
    text = page.tables(measured | {"errors": {"h200-c": "OutOfMemoryError: too much"}})
    assert "`h200-c` could not be measured: OutOfMemoryError: too much" in text


@pytest.mark.simulation
def test_only_what_is_between_the_marks_changes(measured: dict[str, Any]) -> None:
    before = f"above\n{page.BEGIN}\nold | figures\n{page.END}\nbelow\n"
    once = page.with_tables(before, measured)
    assert once.startswith(f"above\n{page.BEGIN}\n")
    assert once.endswith(f"{page.END}\nbelow\n")
    assert "old | figures" not in once
    assert page.with_tables(once, measured) == once


@pytest.mark.simulation
@pytest.mark.parametrize(
    "text", ["nothing", page.BEGIN, f"{page.END} {page.BEGIN}", f"{page.BEGIN} {page.END} {page.END}"]
)
def test_a_page_without_its_marks_is_refused(text: str, measured: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the page needs one line"):
        page.with_tables(text, measured)


@pytest.mark.parametrize("document", [[], {}, {"format": "crosscurrent bench", "version": 2}])
def test_another_document_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match="this is no document"):
        page.tables(document)


def test_the_page_of_the_documentation_has_its_marks() -> None:
    page.require_marks(DOCS.read_text(encoding="utf-8"))
