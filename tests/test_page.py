"""The report's page in a real browser: everything drawn, nothing complained about, nothing fetched."""

from pathlib import Path

import pytest
from pages import needs_chromium, violations
from playwright.sync_api import Browser
from sweeps import write_sweep

from gptexp.report import write_report

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At a constant learning rate, so that every kind of picture is there."""
    root = write_sweep(
        tmp_path_factory.mktemp("page") / "sweep", batches=(2048, 4096, 8192, 16384), schedule="constant"
    )
    write_report(root)
    return root / "report.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_every_picture_is_drawn_and_nothing_is_complained_about(browser: Browser, report: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844})
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    pictures = page.evaluate("drawn.then(views => views.length)")
    assert pictures == len(list((report.parent / "pictures").glob("*.png"))) == 11
    assert said == []
    assert asked == [report.as_uri()]
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


def test_the_accessibility_check_can_fail(browser: Browser) -> None:
    page = browser.new_page()
    page.set_content("<html><body><img src='data:,'></body></html>")
    assert any(line.startswith("image-alt") for line in violations(page))
    page.close()


def test_a_point_says_what_it_is(browser: Browser, report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    page.evaluate("drawn.then(views => views.length)")
    page.locator("#plot-curves .mark-symbol path").first.hover()
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert "loss" in page.inner_text("#vg-tooltip-element")
    page.close()


def test_no_name_of_a_run_is_run(browser: Browser, tmp_path: Path) -> None:
    """Neither in the page nor in a tooltip, which is HTML."""
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
