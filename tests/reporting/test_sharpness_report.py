"""What a report says and draws of measured sharpness, on sweeps in which it is known."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import linregress, t
from sweeps import report_of, write_run, write_sweep

from gptexp.reporting.listings.records import Run, read_run
from gptexp.reporting.page.page import sections
from gptexp.reporting.page.report import build_report
from gptexp.reporting.words.sharpness import trend
from gptexp.storage import run_dir

Sharpness = Callable[[Run, float], dict[str, Any]]  # of a run, after a share of its training


def known(hessian: float = 12.0, share: float = 1.0) -> dict[str, Any]:
    """Metrics of a preconditioned sharpness that is `share` of its threshold of 3,800."""
    return {"sharpness/hessian": hessian, "sharpness/preconditioned": 3800 * share, "sharpness/threshold": 3800.0,
            "sharpness/sam": 0.05}  # fmt: skip


def measure(directory: Path, sharpness: Sharpness) -> None:
    """Add four measurements to what a run has logged, the last at its end."""
    run = read_run(directory)
    steps = run.summary["steps"]
    with (directory / run_dir.METRICS).open("a") as file:
        for quarter in (1, 2, 3, 4):
            at = steps * quarter // 4
            event = {"event": "sharpness", "time": 2e9, "step": at - 1, "tokens": at * run.batch}
            file.write(json.dumps({**event, **sharpness(run, quarter / 4)}) + "\n")


def sweep(root: Path, sharpness: Sharpness, **more: Any) -> Path:
    write_sweep(root, **more)
    for directory in root.glob("lr=*"):
        measure(directory, sharpness)
    return root


def said(directory: Path) -> list[str]:
    return [line for line in report_of(directory)["verdict"] if "sharpness" in line.lower()]


def test_the_trend_is_a_least_squares_fit_of_logarithms_with_its_interval() -> None:
    draw = np.random.default_rng(0)
    sizes = [1024, 1024, 2048, 4096, 4096, 4096, 8192]
    values = [(size, float(3 * size**0.4 * np.exp(0.1 * draw.standard_normal()))) for size in sizes]
    found = trend(values)
    fit = linregress(*(np.log([pair[i] for pair in values]) for i in (0, 1)))
    half = fit.stderr * t.ppf(0.975, len(values) - 2)
    assert found is not None
    assert (found.exponent, found.low, found.high) == pytest.approx((fit.slope, fit.slope - half, fit.slope + half))
    assert trend(values[:2]) is None
    assert trend([(1024, 1.0), (1024, 2.0), (1024, 3.0)]) is None


@pytest.mark.parametrize(
    ("power", "verb"), [(0.5, "rises with"), (-0.5, "falls with"), (0.0, "does not rise significantly with")]
)
def test_plain_sharpness_is_compared_between_batch_sizes(tmp_path: Path, power: float, verb: str) -> None:
    """Only runs at the best learning rates count: those at others are far off here."""

    def of(run: Run, share: float) -> dict[str, Any]:
        best = {4096: 0.01, 8192: 0.02, 16384: 0.02}[run.batch]
        jitter = 1.02 if run.seed % 2 else 1 / 1.02
        return known(12 * (run.batch / 4096) ** power * jitter if run.lr == best and share == 1 else 1e4)

    root = sweep(tmp_path / "sweep", of)
    report = report_of(root)
    best = {curve["total_batch_size"]: curve["best"] for curve in report["arms"][0]["curves"]}
    assert best == {4096: 0.01, 8192: 0.02, 16384: 0.02}
    [line] = [line for line in said(root) if line.startswith("Plain")]
    assert f"of each batch size, {verb} the batch size in this sweep: from 12 at 4,096 tokens a step to " in line
    assert f"to the power {power:.2f} (95% interval " in line.replace("-0.00", "0.00")
    assert "6 runs)." in line
    measured = report["arms"][0]["sharpness"]
    assert {batch: len(runs) for batch, runs in measured.items()} == {"4096": 2, "8192": 2, "16384": 2}
    assert all(run["hessian"] < 100 for runs in measured.values() for run in runs)


@pytest.mark.parametrize(
    ("shares", "lies"),
    [
        ((0.9, 1.1), "lies at its threshold: it is 0.90 to 1.10 times that"),
        ((0.2, 0.2), "lies below its threshold: it is 0.20 times that"),
        ((1.5, 2.0), "lies above its threshold: it is 1.50 to 2.00 times that"),
        ((0.5, 1.0), "lies at its threshold in some runs only: it is 0.50 to 1.00 times that"),
    ],
)
def test_preconditioned_sharpness_is_compared_with_its_threshold(
    tmp_path: Path, shares: tuple[float, float], lies: str
) -> None:
    """Over the second half: early measurements do not count. One seed has the first share, the other the second."""
    root = sweep(tmp_path / "sweep", lambda run, at: known(share=shares[run.seed % 2] if at > 0.5 else 30.0))
    [line] = [line for line in said(root) if "preconditioned" in line]
    assert line.startswith("Over the second half of training the preconditioned sharpness of the runs at the best ")
    assert lies in line


def test_a_single_run_has_its_own_sentence_and_charts(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.01, 1, 4.0)
    measure(tmp_path / "run", lambda run, at: known(hessian=100 * at, share=0.5))
    assert said(tmp_path / "run") == [
        "Over the second half of training the preconditioned sharpness lies below its threshold: it is 0.50 times "
        "that. Above the threshold AdamW is unstable, at the learning rate of the step (arXiv 2207.14484)."
    ]
    report = build_report(tmp_path / "run")
    assert "preconditioned sharpness, sharpness of SAM<" in sections(report)["charts"]
    figures = {figure.key: figure.spec for figure in report.figures}
    drawn = {key: figures[key]["data"]["values"] for key in figures if "sharpness" in key}
    assert [(p["tokens"], p["value"]) for p in drawn["sharpness"]] == [(2**16 * k, 25 * k) for k in (1, 2, 3, 4)]
    lines = [(p["of"], p["value"]) for p in drawn["preconditioned-sharpness"]]
    assert lines == [("preconditioned", 1900.0)] * 4 + [("threshold", 3800.0)] * 4
    assert [p["value"] for p in drawn["sam-sharpness"]] == [0.05] * 4


def test_the_figures_over_batch_sizes_have_the_runs_at_the_best_learning_rates(tmp_path: Path) -> None:
    root = sweep(tmp_path / "sweep", lambda run, _: known() if run.batch != 8192 else {})
    figures = {figure.key: figure for figure in build_report(root).figures}
    points = figures["sharpness-batch"].spec["layer"][1]["data"]["values"]
    assert {(p["batch"], p["seed"], p["value"]) for p in points} == {
        (batch, seed, 12.0) for batch in (4096, 16384) for seed in (1337, 1338)
    }
    lines = figures["preconditioned-batch"].spec["layer"][0]["data"]["values"]
    assert {p["of"] for p in lines} == {"preconditioned", "threshold"}
    assert "Not measured at" not in figures["sharpness-batch"].caption  # it was, without a result
    for directory in root.glob("*batch_size=8192*"):
        path = directory / run_dir.METRICS
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # without the one at the end
    assert "Not measured at 8,192 tokens a step." in {
        figure.key: figure.caption for figure in build_report(root).figures
    }["sharpness-batch"]  # fmt: skip


def test_two_runs_alone_show_no_trend(tmp_path: Path) -> None:
    root = sweep(tmp_path / "sweep", lambda run, _: known(float(run.batch)), batches=(4096, 8192), seeds=1)
    [line] = [line for line in said(root) if line.startswith("Plain")]
    assert "goes from 4096 at 4,096 tokens a step to 8192 at 8,192." in line
    assert "Two runs say nothing" in line


def test_runs_without_measurements_have_neither_words_nor_figures(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep")
    assert said(root) == []
    assert not [figure for figure in build_report(root).figures if "sharpness" in figure.key]
    assert report_of(root)["arms"][0]["sharpness"] == {}


@pytest.mark.parametrize("nothing", [None, 0.0, -3.0])
def test_values_that_could_not_be_measured_are_left_out(tmp_path: Path, nothing: float | None) -> None:
    root = sweep(tmp_path / "sweep", lambda *_: dict.fromkeys(known(), nothing))
    assert said(root) == []
    assert not [figure for figure in build_report(root).figures if "sharpness" in figure.key]


@pytest.mark.parametrize("wrong", ["x", [1.0], {}, 10**400])
def test_a_value_of_a_wrong_type_is_named(tmp_path: Path, wrong: object) -> None:
    write_run(tmp_path / "run", 4096, 0.01, 1, 4.0)
    measure(tmp_path / "run", lambda *_: {**known(), "sharpness/sam": wrong})
    assert "is not a valid event" in str(read_run(tmp_path / "run").problem)
    assert said(tmp_path / "run") == []
