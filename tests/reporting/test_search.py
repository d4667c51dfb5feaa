"""What a person sees of a search: `gptexp status`, the answers, what to run next, the chart and the decisions."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pages import leave_out_pictures, needs_chromium, violations
from searched import ONE, SIZES, Search, fit_one_form, searches_in

from gptexp import tune
from gptexp.reporting.page.report import Report, build_report
from gptexp.reporting.page.write import write_report
from gptexp.reporting.words.answers import table_of_answers
from gptexp.reporting.words.decisions import table_of_decisions
from gptexp.status import main
from gptexp.storage import sweep_record

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Search]]:
    with pytest.MonkeyPatch.context() as patch:
        fit_one_form(patch)
        leave_out_pictures(patch)
        yield searches_in(tmp_path_factory.mktemp("searches"), patch)


@pytest.fixture(scope="module")
def done(searched: Callable[..., Search]) -> Path:
    """A search at one batch size that has found its optimum, with its report."""
    search = searched()
    assert search.run(ONE) == 0
    write_report(search.folder)
    return search.folder


@pytest.fixture(scope="module")
def spent(searched: Callable[..., Search]) -> Path:
    """A search at three batch sizes whose budget was too small."""
    search = searched(sigma=0.05)
    assert search.run(SIZES, "hydra.sweeper.budget=7runs") == 0
    return search.folder


def status_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main([str(folder), "--json"])
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


@pytest.mark.e2e
def test_status_of_a_search_has_the_widths_and_the_optimum_of_its_report(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = status_of(done, capsys)["search"]
    [place], [answer] = found["batch_sizes"], build_report(done).answers
    assert (place["total_batch_size"], place["stopped"]) == (4096, answer.stopped)
    assert place["runs"] == found["spent"]["runs"] == len(status_of(done, capsys)["cells"])
    assert answer.low is not None
    assert answer.high is not None
    assert place["widths"][-1] == pytest.approx(math.log2(answer.high / answer.low))
    assert place["widths"][-1] < place["widths"][0]
    assert place["optimum"]["lr"] == pytest.approx(answer.lr)
    main([str(done)])
    lines = capsys.readouterr().out.splitlines()
    assert any(f"{answer.lr:.3g}" in line and "4,096" in line for line in lines)


def test_status_of_a_search_without_a_report_has_the_optima_of_its_newest_decision(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(done, tmp_path / "copied")
    (copied / "report.json").unlink()
    [answer], log = build_report(done).answers, copied / "tune.jsonl"
    events = log.read_text().splitlines()

    def optimum(events: list[str]) -> Any:
        log.write_text("\n".join(events) + "\n")
        return status_of(copied, capsys)["search"]["batch_sizes"][0]["optimum"]

    found = optimum(events)
    assert (found["lr"], found["low"], found["high"]) == pytest.approx((answer.lr, answer.low, answer.high))
    ends = [number for number, event in enumerate(events) if json.loads(event)["event"] == "end"]
    assert optimum(events[: ends[-1] + 1]) is None  # a run has ended since, and nothing was decided


def test_a_report_that_lacks_a_run_is_not_used(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = shutil.copytree(done, tmp_path / "copied")
    events = [json.loads(event) | {"optima": []} for event in (copied / "tune.jsonl").read_text().splitlines()]
    (copied / "tune.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    report = json.loads((copied / "report.json").read_text())
    (copied / "report.json").write_text(json.dumps({**report, "runs": report["runs"][:-1]}))
    [place] = status_of(copied, capsys)["search"]["batch_sizes"]
    assert place["optimum"] is None
    assert place["lowest_lr"] is not None
    for text in ("[]", "{", '{"runs": 3}'):
        (copied / "report.json").write_text(text)
        assert status_of(copied, capsys)["search"]["batch_sizes"][0]["optimum"] is None


@pytest.mark.e2e
def test_status_of_a_killed_search_has_its_budget_and_a_time_within_it(
    searched: Callable[..., Search], capsys: pytest.CaptureFixture[str]
) -> None:
    search = searched()  # a run takes 60 s
    assert search.run(SIZES, "hydra.sweeper.budget=5m", killed_after=2) is None
    capsys.readouterr()
    found = status_of(search.folder, capsys)
    assert found["search"]["budget"] == {"unit": "seconds", "amount": 300.0}
    assert found["search"]["spent"]["seconds"] == pytest.approx(120, abs=1)
    assert 0 < found["ready_in_s"] <= 190
    assert {place["widths"] == [] for place in found["search"]["batch_sizes"]} == {True}


@pytest.mark.e2e
def test_a_search_whose_budget_is_spent_goes_on_with_a_larger_one(spent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, record = build_report(spent), sweep_record.load(spent)
    assert record is not None
    assert record.commands[-1][:3] == ["tune", "--budget", "7runs"]
    assert {answer.stopped for answer in report.answers} == {"budget"}
    [proposal] = report.further
    stood_for: list[list[str]] = []
    monkeypatch.setattr("gptexp.tune.train", stood_for.append)
    tune.main(proposal.command.split()[2:])
    tune.main(record.commands[-1][1:])
    more, before = map(set, stood_for)
    place = f"'hydra.sweep.dir=\"{spent}\"'"  # it is not in outputs/
    assert more - before == {f"hydra.sweeper.budget={7 + proposal.runs}runs", place}
    assert all(f"--budget {7 + proposal.runs}runs" in answer.wanted for answer in report.answers)


@pytest.mark.e2e
def test_a_stranger_reads_why_a_search_stopped(done: Path, spent: Path) -> None:
    for folder in (done, spent):
        report = build_report(folder)
        [texts] = [texts for title, texts in table_of_answers(report.answers) if title == "stopped"]
        assert all(len(text.split()) > 1 for text in texts)


def decisions_of(report: Report) -> dict[str, Any]:
    assert report.search is not None
    return {title.partition(" (")[0]: texts for title, texts in table_of_decisions(report.search)}


def test_the_chart_and_the_table_of_decisions_agree(done: Path) -> None:
    report = build_report(done)
    table, [chart] = decisions_of(report), [figure for figure in report.figures if figure.key == "narrowing"]
    points = chart.spec["layer"][0]["data"]["values"]
    assert [f"{point['width']:.2g}" for point in points] == [text for text in table["after"] if text]
    assert points[-1]["number"] == len(table["run"])
    [goal] = [layer["data"]["values"] for layer in chart.spec["layer"] if layer["mark"]["type"] == "rule"]
    assert goal[0]["width"] == 0.5
    curves = next(figure for figure in report.figures if figure.key == "curves").spec["layer"]
    assert {"area", "rule"} <= {layer["mark"]["type"] for layer in curves}  # the band, and the interval of the optimum
    assert (done / "pictures" / "narrowing.png").exists()


@pytest.mark.e2e
@needs_chromium
def test_the_page_of_a_search_is_drawn_and_its_decisions_open(browser: "Browser", done: Path) -> None:
    page = browser.new_page()
    page.goto((done / "report.html").as_uri())
    page.evaluate("drawn.then(() => null)")
    assert page.locator("#figure-narrowing .plot svg.marks").count() == 1
    assert not page.locator("#decisions table").is_visible()
    page.locator("#decisions > summary").click()
    assert page.locator("#decisions tbody tr").count() == len(decisions_of(build_report(done))["run"])
    assert violations(page) == []
    page.close()
