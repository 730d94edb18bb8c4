"""The page in a real browser: it renders, it complains of nothing, it fetches nothing, and it can be used."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.report import html

pytestmark = pytest.mark.chromium

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844, "phone": True}


def opened(browser: Any, report: Any, folder: Path, *, dark: bool = False, **screen: Any) -> Any:
    """The report, on a screen, with nothing fetched but itself and nothing complained of."""
    page = folder / "report.html"
    html.write(report, page)
    browser.look(**{**DESKTOP, **screen}, dark=dark)
    browser.open(page)
    browser.frame()
    assert browser.requests == [page.as_uri()]
    assert browser.complaints == []
    return browser


def pixels(png: bytes) -> tuple[int, int, bytes]:
    """Width, height and the rows of a PNG of 8 bits a channel, without undoing the filters of its rows."""
    width, height = struct.unpack(">II", png[16:24])
    data, at = b"", 8
    while at < len(png):
        (size,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += 12 + size
    return width, height, zlib.decompress(data)


@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["racy", "ordered"])
def test_it_renders(
    browser: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: str,
    dark: bool,
    screen: dict[str, Any],
) -> None:
    page = opened(browser, request.getfixturevalue(kind).report(), tmp_path, dark=dark, **screen)
    assert page.run("document.querySelector('h1').innerText") == ("1 race" if kind == "racy" else "No race")
    assert page.run("document.documentElement.scrollWidth") == screen["width"], "nothing sticks out sideways"
    assert page.run("document.querySelector('header').getBoundingClientRect().top") < 40
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 18, 22)" if dark else "rgb(246, 247, 249)")
    width, height, rows = pixels(page.screenshot())
    assert width == screen["width"] * (2 if screen.get("phone") else 1)
    assert height > 1000
    assert len(set(rows)) > 100, "something is drawn"


def test_no_text_sticks_out_of_the_drawing(browser: Any, racy: Any, tmp_path: Path) -> None:
    page = opened(browser, racy.report(), tmp_path)
    outside = page.run(
        """[...document.querySelectorAll('svg.lanes text')].filter((text) => {
            const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
            return box.x < 0 || box.x + box.width > view.width || box.y + box.height > view.height;
        }).map((text) => text.textContent)"""
    )
    assert outside == []


def test_attacks_in_names_do_nothing(browser: Any, racy: Any, tmp_path: Path) -> None:
    attack = "</script><script>window.broken = 1</script><img src=http://evil.example/x onerror='broken = 1'>"
    report = racy.report()
    lanes = [lane._replace(name=attack) for lane in report.info.lanes]
    bad = replace(
        report,
        title=attack,
        info=report.info._replace(lanes=lanes),
        findings=tuple(replace(finding, fix=attack, witness=attack) for finding in report.findings),
    )
    page = opened(browser, bad, tmp_path)
    assert page.run("typeof window.broken") == "undefined"
    assert page.run("document.querySelector('.eyebrow .what').textContent") == attack
    assert page.run("document.querySelectorAll('img').length") == 0


def center_of(page: Any, selector: str) -> tuple[float, float]:
    page.run(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    page.frame()
    box = page.run(
        f"(({{x, y, width, height}}) => [x, y, width, height])"
        f"(document.querySelector('{selector}').getBoundingClientRect())"
    )
    return box[0] + box[2] / 2, box[1] + box[3] / 2


def drawn(page: Any) -> str:
    """What the canvas shows now."""
    page.frame()
    picture: str = page.run("document.getElementById('timeline').toDataURL()")
    return picture


def test_the_timeline_zooms_and_comes_back(browser: Any, racy: Any, tmp_path: Path) -> None:
    page = opened(browser, racy.report(), tmp_path)
    whole = drawn(page)
    page.tap(*center_of(page, "[data-do=in]"))
    closer = drawn(page)
    assert closer != whole
    page.tap(*center_of(page, "[data-do=fit]"))
    assert drawn(page) == whole
    page.tap(*center_of(page, "[data-do=axis]"))
    assert drawn(page) != whole
    assert page.run("document.querySelector('[data-do=axis]').getAttribute('aria-pressed')") == "true"


def test_fingers_zoom_the_timeline_and_not_the_page(browser: Any, racy: Any, tmp_path: Path) -> None:
    page = opened(browser, racy.report(), tmp_path, **PHONE)
    x, y = center_of(page, "#timeline")
    whole = drawn(page)
    page.pinch(x, y, start=60, stop=180)
    closer = drawn(page)
    assert closer != whole
    assert page.run("visualViewport.scale") == 1
    page.pinch(x, y, start=180, stop=40)
    assert drawn(page) == whole


def test_a_finding_leads_to_its_slices(browser: Any, racy: Any, tmp_path: Path) -> None:
    page = opened(browser, racy.report(), tmp_path)
    assert page.run("document.getElementById('chosen').textContent") == "Nothing chosen."
    page.tap(*center_of(page, "[data-finding]"))
    page.frame()
    chosen = page.run("document.getElementById('chosen').textContent")
    assert chosen.startswith("mm on main")
    assert "train.py:16 (step)" in chosen
    assert "races: finding 1" in chosen


def test_a_tap_tells_what_a_slice_is(browser: Any, racy: Any, tmp_path: Path) -> None:
    page = opened(browser, racy.report(), tmp_path)
    x, y = center_of(page, "#timeline")
    height = page.run("document.getElementById('timeline').getBoundingClientRect().height")
    # Lanes are 54 pixels high, below an axis of 26; the third is that of the copies.
    page.tap(x, y - height / 2 + 26 + 2 * 54 + 30)
    page.frame()
    assert page.run("document.getElementById('chosen').textContent").startswith(
        "copy_ (host to device) on fetch"
    )


def test_a_trace_of_100_000_operations_opens(browser: Any, long_report: Any, tmp_path: Path) -> None:
    page = opened(browser, long_report, tmp_path, **PHONE)
    assert "Thinned" in page.run("document.body.innerText")
    # One frame of drawing all that there is; this machine may be busy, a person would not wait longer.
    took = page.run(
        """new Promise((done) => {
            const start = performance.now();
            document.querySelector('[data-do=fit]').click();
            requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
        })"""
    )
    assert took < 2000


def test_the_browser_sees_what_a_bad_page_does(browser: Any, tmp_path: Path) -> None:
    """Else the tests above could pass blindly."""
    page = tmp_path / "bad.html"
    page.write_text("<!DOCTYPE html><img src='missing.png'><script>throw new Error('on purpose')</script>")
    browser.look(**DESKTOP)
    browser.open(page)
    browser.frame()
    assert (tmp_path / "missing.png").as_uri() in browser.requests
    assert any("on purpose" in complaint for complaint in browser.complaints)
    assert any("ERR_FILE_NOT_FOUND" in complaint for complaint in browser.complaints)
