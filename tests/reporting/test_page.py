"""The page of a report in Chromium: it draws every picture, logs no error and sends no further request."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pages import needs_chromium, violations
from sweeps import write_sweep

from gptexp.reporting.write import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report at a constant learning rate, which has every kind of picture."""
    root = write_sweep(
        tmp_path_factory.mktemp("page") / "sweep", batches=(2048, 4096, 8192, 16384), schedule="constant"
    )
    write_report(root)
    return root / "report.html"


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.e2e)])
def test_every_picture_is_drawn_without_an_error_or_an_accessibility_violation(
    browser: "Browser", report: Path, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844})
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    pictures = page.evaluate("drawn.then(views => views.length)")
    assert pictures == len(list((report.parent / "pictures").glob("*.png"))) == 11
    assert errors == []
    assert requests == [report.as_uri()]
    boxes = page.evaluate("""[...document.querySelectorAll(".plot")].map(plot => {
        const marks = plot.querySelectorAll(".mark-symbol path, .mark-rect path, .mark-line path, .mark-text text");
        const svg = plot.querySelector("svg.marks").getBoundingClientRect();
        return [marks.length, svg.width, svg.height];
    })""")
    assert all(marks > 5 and 0.7 * min(width, 600) < drawn <= width and high > 200 for marks, drawn, high in boxes), (
        boxes
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # no sideways scrolling
    assert violations(page) == []
    page.close()


def test_the_accessibility_check_finds_a_violation(browser: "Browser") -> None:
    page = browser.new_page()
    page.set_content("<html><body><img src='data:,'></body></html>")
    assert any(line.startswith("image-alt") for line in violations(page))
    page.close()


def test_a_point_has_a_tooltip(browser: "Browser", report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    page.evaluate("drawn.then(views => views.length)")
    page.locator("#plot-curves .mark-symbol path").first.hover(force=True)  # another seed may lie above it
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert "loss" in page.inner_text("#vg-tooltip-element")
    page.close()


@pytest.mark.e2e
def test_a_run_name_is_not_executed_as_html(browser: "Browser", tmp_path: Path) -> None:
    """Neither in the page nor in a tooltip, which Vega writes as HTML."""
    root = write_sweep(tmp_path / "<img src=x onerror=window.owned=1>")
    for path in root.glob("lr=0.02*"):
        path.rename(root / f"<img src=x onerror=window.owned=1>{path.name}")
    write_report(root)
    page = browser.new_page()
    page.goto((root / "report.html").as_uri())
    page.evaluate("drawn.then(views => views.length)")
    for number in range(page.locator("#plot-curves .mark-symbol path").count()):
        page.locator("#plot-curves .mark-symbol path").nth(number).hover(force=True)
    page.wait_for_timeout(300)
    assert page.evaluate("window.owned === undefined")
    assert page.locator("img").count() == 0
    page.close()
