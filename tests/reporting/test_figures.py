"""The specifications of figures, without a browser."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import vl_convert
from PIL import Image
from sweeps import TOKENS, write_run, write_sweep

from gptexp.reporting.charts.coordinates import Coordinates
from gptexp.reporting.charts.coordinates import picture as coordinate_picture
from gptexp.reporting.charts.drawer import VEGA_LITE, simplified
from gptexp.reporting.charts.line_charts import Lines, line_charts
from gptexp.reporting.charts.vega_lite import RUN_COLOURS, Figure, apart, theme
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.page.report import build_report
from gptexp.storage import run_dir


def figures_of(directory: Path) -> dict[str, Figure]:
    return {figure.key: figure for figure in build_report(directory).figures}


def pixels(image: bytes) -> np.ndarray:
    return np.array(Image.open(BytesIO(image)).convert("RGB"), int)


def write_losses(root: Path, losses: dict[float, float]) -> Path:
    for lr, loss in losses.items():
        write_run(root / f"lr={lr}", 8192, lr, 1, loss)
    return root


def test_near_the_lowest_leaves_out_even_half_of_the_losses(tmp_path: Path) -> None:
    root = write_losses(tmp_path, {0.003: 8.9, 0.005: 8.8, 0.01: 5.4, 0.02: 4.9, 0.04: 4.6, 0.08: 5.1})
    [control] = figures_of(root)["curves"].controls
    low, high = control.options["near the lowest"]["encoding"]["y"]["scale"]["domain"]
    assert low < 4.6
    assert 5.4 < high < 8.8


def test_near_the_lowest_is_left_out_where_no_loss_is_high(tmp_path: Path) -> None:
    root = write_losses(tmp_path, {0.01: 5.0, 0.02: 4.0, 0.04: 5.0})
    assert figures_of(root)["curves"].controls == []


def test_the_range_of_losses_is_that_of_nearly_all_after_the_warm_up(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    warm_up = run_dir.load_config(tmp_path / "run").schedule.warmup_ratio
    assert warm_up == 0.1
    spec = figures_of(tmp_path / "run")["loss"].spec
    low, high, *_ = (param["value"] for param in spec["params"])
    later = [point["smooth"] for point in spec["data"]["values"] if point["tokens"] > warm_up * TOKENS]
    assert sum(low < loss < high for loss in later) >= 0.95 * len(later)
    assert high < max(point["smooth"] for point in spec["data"]["values"])


@pytest.mark.e2e
def test_runs_that_diverged_do_not_widen_the_range_of_losses(tmp_path: Path) -> None:
    def ends(root: Path) -> list[float]:
        return [param["value"] for param in figures_of(root)["loss"].spec["params"][:2]]

    root = write_losses(tmp_path / "sweep", {0.01: 5.0, 0.02: 4.0})
    before = ends(root)
    write_run(root / "diverged", 8192, 0.04, 1, None)
    metrics = root / "diverged" / run_dir.METRICS
    metrics.write_text(metrics.read_text().replace('"val/loss": ', '"val/loss": 9'))  # from 4 nats to 94
    assert max(point["loss"] for point in figures_of(root)["loss"].spec["data"]["values"]) > 90
    assert ends(root) == before
    alone = write_losses(tmp_path / "all diverged", {})
    for lr in (0.04, 0.08):
        write_run(alone / str(lr), 8192, lr, 1, None)
    assert ends(alone)[1] > 4


def test_the_training_loss_of_a_short_run_is_smoothed_over_five_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 16384, 0.02, 1, 4.0)
    points = figures_of(tmp_path / "run")["loss"].spec["data"]["values"]
    training = [point for point in points if point["of"] == "training"]
    assert len(training) == 16
    losses = [point["loss"] for point in training]
    assert training[7]["smooth"] == pytest.approx(fmean(losses[5:10]))
    assert training[-1]["smooth"] == pytest.approx(fmean(losses[-3:]))


def test_only_labels_that_touch_are_moved_apart() -> None:
    heights = apart({"high": 17.0, "b": 5.0, "a": 4.9, "low": 0.0, "lowest": -0.1}, 0, 18)  # a label needs 1
    assert heights == pytest.approx({"high": 17, "b": 5.45, "a": 4.45, "low": 1, "lowest": 0})


def test_the_label_of_a_cell_stands_at_the_end_of_its_longest_line(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"sweep/{seed}", 4096, 0.02, seed, 4.0)
    lines = (tmp_path / "sweep/2/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "sweep/2/metrics.jsonl").write_text("".join(lines[: len(lines) // 2]))
    [label] = figures_of(tmp_path / "sweep")["loss"].spec["layer"][-1]["data"]["values"]
    assert (label["label"], label["tokens"]) == ("0.02", TOKENS)


def tooltips(spec: Any) -> Iterator[dict[str, Any]]:
    if isinstance(spec, dict):
        yield from spec.get("tooltip") or []
    for inner in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else []:
        yield from tooltips(inner)


@pytest.mark.e2e
def test_tooltips_have_words_and_rounded_numbers(tmp_path: Path) -> None:
    found = figures_of(write_sweep(tmp_path / "sweep", batches=(4096, 8192, 16384), schedule="constant"))
    entries = [entry for figure in found.values() for entry in tooltips({**figure.spec, "data": None})]
    titles = {entry["field"]: entry["title"] for entry in entries}
    assert (titles["rate"], titles["lr"]) == ("learning rate", "learning rate")
    assert (titles["size"], titles["batch"]) == ("tokens a step", "tokens a step")
    texts = {"run", "rate", "size", "seed", "what"}
    assert {entry["field"] for entry in entries if "format" not in entry} <= texts
    assert {entry["format"] for entry in entries if entry["field"] == "loss"} == {".4f"}


@pytest.mark.e2e
def test_the_answer_is_marked_on_the_curves(tmp_path: Path) -> None:
    """At the fitted optimum; without one, at the lowest mean."""
    root = write_sweep(tmp_path / "sweep", batches=(4096,))

    def marked() -> tuple[float, str]:
        layers = figures_of(root)["curves"].spec["layer"]
        [[point]] = [layer["data"]["values"] for layer in layers if layer["mark"].get("dy") == 22]
        return point["lr"], point["label"]

    [best] = build_report(root).analysis.arms[0].curves.optima.values()
    assert marked() == (best.lr, f"best: {best.lr:.3g} ({best.low:.3g} to {best.high:.3g})")
    for run in root.glob("lr=*"):
        if not run.name.startswith(("lr=0.01,", "lr=0.02,")):
            shutil.rmtree(run)
    lr, label = marked()
    assert label == f"lowest: {lr:.3g}"


def test_lines_that_are_clipped_together_look_as_if_clipped_alone(tmp_path: Path) -> None:
    """Vega clips each line alone. Half of the lines leave the chart at its top."""
    spec = figures_of(write_sweep(tmp_path))["loss"].spec | {"width": 400, "config": theme("light")}
    drawing = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    together = simplified(drawing)
    assert drawing.count("clip-path=") > 30
    assert together.count("clip-path=") < 4
    [alone, shared, unclipped] = [
        pixels(vl_convert.svg_to_png(svg)) for svg in (drawing, together, re.sub("clip-path=", "no-clip=", drawing))
    ]
    assert abs(alone - shared).max() < 16  # of 255, where two lines cross the border in one pixel
    assert abs(alone - unclipped).max() > 100


def test_lines_that_look_alike_are_drawn_as_one_path_in_the_same_pixels(tmp_path: Path) -> None:
    look = {"width": 400, "config": theme("light") | {"aria": False}}  # without labels the seeds of a cell look alike
    drawing = vl_convert.vegalite_to_svg(figures_of(write_sweep(tmp_path))["loss"].spec | look, vl_version=VEGA_LITE)
    together = simplified(drawing)
    pairs = 3 * 5  # batch sizes and learning rates with two seeds each
    assert together.count("<ns0:path") == drawing.count("<path") - pairs
    [apart, one] = [pixels(vl_convert.svg_to_png(svg)) for svg in (drawing, together)]
    assert abs(apart - one).max() < 64  # of 255, where the soft edges of two seeds' lines lie on each other
    assert (abs(apart - one) > 16).any(axis=2).mean() < 0.003


def test_lines_of_several_panels_and_equal_symbols_of_a_legend_stay_where_they_are() -> None:
    sizes = {name: [[[2.0 + step + width * number for step in range(3)]] for width in range(3)]
             for number, name in enumerate(("attention", "mlp", "logits"))}  # fmt: skip
    panels = coordinate_picture(Coordinates("muP", [32, 64, 128], 0.01, sizes))
    values = [{"x": x, "y": x * number, "of": f"{number}"} for number in range(20) for x in (0, 1)]  # 8 colours
    colour = {"field": "of", "type": "nominal", "scale": {"range": RUN_COLOURS["light"]}}
    encoding = {**{axis: {"field": axis, "type": "quantitative"} for axis in "xy"}, "color": colour}
    lines = {"data": {"values": values}, "mark": {"type": "line", "clip": True}, "encoding": encoding}
    faint = {**lines, "mark": {"type": "line", "opacity": 0.5}, "encoding": {**encoding, "detail": encoding["color"]}}
    faint["encoding"].pop("color")
    for spec in (panels, lines, faint):
        drawing = vl_convert.vegalite_to_svg(spec | {"config": theme("light") | {"aria": False}}, vl_version=VEGA_LITE)
        [apart, one] = [pixels(vl_convert.svg_to_png(svg)) for svg in (drawing, simplified(drawing))]
        assert abs(apart - one).max() < 32


def test_the_picture_has_no_labels_that_its_axis_has_no_room_for(tmp_path: Path) -> None:
    for number in range(60):
        write_run(tmp_path / f"lr={number}", 8192, 0.01 * 1.1**number, 1, 4.0 + abs(number - 30) / 100)
    spec = figures_of(tmp_path)["curves"].spec | {"width": 400, "config": theme("light")}
    drawing = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    fewer = simplified(drawing)
    assert 3 <= fewer.count("</ns0:text>") < drawing.count("</text>") - 40
    assert np.array_equal(*[pixels(vl_convert.svg_to_png(svg)) for svg in (drawing, fewer)])


@pytest.mark.parametrize(
    ("count", "of", "kept"), [(2, "train", 64), (2, "val", 1001), (100, "val", 163), (2000, "val", 8)]
)
def test_a_chart_of_many_runs_has_some_points_of_each_and_its_end(
    tmp_path: Path, count: int, of: str, kept: int
) -> None:
    """All evaluations, unless all runs together have very many."""
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    [run] = find_runs(tmp_path / "run")
    points = [replace(run.train[0], step=step, tokens=step, loss=1.0) for step in range(1, 1002)]
    run = replace(run, **{"val": [], of: points})
    losses, *_ = line_charts(Lines([replace(run, name=f"{number}") for number in range(count)]))
    steps = [point["steps"] for point in losses.spec["data"]["values"] if point["run"] == "1"]
    assert kept <= len(steps) <= 2 * kept
    assert max(steps) == 1001
