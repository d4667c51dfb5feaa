"""What a report says and draws of measured sharpness, on sweeps in which it is known."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import linregress, t
from sweeps import report_of, write_run, write_sweep

from gptexp.reporting.charts.figures import figures
from gptexp.reporting.listings.records import Run, Sharpness, find_runs, read_run
from gptexp.reporting.page.page import sections
from gptexp.reporting.page.report import build_report
from gptexp.reporting.statistics.analysis import analyse
from gptexp.reporting.words.finding import Finding
from gptexp.reporting.words.sharpness import at_best_lr, sharpness_in_words, trend
from gptexp.storage import run_dir

THRESHOLD = 3800.0


def known(hessian: float | None = 12.0, share: float = 1.0) -> dict[str, float | None]:
    """A preconditioned sharpness that is `share` of its threshold."""
    return {"hessian": hessian, "preconditioned": THRESHOLD * share, "threshold": THRESHOLD, "sam": 0.05}


def measured(runs: Sequence[Run], sharpness: Callable[[Run, float], dict[str, Any]]) -> list[Run]:
    """The runs with four measurements in memory, the last at their end. `sharpness`: after a share of the training."""
    quarters = [[(run, run.summary["steps"] * quarter // 4, quarter / 4) for quarter in (1, 2, 3, 4)] for run in runs]
    return [
        replace(run, sharpness=[Sharpness(step, step * run.batch, **sharpness(run, at)) for _, step, at in of_run])
        for run, of_run in zip(runs, quarters, strict=True)
    ]


def log(directory: Path, sharpness: Callable[[float], dict[str, Any]]) -> None:
    """Add four measurements to what a run has logged, the last at its end."""
    run = read_run(directory)
    with (directory / run_dir.METRICS).open("a") as file:
        for quarter in (1, 2, 3, 4):
            at = run.summary["steps"] * quarter // 4
            event = {"event": "sharpness", "time": 2e9, "step": at - 1, "tokens": at * run.batch}
            metrics = {f"sharpness/{name}": value for name, value in sharpness(quarter / 4).items()}
            file.write(json.dumps({**event, **metrics}) + "\n")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """The runs of a sweep of three batch sizes with two seeds."""
    return find_runs(write_sweep(tmp_path_factory.mktemp("sweeps") / "root"))


def said(runs: Sequence[Run]) -> list[Finding]:
    [arm] = analyse("sweep", runs).arms
    return list(sharpness_in_words(arm))


def test_the_trend_is_a_least_squares_fit_of_logarithms_with_its_interval() -> None:
    draw = np.random.default_rng(0)
    sizes = [1024, 1024, 2048, 4096, 4096, 4096, 8192]
    values = [(size, float(3 * size**0.4 * np.exp(0.1 * draw.standard_normal()))) for size in sizes]
    exponent = trend(values)
    fit = linregress(*(np.log([pair[i] for pair in values]) for i in (0, 1)))
    half = fit.stderr * t.ppf(0.975, len(values) - 2)
    assert exponent is not None
    assert (exponent.value, exponent.low, exponent.high) == pytest.approx(
        (fit.slope, fit.slope - half, fit.slope + half)
    )
    assert trend(values[:2]) is None
    assert trend([(1024, 1.0), (1024, 2.0), (1024, 3.0)]) is None


@pytest.mark.parametrize(
    ("power", "verb"), [(0.5, "rises with"), (-0.5, "falls with"), (0.0, "does not rise signific")]
)
def test_plain_sharpness_is_compared_between_batch_sizes(swept: list[Run], power: float, verb: str) -> None:
    """Only runs at the best learning rates count: those at others are far off here."""
    best = {4096: 0.01, 8192: 0.02, 16384: 0.02}

    def sharpness(run: Run, share: float) -> dict[str, Any]:
        jitter = 1.02 if run.seed % 2 else 1 / 1.02
        is_last = run.lr == best[run.batch] and share == 1
        return known(12 * (run.batch / 4096) ** power * jitter if is_last else 1e4)

    runs = measured(swept, sharpness)
    [arm] = analyse("sweep", runs).arms
    assert {batch: curve.best for batch, curve in arm.curves.by_batch.items()} == best
    last = at_best_lr(arm)
    assert {batch: len(of_batch) for batch, of_batch in last.items()} == {4096: 2, 8192: 2, 16384: 2}
    assert all(value.hessian is not None and value.hessian < 100 for at in last.values() for _, value in at)
    [finding] = [finding for finding in said(runs) if finding.text.startswith("Plain")]
    assert verb in finding.text
    assert f"to the power {power:.2f} (95% interval " in finding.why.replace("-0.00", "0.00")


@pytest.mark.parametrize(
    ("shares", "where"),
    [
        ((0.9, 1.1), "lies at its threshold: it is 0.90 to 1.10 times"),
        ((0.2, 0.2), "lies below its threshold: it is 0.20 times"),
        ((1.5, 2.0), "lies above its threshold: it is 1.50 to 2.00 times"),
        ((0.5, 1.0), "lies at its threshold in some runs only: it is 0.50 to 1.00 times"),
    ],
)
def test_preconditioned_sharpness_is_compared_with_its_threshold(
    swept: list[Run], shares: tuple[float, float], where: str
) -> None:
    """Over the second half: early measurements do not count. One seed has the first share, the other the second."""
    runs = measured(swept, lambda run, at: known(share=shares[run.seed % 2] if at > 0.5 else 30.0))
    [finding] = [finding for finding in said(runs) if "preconditioned" in finding.text]
    assert where in finding.text


def test_a_single_run_has_its_own_sentence_and_charts(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.01, 1, 4.0)
    log(tmp_path / "run", lambda at: known(hessian=100 * at, share=0.5))
    report = build_report(tmp_path / "run")
    [line] = [line for line in report.verdict.lines if "sharpness" in line]
    assert "lies below its threshold: it is 0.50 times" in line
    assert "preconditioned sharpness, sharpness of SAM<" in sections(report)["charts"]
    specs = {figure.key: figure.spec for figure in report.figures}
    drawn = {key: specs[key]["data"]["values"] for key in specs if "sharpness" in key}
    assert [(p["tokens"], p["value"]) for p in drawn["sharpness"]] == [(2**16 * k, 25 * k) for k in (1, 2, 3, 4)]
    lines = [(p["of"], p["value"]) for p in drawn["preconditioned-sharpness"]]
    assert lines == [("preconditioned", 1900.0)] * 4 + [("threshold", 3800.0)] * 4
    assert [p["value"] for p in drawn["sam-sharpness"]] == [0.05] * 4


def test_the_figures_over_batch_sizes_have_the_runs_at_the_best_learning_rates(swept: list[Run]) -> None:
    nothing = dict.fromkeys(known())
    runs = measured(swept, lambda run, _: known() if run.batch != 8192 else nothing)
    drawn = {figure.key: figure for figure in figures(analyse("sweep", runs))}
    points = drawn["sharpness-batch"].spec["layer"][1]["data"]["values"]
    assert {(p["batch"], p["seed"], p["value"]) for p in points} == {
        (batch, seed, 12.0) for batch in (4096, 16384) for seed in (1337, 1338)
    }
    lines = drawn["preconditioned-batch"].spec["layer"][0]["data"]["values"]
    assert {p["of"] for p in lines} == {"preconditioned", "threshold"}
    assert "Not measured at" not in drawn["sharpness-batch"].caption  # it was, without a result
    for run in runs:
        if run.batch == 8192:
            run.sharpness.pop()  # without the one at the end
    drawn = {figure.key: figure for figure in figures(analyse("sweep", runs))}
    assert "Not measured at 8,192 tokens a step." in drawn["sharpness-batch"].caption


def test_two_runs_alone_show_no_trend(swept: list[Run]) -> None:
    runs = [run for run in swept if run.batch < 16384 and run.seed == 1337]
    [finding] = [f for f in said(measured(runs, lambda run, _: known(float(run.batch)))) if f.text.startswith("Plain")]
    assert finding.text.endswith("goes from 4096 at 4,096 tokens a step to 8192 at 8,192.")


@pytest.mark.parametrize("value", [None, 0.0, -3.0, "nothing was measured"])
def test_without_a_measured_value_there_are_neither_words_nor_figures(swept: list[Run], value: Any) -> None:
    runs = swept if isinstance(value, str) else measured(swept, lambda *_: dict.fromkeys(known(), value))
    assert said(runs) == []
    assert not [figure for figure in figures(analyse("sweep", runs)) if "sharpness" in figure.key]


@pytest.mark.parametrize("wrong", ["x", [1.0], {}, 10**400])
def test_a_value_of_a_wrong_type_is_named(tmp_path: Path, wrong: object) -> None:
    write_run(tmp_path / "run", 4096, 0.01, 1, 4.0)
    log(tmp_path / "run", lambda _: {**known(), "sam": wrong})
    assert "is not a valid event" in str(read_run(tmp_path / "run").problem)
    assert not [line for line in report_of(tmp_path / "run")["verdict"] if "sharpness" in line]
