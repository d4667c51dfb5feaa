"""Charts over the batch size, or over a size of the model: best learning rates, losses there, sharpness, speed."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from gptexp.process.words import uncapitalised
from gptexp.reporting.charts import vega_lite as vl
from gptexp.reporting.charts.vega_lite import Figure, Spec, caption, figure, tooltip
from gptexp.reporting.statistics.analysis import Arm
from gptexp.reporting.statistics.arms import transfers
from gptexp.reporting.statistics.law import SLOPES
from gptexp.reporting.statistics.noise_scale import at_the_end, lowest_measured
from gptexp.reporting.words.sharpness import at_best_lr

SAMPLES = 48  # points of a fitted curve
COLUMNS = 2  # columns of a legend of arms, whose entries are long
SHIFT = 1.06  # ratio by which points of neighbouring arms are moved apart along the batch sizes, so that none is hidden
SCALE_WITHIN = 16.0  # noise scales farther than this factor are not drawn, so that batch sizes keep enough room
NOISE_SCALE = (
    "A dashed vertical line is a gradient noise scale, at the end of the run with the lowest loss that measured it."
)
LOSS_CAPTION = "The fitted loss of each batch size at its own best learning rate, with 95% intervals."
PLAIN = "The largest eigenvalue of the Hessian of the loss on a fixed batch of training text."
PRECONDITIONED = (
    "The largest eigenvalue of the Hessian that AdamW's preconditioner leaves, and the threshold above which AdamW is "
    "unstable at the learning rate of the step (arXiv 2207.14484)."
)


def arm_charts(arms: Sequence[Arm]) -> Iterator[Figure]:
    """The charts of two or more arms; none for a single one, or without optima at two batch sizes or model sizes."""
    drawn = [arm for arm in arms if len(arm.curves.optima) > 1]
    if len(drawn) > 1:
        yield _lr_of_arms(drawn)
        yield _loss_of_arms(drawn)
    if len(arms) > 1:
        yield from _lr_by_model_size(arms)


def batches_without_optimum(arm: Arm) -> str:
    """The batch sizes without an optimum, each with the reason; empty if all have one."""
    reasons = {batch: curve.status for batch, curve in arm.curves.by_batch.items() if batch not in arm.curves.optima}
    return ", ".join(f"{batch:,} ({why})" for batch, why in reasons.items())


def law_chart(arm: Arm) -> Figure | None:
    """Best learning rate over batch size in log-log, with the law and the usual scaling rules."""
    law = arm.law
    if law is None:
        return None
    band, rules = [], []
    sizes = np.geomspace(min(law.sizes), max(law.sizes), SAMPLES).tolist()
    for size in sizes:
        low, high = law.interval_at(size)
        band.append({"batch": size, "lr": law.at(size), "low": low, "high": high})
    names = {name: f"{name} ({slope:g})" for name, slope in SLOPES.items()}
    for name, slope in SLOPES.items():
        for size in (sizes[0], sizes[-1]):
            rules.append({"batch": size, "lr": law.lr * (size / law.tokens) ** slope, "rule": names[name]})
    y = vl.log("lr", "best learning rate")
    colour = vl.coloured("rule", "rule (exponent)", list(names.values()), "rate")
    layers = [
        vl.layer("area", band, vl.INTERVAL, fillOpacity=0.2, style="band"),
        vl.layer("line", band, {"y": y}, style="accent"),
        vl.layer("line", rules, {"y": y, "color": colour}, strokeDash=[4, 4], strokeWidth=1.5),
        *_optimum_layers(_optima(arm, "lr"), y, {}, "ink"),
    ]
    without = batches_without_optimum(arm)
    text = caption(
        f"The solid line is the fitted law, with an exponent of {law.exponent:.2f} (95% interval {law.low:.2f} to "
        f"{law.high:.2f}); the band is its 95% interval. Dashed lines are the usual rules, drawn through the centre of "
        "the fit.",
        f"Without an optimum, and not in the fit: {without}." if without else "",
    )
    spec = {"layer": layers, "encoding": {"x": vl.batch_axis(law.sizes)}}
    return figure("law", "Best learning rate against batch size", text, spec)


def loss_chart(arm: Arm) -> Figure | None:
    """The loss at the optimum of each batch size, with the gradient noise scale."""
    if len(arm.curves.optima) < 2:
        return None
    points, y = _optima(arm, "loss"), vl.linear("loss", "loss at the best learning rate")
    noise_scales, scale_caption = noise_scale_lines([arm], arm.curves.by_batch)
    line = vl.layer("line", points, {"y": y}, style="accent", opacity=0.5)
    layers = [line, *_optimum_layers(points, y, {}, "ink"), noise_scales]
    without = batches_without_optimum(arm)
    text = caption(LOSS_CAPTION, scale_caption, f"Without an optimum, and not shown: {without}." if without else "")
    spec = {"layer": layers, "encoding": {"x": vl.batch_axis(arm.curves.by_batch)}}
    return figure("optima", "Loss at the optimum", text, spec)


def throughput_chart(arm: Arm) -> Figure | None:
    points = [
        {"batch": run.batch, "speed": run.tokens_per_s, "lr": run.lr, "run": run.name}
        for run in arm.runs
        if run.tokens_per_s is not None
    ]
    if len({point["batch"] for point in points}) < 2:
        return None
    encoding = {
        "x": vl.batch_axis({run.batch for run in arm.runs}),
        "y": {**vl.count("speed", "tokens per second"), "scale": {"nice": True}},
        "tooltip": tooltip("run", "lr", "batch", "speed"),
    }
    spec = vl.layer("point", points, encoding, filled=True, size=50, opacity=0.6, style="accent")
    missing = vl.not_shown(len(arm.runs) - len(points), "without a logged step")
    text = caption("Median over the steps of each run.", missing)
    return figure("throughput", "Throughput", text, spec, is_diagnostic=True)


def sharpness_charts(arm: Arm) -> Iterator[Figure]:
    """Charts of the plain sharpness, and of the preconditioned one with its threshold, if two batch sizes have values.

    Each run is a point of its sharpness; the threshold is a line without points.
    """
    measured = at_best_lr(arm)
    without = ", ".join(f"{batch:,}" for batch in arm.curves.by_batch if batch not in measured)
    for key, title, text, lines in (
        ("sharpness-batch", "Sharpness", PLAIN, ["hessian"]),
        ("preconditioned-batch", "Preconditioned sharpness", PRECONDITIONED, ["preconditioned", "threshold"]),
    ):
        points = [
            {"batch": batch, "value": value, "of": line, "lr": run.lr, "seed": run.seed, "run": run.name}
            for batch, of_batch in measured.items()
            for run, last in of_batch
            for line in lines
            if (value := getattr(last, line)) is not None and value > 0
        ]
        run_points = [point for point in points if point["of"] == lines[0]]
        if len({point["batch"] for point in run_points}) < 2:
            continue
        y, fields = vl.log("value", uncapitalised(title)), ("run", "of", "batch", "lr", "seed", "value")
        noise_scales, scale_caption = noise_scale_lines([arm], measured)
        means = {"y": {**y, "aggregate": "mean"}, **vl.dashed(lines)}
        layers = [
            vl.layer("line", points, means, style="accent"),
            vl.layer("point", run_points, {"y": y, "tooltip": tooltip(*fields)}, filled=True, size=80, style="ink"),
            noise_scales,
        ]
        text = caption(
            text,
            "At the end of training, at the learning rate of each batch size with the lowest mean loss. Each point is "
            "a run, and lines join the means over seeds.",
            scale_caption,
            f"Not measured at {without} tokens a step." if without else "",
        )
        spec = {"layer": layers, "encoding": {"x": vl.batch_axis(measured)}}
        yield figure(key, f"{title} against batch size", text, spec)


def _optima(arm: Arm, what: str, shift: float = 1.0) -> list[Spec]:
    """A point for each batch size of an arm that has an optimum, with the interval of `what`: "lr" or "loss".

    `shift`: factor from the batch size to the place of the point on the axis.
    """
    points = []
    for batch, o in arm.curves.optima.items():
        low, high = (o.low, o.high) if what == "lr" else (o.loss_low, o.loss_high)
        point = {"batch": batch, "aside": batch * shift, "lr": o.lr, "loss": o.loss, "low": low, "high": high}
        points.append({**point, "arm": arm.label})
    return points


def _optimum_layers(points: Sequence[Spec], y: Spec, x: Spec, style: str | None = None) -> list[Spec]:
    """Layers of points and of their 95% intervals. `x`: encoding of their x, if it is not that of the chart."""
    more = {"style": style} if style else {}
    batch = ["batch"] if "batch" in points[0] else []
    tooltips = {"tooltip": tooltip(*batch, y["field"], "low", "high")}
    return [
        vl.layer("rule", points, {**vl.INTERVAL, **x}, size=2, **more),
        vl.layer("point", points, {"y": y, **tooltips, **x}, filled=True, size=80, **more),
    ]


def noise_scale_lines(arms: Sequence[Arm], sizes: Collection[int]) -> tuple[Spec, str]:
    """A layer of vertical lines at the noise scale of each arm's run with the lowest loss, and text for the caption.

    `sizes` are the batch sizes on the axis, which extends to the lines. A noise scale that is farther than
    `SCALE_WITHIN` is only in the caption.
    """
    drawn, beyond = [], []
    for arm in arms:
        run = lowest_measured(arm.runs)
        scale = at_the_end(run) if run is not None else None
        if scale is None:
            continue
        if min(sizes) / SCALE_WITHIN <= scale.tokens <= max(sizes) * SCALE_WITHIN:
            drawn.append({"batch": scale.tokens, "low": scale.low, "high": scale.high, "arm": arm.label})
        else:
            beyond.append(f"{scale.tokens:,.0f} tokens" + (f" ({arm.label})" if len(arms) > 1 else ""))
    text = caption(
        NOISE_SCALE if drawn else "",
        f"The gradient noise scale is too far outside to be drawn: {', '.join(beyond)}." if beyond else "",
    )
    encoding = {"tooltip": tooltip("batch", "low", "high", batch="noise scale, tokens")}
    return vl.layer("rule", drawn, encoding, strokeDash=[4, 4]), text


def _shifted(arms: Sequence[Arm], what: str) -> list[Spec]:
    """The optima of all arms. Those of the same batch size lie side by side."""
    middle = (len(arms) - 1) / 2
    return [point for number, arm in enumerate(arms) for point in _optima(arm, what, SHIFT ** (number - middle))]


def _encoding_of_arms(arms: Sequence[Arm]) -> Spec:
    """The batch size, and a colour for each arm."""
    sizes = {batch for arm in arms for batch in arm.curves.optima}
    return {"x": vl.batch_axis(sizes), "color": _arm_colours([arm.label for arm in arms])}


def _lr_of_arms(arms: Sequence[Arm]) -> Figure:
    laws = [(arm, arm.law) for arm in arms if arm.law is not None]
    lines = [
        {"arm": arm.label, "batch": size, "lr": arm.curves.optima[size].lr if law.bends else law.at(size)}
        for arm, law in laws
        for size in law.sizes
    ]
    y, encoding = vl.log("lr", "best learning rate"), _encoding_of_arms(arms)
    beside = {"x": {**encoding["x"], "field": "aside"}}
    layers = [vl.layer("line", lines, {"y": y}, opacity=0.6), *_optimum_layers(_shifted(arms, "lr"), y, beside)]
    bent = [arm.label for arm, law in laws if law.bends]
    text = caption(
        "The optima of each arm with their 95% intervals.",
        "Lines are the fitted laws." if len(bent) < len(laws) else "",
        f"Lines join the optima of {' and of '.join(bent)}, which lie on a curve in log-log." if bent else "",
    )
    spec = {"layer": layers, "encoding": encoding}
    return figure("arms-lr", "Best learning rate against batch size, arm by arm", text, spec)


def _loss_of_arms(arms: Sequence[Arm]) -> Figure:
    points, y = _shifted(arms, "loss"), vl.linear("loss", "loss at the best learning rate")
    encoding = _encoding_of_arms(arms)
    beside = {"x": {**encoding["x"], "field": "aside"}}
    noise_scales, scale_caption = noise_scale_lines(arms, {point["batch"] for point in points})
    layers = [vl.layer("line", points, {"y": y}, opacity=0.6), *_optimum_layers(points, y, beside), noise_scales]
    spec = {"layer": layers, "encoding": encoding}
    return figure("arms-loss", "Loss at the optimum, arm by arm", caption(LOSS_CAPTION, scale_caption), spec)


def _lr_by_model_size(arms: Sequence[Arm]) -> Iterator[Figure]:
    """A chart of the best learning rate over each size of a model in which arms differ, for each batch size."""
    moves = transfers(arms)
    for key, batch in dict.fromkeys((move.key, move.batch) for move in moves):
        name = key.rpartition(".")[2]
        points: list[Spec] = [
            {"arm": move.label or name, "width": size, "lr": o.lr, "low": o.low, "high": o.high}
            for move in moves
            if (move.key, move.batch) == (key, batch)
            for size, o in move.optima.items()
        ]
        x, y = vl.log("width", key, {point["width"] for point in points}, "d"), vl.log("lr", "best learning rate")
        layers = [vl.layer("line", points, {"y": y}, opacity=0.6), *_optimum_layers(points, y, {})]
        colour = _arm_colours(list(dict.fromkeys(point["arm"] for point in points)))
        spec = {"layer": layers, "encoding": {"x": x, "color": colour}}
        text = f"The best learning rate at {batch:,} tokens a step, with 95% intervals."
        yield figure(f"arms-{name}-{batch}", f"Best learning rate against {key}", text, spec)


def _arm_colours(labels: Sequence[str]) -> Spec:
    """Encoding of arms, which have no order, by colours."""
    legend = {"columns": COLUMNS, "labelLimit": 0}
    return {"field": "arm", "type": "nominal", "title": "", "sort": list(labels), "legend": legend}
