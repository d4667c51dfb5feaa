"""The figures of a sweep's results. Those of runs over their training are in line_charts.py."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from urllib.parse import quote

import numpy as np

from gptexp.reporting.charts import vega_lite as vl
from gptexp.reporting.charts.batch_charts import (
    SAMPLES,
    arm_charts,
    batches_without_optimum,
    law_chart,
    loss_chart,
    sharpness_charts,
    throughput_chart,
)
from gptexp.reporting.charts.line_charts import Lines, line_charts
from gptexp.reporting.charts.search_chart import narrowing_chart
from gptexp.reporting.charts.vega_lite import Figure, Spec, caption, figure, tooltip
from gptexp.reporting.listings.records import Run
from gptexp.reporting.listings.search import SearchHistory
from gptexp.reporting.statistics.analysis import Analysis, Arm
from gptexp.reporting.statistics.curves import CENTRAL

ROOM_BELOW = 0.15  # room for a label below the lowest loss, as a share of the range of losses
MOST_COLUMNS = 28  # up to so many columns, a heat map as wide as the page has room for losses; a narrower one: half
MOST_COLUMNS_ON_A_PHONE = 7
ROW_HEIGHT = 28  # pixels, for each row of a heat map on a phone


def figures(
    analysis: Analysis,
    search: SearchHistory | None = None,
    ready: Callable[[Figure], None] = lambda figure: None,
) -> list[Figure]:
    """All figures that the runs have values for: first those that compare arms, then those of each arm.

    `search`: of the runs, if one has chosen them. `ready` gets each figure once it is known; those with a line per run
    come first, as they need no fitted curve.
    """

    def named(charts: Iterable[Figure | None], index: int) -> list[Figure]:
        suffix = f"-{index}" if len(analysis.arms) > 1 else ""
        those = [replace(chart, key=f"{chart.key}{suffix}") for chart in charts if chart is not None]
        for chart in those:
            ready(chart)
        return those

    of_lines = [named(line_charts(_lines(arm)), index) for index, arm in enumerate(analysis.arms)]
    charts = list(arm_charts(analysis.arms))
    for chart in charts:
        ready(chart)
    for index, arm in enumerate(analysis.arms):
        charts += [*named(_curves_of(arm, search), index), *of_lines[index], *named(_charts_of(arm), index)]
    return charts


def _lines(arm: Arm) -> Lines:
    hyperbola = arm.critical.hyperbola if arm.critical is not None else None
    return Lines(arm.runs, critical_batch=hyperbola.tokens if hyperbola is not None else None)


def _curves_of(arm: Arm, search: SearchHistory | None) -> Iterator[Figure | None]:
    yield _curves(arm)
    yield narrowing_chart(arm, search) if search is not None else None


def _charts_of(arm: Arm) -> Iterator[Figure | None]:
    yield _heat_map(arm)
    yield law_chart(arm)
    yield loss_chart(arm)
    yield _iso_loss(arm)
    yield from sharpness_charts(arm)
    yield throughput_chart(arm)


def _curves(arm: Arm) -> Figure | None:
    """Loss over learning rate, with a colour for each batch size."""
    if not arm.is_grid:
        return None
    losses = [loss for at_batch in arm.losses.values() for of_seeds in at_batch.values() for loss in of_seeds]
    low, high, ceiling = min(losses), max(losses), _ceiling(arm)
    bottom = low - ROOM_BELOW * (high - low)
    y = vl.linear("loss", "final validation loss, nats per token")
    y["scale"] |= {"domainMin": bottom}
    colour = vl.coloured("size", "tokens a step", [f"{batch:,}" for batch in _batches(arm)], "batch")
    encoding = {
        "x": vl.log("lr", "peak learning rate", {run.lr for run in arm.runs}, ".3~g"),
        "y": y,
        "color": colour,
        "opacity": vl.faint_unless_isolated("size"),
    }
    means = [{"lr": lr, "loss": mean, "size": f"{batch:,}"} for (batch, lr), mean in sorted(arm.means.items())]
    fitted, points = _fitted(arm), _points(arm, low, high)
    band = {**vl.INTERVAL, "opacity": None, "color": None, "fill": {**colour, "legend": None}}
    layers = [
        {**vl.layer("line", means, strokeWidth=1), "params": vl.isolated("size")},
        vl.layer("area", fitted, band, fillOpacity=0.15, stroke="transparent", clip=True),
        vl.layer("line", fitted, strokeWidth=2.5),
        *points,
        *_minima(arm),
        *_answer(arm),
        _labels_at_ends(means, y, low, high),
    ]
    near = {"encoding": {"y": {"scale": {"domain": [bottom, ceiling], "clamp": True}}}}
    controls = [vl.Control("Losses", {"all": {}, "near the lowest": near})] if ceiling < high else []
    text = _caption_of_curves(arm, len(arm.runs) - sum(len(layer["data"]["values"]) for layer in points))
    spec = {"layer": layers, "encoding": encoding, "padding": vl.LABELLED}
    return figure("curves", "Loss against learning rate", text, spec, controls=controls, is_wide=True)


def _caption_of_curves(arm: Arm, unfinished: int) -> str:
    without_curve = batches_without_optimum(arm)
    return caption(
        "Each point is a run, and a click opens it. Thin lines join the means over seeds.",
        "Thick lines are fitted curves with their 68% intervals; diamonds are their minima, bars the 95% intervals of "
        "these."
        if arm.curves.optima
        else "",
        "A curve ends below a plateau, where training is unstable." if any(arm.curves.plateaus.values()) else "",
        "Hollow points are outliers, which hardly count." if arm.outliers else "",
        "Crosses at the top are runs that diverged." if arm.diverged else "",
        f"No curve is fitted at {without_curve}." if without_curve else "",
        vl.not_shown(unfinished, "without a final validation loss"),
    )


def _fitted(arm: Arm) -> list[Spec]:
    """Points of the fitted curves, with their 68% intervals, over the learning rates that they are fitted to."""
    points = []
    for batch in arm.curves.optima:
        fitted = arm.curves.fits[batch]
        octaves = np.linspace(fitted.x[0], fitted.x[-1], SAMPLES)
        losses = fitted.posterior.loss(batch, octaves)
        quantiles = np.quantile(losses, [(1 - CENTRAL) / 2, 0.5, (1 + CENTRAL) / 2], axis=0)
        for octave, low, loss, high in np.vstack([octaves, quantiles]).T.tolist():
            points.append({"lr": 2**octave, "loss": loss, "low": low, "high": high, "size": f"{batch:,}"})
    return points


def _points(arm: Arm, low: float, high: float) -> list[Spec]:
    """Layers of the runs: those that count, outliers, and, at the top of the chart, those that diverged."""
    outliers = {run.name for run, _ in arm.outliers}
    completed = [run for run in arm.runs if run.loss in arm.losses.get(run.batch, {}).get(run.lr, ())]
    diverged = [run for run in arm.runs if run.lr in arm.diverged.get(run.batch, ())]
    rows = {batch: row for row, batch in enumerate(_batches(arm), 1)}  # batch size -> its row of crosses, from below

    def points(runs: Iterable[Run]) -> list[Spec]:
        return [{**_point(run), "loss": run.loss} for run in runs]

    crosses = [{**_point(run), "loss": high + rows[run.batch] * vl.MARGIN * (high - low)} for run in diverged]
    link = {"href": {"field": "href"}}
    run_link = {"tooltip": tooltip("run", "lr", "size", "seed", "loss"), **link}
    cross_link = {"tooltip": tooltip("run", "lr", "size", "seed"), **link}
    return [
        vl.layer("point", points(r for r in completed if r.name not in outliers), run_link, filled=True, size=60),
        vl.layer("point", points(r for r in completed if r.name in outliers), run_link, size=60),
        vl.layer("point", crosses, cross_link, shape="cross", angle=45, size=90, filled=True),
    ]


def _point(run: Run) -> Spec:
    """What a point says of its run, and a link to the run's row on the page."""
    link = f"#run-{quote(os.fsencode(run.name), safe='')}"
    return {"lr": run.lr, "size": f"{run.batch:,}", "seed": run.seed, "run": run.name, "href": link}


def _minima(arm: Arm) -> list[Spec]:
    """Layers of the minima of the fitted curves, with their intervals."""
    minima = [
        {"lr": o.lr, "low": o.low, "high": o.high, "loss": o.loss, "size": f"{batch:,}"}
        for batch, o in arm.curves.optima.items()
    ]
    tooltips = {"tooltip": tooltip("size", "lr", "low", "high", "loss")}
    return [
        vl.layer("rule", minima, {"x": vl.quantitative("low"), "x2": {"field": "high"}, **tooltips}, size=5),
        vl.layer("point", minima, shape="diamond", size=130, filled=True),
    ]


def _answer(arm: Arm) -> list[Spec]:
    """Layers of a ring and a label at the optimum of the batch size with the lowest mean, else at that mean."""
    answer = []
    if arm.best is not None:
        batch, lr = arm.best
        point = {"lr": lr, "loss": arm.means[arm.best], "label": f"lowest: {lr:.3g}"}
        if (best := arm.curves.optima.get(batch)) is not None:
            label = f"best: {best.lr:.3g} ({best.low:.3g} to {best.high:.3g})"
            point = {"lr": best.lr, "loss": best.loss, "label": label}
        answer = [{**point, "size": f"{batch:,}"}]
    text = {"style": "label", "dx": 0, "dy": 22, "align": "center", "fontWeight": "bold"}
    return [
        vl.layer("point", answer, {"color": None}, size=260, strokeWidth=2, style="best"),
        vl.layer("text", answer, {"text": {"field": "label"}}, **text),
    ]


def _labels_at_ends(means: Sequence[Spec], y: Spec, low: float, high: float) -> Spec:
    """A layer of a label beside the last mean of each batch size."""
    ends = {point["size"]: point for point in means}
    heights = vl.apart({size: point["loss"] for size, point in ends.items()}, low, high)
    labels = [{**point, "height": heights[size], "label": size} for size, point in ends.items()]
    encoding = {"y": {**y, "field": "height"}, "text": {"field": "label"}}
    return {"name": vl.END_LABELS, **vl.layer("text", labels, encoding, style="label", dx=10)}


def _batches(arm: Arm) -> list[int]:
    """The batch sizes at which runs have ended."""
    return sorted({*arm.losses, *arm.diverged})


def _ceiling(arm: Arm) -> float:
    """The end of a scale: as far above the median as the lowest loss is below, so that high losses do not use it up."""
    losses = list(arm.means.values())
    return min(max(losses), 2 * median(losses) - min(losses))


def _heat_map(arm: Arm) -> Figure | None:
    """Mean final loss of each cell."""
    if len(arm.losses) < 2 or arm.best is None:
        return None
    lrs = sorted({lr for at_batch in (*arm.losses.values(), *arm.diverged.values()) for lr in at_batch})
    batches = _batches(arm)[::-1]
    axis = {"labelAngle": 0, "labelOverlap": "greedy", "labelSeparation": 6}
    x = {**vl.ordinal("rate", "peak learning rate", [f"{lr:.3g}" for lr in lrs]), "axis": axis}
    y = {**vl.ordinal("size", "tokens a step", [f"{b:,}" for b in batches]), "axis": axis}
    # There are usually more learning rates than batch sizes, and a phone has more room for rows than for columns.
    turned = {"x": {**y, "sort": y["sort"][::-1]}, "y": {**x, "sort": x["sort"][::-1]}}
    on_a_phone = {"encoding": turned, "height": max(vl.HEIGHT, ROW_HEIGHT * len(lrs))}
    diverged = [_cell(batch, lr) for batch, of_batch in arm.diverged.items() for lr in of_batch]
    ceiling, layers = _ceiling(arm), _tiles(arm, diverged, len(lrs), len(batches))
    shown = {*arm.means, *((batch, lr) for batch, of_batch in arm.diverged.items() for lr in of_batch)}
    text = caption(
        "Mean loss over seeds, in which a run far from the others of its cell counts less. The lowest has a frame.",
        "In a grey cell, with a cross, a run diverged." if arm.diverged else "",
        "An empty cell has no completed run that counts." if len(shown) < len(lrs) * len(batches) else "",
        f"Losses above {ceiling:.3f} share one colour." if ceiling < max(arm.means.values()) else "",
    )
    return figure(
        "heatmap",
        "Loss of every cell",
        text,
        {"layer": layers, "encoding": {"x": x, "y": y}},
        on_a_phone=on_a_phone if len(lrs) > len(batches) else {},
        is_wide=len(lrs) > MOST_COLUMNS // 2,
    )


def _tiles(arm: Arm, diverged: Sequence[Spec], columns: int, rows: int) -> list[Spec]:
    """Layers of a heat map's colours, of the frame around the lowest mean, of losses where they fit, and of crosses."""
    assert arm.best is not None
    low, ceiling = min(arm.means.values()), _ceiling(arm)
    cells = [
        {**_cell(batch, lr), "loss": mean, "seeds": len(arm.losses[batch][lr]), "text": f"{mean:.3f}"}
        for (batch, lr), mean in arm.means.items()
    ]
    scale = {"scheme": "viridis", "reverse": True, "domain": [low, ceiling], "clamp": True}
    colour = vl.quantitative("loss", "loss", scale=scale, legend=None)
    ink = {"condition": {"test": f"datum.loss < {(low + ceiling) / 2!r}", "value": "black"}, "value": "white"}
    losses = vl.layer("text", cells if columns <= MOST_COLUMNS else [], {"text": {"field": "text"}, "color": ink})
    return [
        vl.layer("rect", cells, {"color": colour, "tooltip": tooltip("size", "rate", "loss", "seeds")}),
        vl.layer("rect", diverged, style="empty"),
        vl.layer("rect", [_cell(*arm.best)], filled=False, style="best", strokeWidth=4),
        {"name": vl.END_LABELS if min(columns, rows) > MOST_COLUMNS_ON_A_PHONE else "losses", **losses},
        vl.layer("text", diverged, {"text": {"value": "×"}}),
    ]


def _cell(batch: int, lr: float) -> Spec:
    return {"rate": f"{lr:.3g}", "size": f"{batch:,}"}


def _iso_loss(arm: Arm) -> Figure | None:
    """Steps against tokens to reach one loss, with the hyperbola if there is one."""
    critical = arm.critical
    if critical is None or len(critical.steps) < 2:
        return None
    points = [{"steps": steps, "tokens": steps * batch, "batch": batch} for batch, steps in critical.steps.items()]
    curve = []
    if (h := critical.hyperbola) is not None:
        sizes = np.geomspace(min(critical.steps), max(critical.steps), SAMPLES).tolist()
        curve = [{"steps": h.least_steps * (1 + h.tokens / b), "tokens": h.least_steps * (b + h.tokens)} for b in sizes]
    tooltips = {"tooltip": tooltip("batch", "steps", "tokens")}
    layers = [
        vl.layer("line", curve, style="accent", order=False),
        vl.layer("point", points, tooltips, filled=True, size=80, style="ink"),
        vl.layer("text", points, {"text": vl.quantitative("batch", format=",")}, style="label"),
    ]
    encoding = {"x": vl.log("steps", "steps", form="~s"), "y": vl.log("tokens", "tokens", form="~s")}
    absent = ", ".join(f"{batch:,}" for batch in sorted({run.batch for run in arm.runs} - {*critical.steps}))
    whose = " of the averaged weights" if arm.averages else ""
    text = caption(
        f"Steps and tokens to reach a loss{whose} of {arm.target_loss:.4f}. Labels are tokens a step.",
        f"Not shown, because no run has completed: {absent}." if absent else "",
    )
    return figure("isoloss", "Steps and tokens to reach one loss", text, {"layer": layers, "encoding": encoding})
