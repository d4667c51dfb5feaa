"""The figures of a sweep's results. Those of runs over their training are in line_charts.py."""

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median
from urllib.parse import quote

import numpy as np

from gptexp.reporting.charts.figures_of_arms import figures_of_arms, noise_scale_lines
from gptexp.reporting.charts.figures_of_sharpness import sharpness_by_batch
from gptexp.reporting.charts.line_charts import Lines, line_charts
from gptexp.reporting.charts.vega_lite import (
    END_LABELS,
    HEIGHT,
    INTERVAL,
    LABELLED,
    MARGIN,
    Control,
    Figure,
    Spec,
    apart,
    caption,
    coloured,
    count,
    faint_unless_isolated,
    figure,
    isolated,
    linear,
    log,
    not_shown,
    ordinal,
    tooltip,
)
from gptexp.reporting.listings.records import Run
from gptexp.reporting.statistics.analysis import Analysis, Arm
from gptexp.reporting.statistics.curves import CENTRAL
from gptexp.reporting.statistics.law import SLOPES

SAMPLES = 48  # points of a fitted curve
ROOM_BELOW = 0.12  # of the range of losses: for the label of the lowest one
MOST_COLUMNS = 28  # of a heat map as wide as the page, in which a loss fits into a cell; of a narrower one half as many
MOST_COLUMNS_ON_A_PHONE = 7
ROW_HEIGHT = 28  # pixels, of a heat map on a phone
DOT = {"type": "point", "filled": True, "size": 80, "style": "ink"}


def figures(analysis: Analysis) -> list[Figure]:
    """All figures that the runs have values for: of the arms side by side, then arm by arm."""
    found = figures_of_arms(analysis.arms)
    for index, arm in enumerate(analysis.arms):
        suffix = f"-{index}" if len(analysis.arms) > 1 else ""
        hyperbola = arm.critical.hyperbola if arm.critical is not None else None
        lines = Lines(arm.runs, critical_batch=hyperbola.tokens if hyperbola is not None else None)
        of_arm = [_curves(arm), *line_charts(lines), _heat_map(arm), _law(arm), _loss_at_optimum(arm), _iso_loss(arm),
                  *sharpness_by_batch(arm), _throughput(arm)]  # fmt: skip
        found += [replace(f, key=f"{f.key}{suffix}") for f in of_arm if f is not None]
    return found


def _without_optimum(arm: Arm) -> str:
    """The batch sizes without an optimum, each with the reason; empty if all have one."""
    reasons = {batch: curve.status for batch, curve in arm.curves.by_batch.items() if batch not in arm.curves.optima}
    return ", ".join(f"{batch:,} ({why})" for batch, why in reasons.items())


def _batch(sizes: Collection[int]) -> Spec:
    return log("batch", "batch size, tokens a step", sizes, ",")


def _curves(arm: Arm) -> Figure | None:
    """Loss over learning rate, with a colour for each batch size."""
    if not arm.is_grid:
        return None
    losses = [loss for at_batch in arm.losses.values() for of_seeds in at_batch.values() for loss in of_seeds]
    low, high = min(losses), max(losses)
    bottom = low - ROOM_BELOW * (high - low)
    y = linear("loss", "final validation loss, nats per token")
    y["scale"] |= {"domainMin": bottom}
    sizes = [f"{batch:,}" for batch in sorted({*arm.losses, *arm.diverged})]
    encoding = {
        "x": log("lr", "peak learning rate", {run.lr for run in arm.runs}, "~r"),
        "y": y,
        "color": coloured("size", "tokens a step", sizes, "batch"),
        "opacity": faint_unless_isolated("size"),
    }
    points = _points(arm, low, high)
    means = [{"lr": lr, "loss": mean, "size": f"{batch:,}"} for (batch, lr), mean in sorted(arm.means.items())]
    fitted = _fitted(arm)
    layers: list[Spec] = [
        {"data": {"values": means}, "mark": {"type": "line", "strokeWidth": 1}, "params": isolated("size")},
        {
            "data": {"values": fitted},
            "mark": {"type": "area", "opacity": 0.15, "stroke": "transparent", "clip": True},
            "encoding": {**INTERVAL, "opacity": None, "color": None, "fill": {**encoding["color"], "legend": None}},
        },
        {"data": {"values": fitted}, "mark": {"type": "line", "strokeWidth": 2.5}},
        *points,
        *_minima(arm),
        *_lowest(arm),
        _labels_at_ends(means, y, low, high),
    ]
    layers = [layer for layer in layers if layer["data"]["values"]]
    spec = {"layer": layers, "encoding": encoding, "padding": LABELLED}
    near = {"scale": {"domain": [bottom, _ceiling(arm)], "clamp": True}}
    control = Control("Losses", {"all": {}, "near the lowest": {"encoding": {"y": near}}})
    controls = [control] if _ceiling(arm) < high else []
    drawn = sum(len(layer["data"]["values"]) for layer in points)
    text = _caption_of_curves(arm, len(arm.runs) - drawn)
    return figure("curves", "Loss against learning rate", text, spec, controls=controls, is_wide=True)


def _caption_of_curves(arm: Arm, unfinished: int) -> str:
    without_curve = _without_optimum(arm)
    return caption(
        "Each point is a run, and a click opens it. Thin lines join the means over seeds.",
        "Thick lines are fitted curves with their 68% intervals; diamonds are their minima, bars the 95% intervals of "
        "these."
        if arm.curves.optima
        else "",
        "Hollow points are outliers, which hardly count." if arm.outliers else "",
        "Crosses at the top are runs that diverged." if arm.diverged else "",
        f"No curve is fitted at {without_curve}." if without_curve else "",
        not_shown(unfinished, "without a final validation loss"),
    )


def _fitted(arm: Arm) -> list[Spec]:
    """Points of the fitted curves, with their 68% intervals, over the learning rates that were run."""
    points = []
    for batch in arm.curves.optima:
        assert arm.curves.posterior is not None
        lrs = sorted(arm.losses[batch])
        octaves = np.linspace(math.log2(lrs[0]), math.log2(lrs[-1]), SAMPLES)
        losses = arm.curves.posterior.loss(batch, octaves)
        low, middle, high = np.quantile(losses, [(1 - CENTRAL) / 2, 0.5, (1 + CENTRAL) / 2], axis=0)
        for octave, *of_point in zip(octaves.tolist(), low.tolist(), middle.tolist(), high.tolist(), strict=True):
            below, loss, above = of_point
            points.append({"lr": 2**octave, "loss": loss, "low": below, "high": above, "size": f"{batch:,}"})
    return points


def _points(arm: Arm, low: float, high: float) -> list[Spec]:
    """Layers of the runs: those that count, outliers, and above all losses those that diverged."""
    outliers = {run.name for run, _ in arm.outliers}
    completed = [run for run in arm.runs if run.loss in arm.losses.get(run.batch, {}).get(run.lr, ())]
    used = [{"lr": run.lr, "loss": run.loss, **_of_run(run)} for run in completed if run.name not in outliers]
    hollow = [{"lr": run.lr, "loss": run.loss, **_of_run(run)} for run in completed if run.name in outliers]
    rows = {batch: row for row, batch in enumerate(sorted({*arm.losses, *arm.diverged}), 1)}  # one for each batch size
    diverged = [
        {"lr": run.lr, "loss": high + rows[run.batch] * MARGIN * (high - low), **_of_run(run)}
        for run in arm.runs
        if run.lr in arm.diverged.get(run.batch, ())
    ]
    of_run = {"tooltip": tooltip("run", "lr", "size", "seed", "loss"), "href": {"field": "href"}}
    return [
        {"data": {"values": used}, "mark": {"type": "point", "filled": True, "size": 60}, "encoding": of_run},
        {"data": {"values": hollow}, "mark": {"type": "point", "size": 60}, "encoding": of_run},
        {"data": {"values": diverged},
         "mark": {"type": "point", "shape": "cross", "angle": 45, "size": 90, "filled": True},
         "encoding": {"tooltip": tooltip("run", "lr", "size", "seed"), "href": {"field": "href"}}},
    ]  # fmt: skip


def _minima(arm: Arm) -> list[Spec]:
    """Layers of the minima of the fitted curves, with their intervals."""
    minima = [
        {"lr": o.lr, "low": o.low, "high": o.high, "loss": o.loss, "size": f"{batch:,}"}
        for batch, o in arm.curves.optima.items()
    ]
    return [
        {"data": {"values": minima}, "mark": {"type": "rule", "size": 5},
         "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"},
                      "tooltip": tooltip("size", "lr", "low", "high", "loss")}},
        {"data": {"values": minima}, "mark": {"type": "point", "shape": "diamond", "size": 130, "filled": True}},
    ]  # fmt: skip


def _lowest(arm: Arm) -> list[Spec]:
    """Layers of a ring around the lowest mean, and of its label."""
    lowest = []
    if arm.best is not None:
        batch, lr = arm.best
        lowest = [{"lr": lr, "loss": arm.means[arm.best], "size": f"{batch:,}", "label": f"lowest: {lr:.3g}"}]
    return [
        {"data": {"values": lowest}, "mark": {"type": "point", "size": 260, "strokeWidth": 2, "style": "best"},
         "encoding": {"color": None}},
        {"data": {"values": lowest}, "mark": {"type": "text", "style": "label", "dx": 0, "dy": 22, "align": "center",
                                              "fontWeight": "bold"},
         "encoding": {"text": {"field": "label"}}},
    ]  # fmt: skip


def _labels_at_ends(means: Sequence[Spec], y: Spec, low: float, high: float) -> Spec:
    """A layer of a label beside the last mean of each batch size."""
    ends = {point["size"]: point for point in means}
    heights = apart({size: point["loss"] for size, point in ends.items()}, low, high)
    labels = [{**point, "height": heights[size], "label": size} for size, point in ends.items()]
    return {"name": END_LABELS, "data": {"values": labels}, "mark": {"type": "text", "style": "label", "dx": 10},
            "encoding": {"y": {**y, "field": "height"}, "text": {"field": "label"}}}  # fmt: skip


def _of_run(run: Run) -> Spec:
    """What a point says of its run, and a link to the run's row on the page."""
    link = f"#run-{quote(os.fsencode(run.name), safe='')}"
    return {"size": f"{run.batch:,}", "seed": run.seed, "run": run.name, "href": link}


def _ceiling(arm: Arm) -> float:
    """A loss as far above the median of the cells as the lowest is below it: high losses must not use up a scale."""
    losses = list(arm.means.values())
    return min(max(losses), 2 * median(losses) - min(losses))


def _heat_map(arm: Arm) -> Figure | None:
    """Mean final loss of each cell."""
    if len(arm.losses) < 2 or arm.best is None:
        return None
    lrs = sorted({lr for at_batch in (*arm.losses.values(), *arm.diverged.values()) for lr in at_batch})
    batches = sorted({*arm.losses, *arm.diverged}, reverse=True)
    axis = {"labelAngle": 0, "labelOverlap": "greedy", "labelSeparation": 6}
    x = {**ordinal("rate", "peak learning rate", [f"{lr:.3g}" for lr in lrs]), "axis": axis}
    y = {**ordinal("size", "tokens a step", [f"{b:,}" for b in batches]), "axis": axis}
    # There are usually more learning rates than batch sizes, and a phone has more room for rows than for columns.
    turned = {"x": {**y, "sort": y["sort"][::-1]}, "y": {**x, "sort": x["sort"][::-1]}}
    on_a_phone = {"encoding": turned, "height": max(HEIGHT, ROW_HEIGHT * len(lrs))} if len(lrs) > len(batches) else {}
    layers = [*_tiles(arm), *_texts(arm, len(lrs), len(batches))]
    spec = {"layer": [layer for layer in layers if layer["data"]["values"]], "encoding": {"x": x, "y": y}}
    shown = {*arm.means, *((batch, lr) for batch, of_batch in arm.diverged.items() for lr in of_batch)}
    ceiling = _ceiling(arm)
    text = caption(
        "Mean loss over seeds, in which a run far from the others of its cell counts less. The lowest has a frame.",
        "In a grey cell, with a cross, a run diverged." if arm.diverged else "",
        "An empty cell has no completed run that counts." if len(shown) < len(lrs) * len(batches) else "",
        f"Losses above {ceiling:.3f} share one colour." if ceiling < max(arm.means.values()) else "",
    )
    is_wide = len(lrs) > MOST_COLUMNS // 2
    return figure("heatmap", "Loss of every cell", text, spec, on_a_phone=on_a_phone, is_wide=is_wide)


def _tiles(arm: Arm) -> list[Spec]:
    """Layers of a heat map's colours, and of the frame around the lowest mean."""
    cells = [{**_cell(batch, lr), "loss": mean, "seeds": len(arm.losses[batch][lr])}
             for (batch, lr), mean in arm.means.items()]  # fmt: skip
    scale = {"scheme": "viridis", "reverse": True, "domain": [min(arm.means.values()), _ceiling(arm)], "clamp": True}
    colour = {"field": "loss", "type": "quantitative", "title": "loss", "scale": scale, "legend": None}
    return [
        {"data": {"values": cells}, "mark": "rect",
         "encoding": {"color": colour, "tooltip": tooltip("size", "rate", "loss", "seeds")}},
        {"data": {"values": _diverged(arm)}, "mark": {"type": "rect", "style": "empty"}},
        {"data": {"values": [_cell(*arm.best)] if arm.best is not None else []},
         "mark": {"type": "rect", "filled": False, "style": "best", "strokeWidth": 4}},
    ]  # fmt: skip


def _texts(arm: Arm, columns: int, rows: int) -> list[Spec]:
    """Layers of the texts in a heat map's cells: losses where they fit, and crosses."""
    losses = [{**_cell(batch, lr), "loss": mean, "text": f"{mean:.3f}"} for (batch, lr), mean in arm.means.items()]
    middle = (min(arm.means.values()) + _ceiling(arm)) / 2
    ink = {"condition": {"test": f"datum.loss < {middle!r}", "value": "black"}, "value": "white"}
    return [
        {"name": END_LABELS if min(columns, rows) > MOST_COLUMNS_ON_A_PHONE else "losses",
         "data": {"values": losses if columns <= MOST_COLUMNS else []},
         "mark": {"type": "text"}, "encoding": {"text": {"field": "text"}, "color": ink}},
        {"data": {"values": _diverged(arm)}, "mark": {"type": "text"}, "encoding": {"text": {"value": "×"}}},
    ]  # fmt: skip


def _diverged(arm: Arm) -> list[Spec]:
    return [_cell(batch, lr) for batch, of_batch in arm.diverged.items() for lr in of_batch]


def _cell(batch: int, lr: float) -> Spec:
    return {"rate": f"{lr:.3g}", "size": f"{batch:,}"}


def _law(arm: Arm) -> Figure | None:
    """Best learning rate over batch size in log-log, with the law and the usual scaling rules."""
    law = arm.law
    if law is None:
        return None
    optima = [{"batch": b, "lr": o.lr, "low": o.low, "high": o.high} for b, o in arm.curves.optima.items()]
    names = {name: f"{name} ({slope:g})" for name, slope in SLOPES.items()}
    sizes = np.geomspace(min(law.sizes), max(law.sizes), SAMPLES)
    band, rules = [], []
    for size in map(float, sizes):
        low, high = law.interval_at(size)
        band.append({"batch": size, "lr": law.at(size), "low": low, "high": high})
    for name, slope in SLOPES.items():
        for size in (float(sizes[0]), float(sizes[-1])):
            rules.append({"batch": size, "lr": law.lr * (size / law.tokens) ** slope, "rule": names[name]})
    y = log("lr", "best learning rate")
    layers: list[Spec] = [
        {"data": {"values": band}, "mark": {"type": "area", "opacity": 0.2, "style": "band"}, "encoding": INTERVAL},
        {"data": {"values": band}, "mark": {"type": "line", "style": "accent"}, "encoding": {"y": y}},
        {"data": {"values": rules}, "mark": {"type": "line", "strokeDash": [4, 4], "strokeWidth": 1.5},
         "encoding": {"y": y, "color": coloured("rule", "rule (exponent)", list(names.values()), "rate")}},
        {"data": {"values": optima}, "mark": {"type": "rule", "size": 2, "style": "ink"}, "encoding": INTERVAL},
        {"data": {"values": optima}, "mark": DOT,
         "encoding": {"y": y, "tooltip": tooltip("batch", "lr", "low", "high")}},
    ]  # fmt: skip
    without = _without_optimum(arm)
    text = caption(
        f"The solid line is the fitted law, with an exponent of {law.exponent:.2f} (95% interval {law.low:.2f} to "
        f"{law.high:.2f}); the band is its 95% interval. Dashed lines are the usual rules, drawn through the centre of "
        "the fit.",
        f"Without an optimum, and not in the fit: {without}." if without else "",
    )
    return figure("law", "Best learning rate against batch size", text,
                   {"layer": layers, "encoding": {"x": _batch(law.sizes)}})  # fmt: skip


def _loss_at_optimum(arm: Arm) -> Figure | None:
    if len(arm.curves.optima) < 2:
        return None
    optima = []
    for batch, o in arm.curves.optima.items():
        optima.append({"batch": batch, "loss": o.loss, "low": o.loss_low, "high": o.loss_high})
    y = linear("loss", "loss at the best learning rate")
    layers: list[Spec] = [
        {"mark": {"type": "line", "style": "accent", "opacity": 0.5}, "encoding": {"y": y}},
        {"mark": {"type": "rule", "size": 2, "style": "ink"}, "encoding": INTERVAL},
        {"mark": DOT, "encoding": {"y": y, "tooltip": tooltip("batch", "loss", "low", "high")}},
    ]
    vertical, of_scale = noise_scale_lines([arm], arm.curves.by_batch)
    spec = {
        "data": {"values": optima},
        "layer": [*layers, *vertical],
        "encoding": {"x": _batch(arm.curves.by_batch)},
    }
    without = _without_optimum(arm)
    text = caption(
        "The fitted loss of each batch size at its own best learning rate, with 95% intervals.",
        of_scale,
        f"Without an optimum, and not shown: {without}." if without else "",
    )
    return figure("optima", "Loss at the optimum", text, spec)


def _iso_loss(arm: Arm) -> Figure | None:
    """Steps against tokens to reach one loss, with the hyperbola if there is one."""
    c = arm.critical
    if c is None or len(c.steps) < 2:
        return None
    points = [{"steps": s, "tokens": s * b, "batch": b} for b, s in c.steps.items()]
    layers: list[Spec] = [
        {"data": {"values": points}, "mark": DOT, "encoding": {"tooltip": tooltip("batch", "steps", "tokens")}},
        {"data": {"values": points}, "mark": {"type": "text", "style": "label"},
         "encoding": {"text": {"field": "batch", "type": "quantitative", "format": ","}}},
    ]  # fmt: skip
    if (h := c.hyperbola) is not None:
        curve = [
            {"steps": h.least_steps * (1 + h.tokens / b), "tokens": h.least_steps * (b + h.tokens)}
            for b in map(float, np.geomspace(min(c.steps), max(c.steps), SAMPLES))
        ]
        layers.insert(0, {"data": {"values": curve}, "mark": {"type": "line", "style": "accent", "order": False}})
    encoding = {"x": log("steps", "steps", form="~s"), "y": log("tokens", "tokens", form="~s")}
    absent = ", ".join(f"{batch:,}" for batch in sorted({run.batch for run in arm.runs} - {*c.steps}))
    whose = " of the averaged weights" if arm.averages else ""
    text = caption(
        f"Steps and tokens to reach a loss{whose} of {arm.target_loss:.4f}. Labels are tokens a step.",
        f"Not shown, because no run has completed: {absent}." if absent else "",
    )
    return figure("isoloss", "Steps and tokens to reach one loss", text, {"layer": layers, "encoding": encoding})


def _throughput(arm: Arm) -> Figure | None:
    points = [
        {"batch": run.batch, "speed": run.tokens_per_s, "lr": run.lr, "run": run.name}
        for run in arm.runs
        if run.tokens_per_s is not None
    ]
    if len({point["batch"] for point in points}) < 2:
        return None
    y = {**count("speed", "tokens per second"), "scale": {"nice": True}}
    spec = {
        "data": {"values": points},
        "mark": {"type": "point", "filled": True, "size": 50, "opacity": 0.6, "style": "accent"},
        "encoding": {
            "x": _batch({run.batch for run in arm.runs}),
            "y": y,
            "tooltip": tooltip("run", "lr", "batch", "speed"),
        },
    }
    text = caption(
        "Median over the steps of each run.", not_shown(len(arm.runs) - len(points), "without a logged step")
    )
    return figure("throughput", "Throughput", text, spec, is_diagnostic=True)
