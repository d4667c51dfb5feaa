"""The figures that show the arms of a sweep side by side."""

from collections.abc import Collection, Iterator, Sequence

from gptexp.reporting.charts.vega_lite import INTERVAL, Figure, Spec, caption, figure, linear, log, tooltip
from gptexp.reporting.statistics.analysis import Arm
from gptexp.reporting.statistics.arms import transfers
from gptexp.reporting.statistics.noise_scale import at_the_end, lowest_measured

COLUMNS = 2  # of a legend, whose entries are long
SHIFT = 1.06  # ratio of the places of neighbouring arms on the axis of batch sizes, so that none hides another
SCALE_WITHIN = 16.0  # largest factor from a batch size to a noise scale that is drawn, so that these keep enough room
NOISE_SCALE = (
    "A dashed vertical line is a gradient noise scale, at the end of the run with the lowest loss that measured it."
)


def figures_of_arms(arms: Sequence[Arm]) -> list[Figure]:
    """The figures of two or more arms; none for a single one, or without optima at two batch sizes or model sizes."""
    if len(arms) < 2:
        return []
    by_batch = [_by_batch(arms, "lr"), _by_batch(arms, "loss")]
    return [*filter(None, by_batch), *_by_size(arms)]


def noise_scale_lines(arms: Sequence[Arm], sizes: Collection[int]) -> tuple[list[Spec], str]:
    """A layer of vertical lines at the noise scale of each arm's run with the lowest loss, and what a caption says.

    The axis of the batch sizes `sizes` extends to the lines. A noise scale that is farther than `SCALE_WITHIN` is only
    in the caption.
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
    told = tooltip("batch", "low", "high", batch="noise scale, tokens")
    layer = {"data": {"values": drawn}, "mark": {"type": "rule", "strokeDash": [4, 4]}, "encoding": {"tooltip": told}}
    return ([layer] if drawn else []), text


def _by_batch(arms: Sequence[Arm], what: str) -> Figure | None:
    """Over the batch size, the best learning rate ("lr") of each arm, or the loss there ("loss")."""
    drawn = [arm for arm in arms if len(arm.curves.optima) > 1]
    if len(drawn) < 2:
        return None
    sizes = sorted({batch for arm in drawn for batch in arm.curves.optima})
    points: list[Spec] = []
    for number, arm in enumerate(drawn):
        aside = SHIFT ** (number - (len(drawn) - 1) / 2)
        for batch, o in arm.curves.optima.items():
            low, high = (o.low, o.high) if what == "lr" else (o.loss_low, o.loss_high)
            points.append({"arm": arm.label, "batch": batch, "aside": batch * aside, "lr": o.lr, "loss": o.loss,
                           "low": low, "high": high})  # fmt: skip
    x = log("batch", "batch size, tokens a step", sizes, ",")
    encoding = {"x": x, "color": _coloured([arm.label for arm in drawn])}
    beside = {**x, "field": "aside"}
    told = tooltip("batch", what, "low", "high")
    if what == "lr":
        laws = [(arm, arm.law) for arm in drawn if arm.law is not None]
        lines = [
            {"arm": arm.label, "batch": size, "lr": arm.curves.optima[size].lr if law.bends else law.at(size)}
            for arm, law in laws
            for size in law.sizes
        ]
        layers = _layers(lines, points, log("lr", "best learning rate"), told, beside)
        bent = [arm.label for arm, law in laws if law.bends]
        text = caption(
            "The optima of each arm with their 95% intervals.",
            "Lines are the fitted laws." if len(bent) < len(laws) else "",
            f"Lines join the optima of {' and of '.join(bent)}, which lie on a curve in log-log." if bent else "",
        )
        spec = {"layer": layers, "encoding": encoding}
        return figure("arms-lr", "Best learning rate against batch size, arm by arm", text, spec)
    layers = _layers(points, points, linear("loss", "loss at the best learning rate"), told, beside)
    vertical, of_scales = noise_scale_lines(drawn, sizes)
    text = caption("The fitted loss of each batch size at its own best learning rate, with 95% intervals.", of_scales)
    spec = {"layer": [*layers, *vertical], "encoding": encoding}
    return figure("arms-loss", "Loss at the optimum, arm by arm", text, spec)


def _by_size(arms: Sequence[Arm]) -> Iterator[Figure]:
    """The best learning rate over each size of a model in which arms differ, for each batch size."""
    all_of_them = transfers(arms)
    for key, batch in dict.fromkeys((t.key, t.batch) for t in all_of_them):
        name = key.rpartition(".")[2]
        points: list[Spec] = [
            {"arm": t.label or name, "width": size, "lr": o.lr, "low": o.low, "high": o.high}
            for t in all_of_them
            if (t.key, t.batch) == (key, batch)
            for size, o in t.optima.items()
        ]
        x = log("width", key, {point["width"] for point in points}, "d")
        layers = _layers(points, points, log("lr", "best learning rate"), tooltip("lr", "low", "high"), x)
        labels = list(dict.fromkeys(point["arm"] for point in points))
        spec = {"layer": layers, "encoding": {"x": x, "color": _coloured(labels)}}
        text = f"The best learning rate at {batch:,} tokens a step, with 95% intervals."
        yield figure(f"arms-{name}-{batch}", f"Best learning rate against {key}", text, spec)


def _layers(lines: Sequence[Spec], points: Sequence[Spec], y: Spec, told: Sequence[Spec], x: Spec) -> list[Spec]:
    """Layers of lines, of points and of their 95% intervals; `x` is that of the points."""
    return [
        {"data": {"values": lines}, "mark": {"type": "line", "opacity": 0.6}, "encoding": {"y": y}},
        {"data": {"values": points}, "mark": {"type": "rule", "size": 2}, "encoding": {**INTERVAL, "x": x}},
        {"data": {"values": points}, "mark": {"type": "point", "filled": True, "size": 80},
         "encoding": {"x": x, "y": y, "tooltip": told}},
    ]  # fmt: skip


def _coloured(labels: Sequence[str]) -> Spec:
    """Encoding of arms, which have no order, by colours."""
    return {
        "field": "arm",
        "type": "nominal",
        "title": "",
        "sort": list(labels),
        "legend": {"columns": COLUMNS, "labelLimit": 0},
    }
