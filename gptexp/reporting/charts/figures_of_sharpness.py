"""The figures of the sharpness at the end of runs against the batch size."""

from collections.abc import Mapping, Sequence

from gptexp.process.words import uncapitalised
from gptexp.reporting.charts.figures_of_arms import noise_scale_lines
from gptexp.reporting.charts.vega_lite import Figure, Spec, caption, dashed, figure, log, tooltip
from gptexp.reporting.listings.records import Run, Sharpness
from gptexp.reporting.statistics.analysis import Arm
from gptexp.reporting.words.sharpness import at_best_lr

PLAIN = "The largest eigenvalue of the Hessian of the loss on a fixed batch of training text."
PRECONDITIONED = (
    "The largest eigenvalue of the Hessian that AdamW's preconditioner leaves, and the threshold above which AdamW is "
    "unstable at the learning rate of the step (arXiv 2207.14484)."
)


def sharpness_by_batch(arm: Arm) -> list[Figure]:
    """The plain one, and the preconditioned one with its threshold; those that two batch sizes have."""
    measured = at_best_lr(arm)
    without = ", ".join(f"{batch:,}" for batch in arm.curves.by_batch if batch not in measured)
    vertical, of_scale = noise_scale_lines([arm], measured) if measured else ([], "")
    notes = caption(
        "At the end of training, at the learning rate of each batch size with the lowest mean loss. Each point is a "
        "run, and lines join the means over seeds.",
        of_scale,
        f"Not measured at {without} tokens a step." if without else "",
    )
    drawn = [
        _figure(
            "sharpness-batch", "Sharpness against batch size", caption(PLAIN, notes), measured, ["hessian"], vertical
        ),
        _figure(
            "preconditioned-batch",
            "Preconditioned sharpness against batch size",
            caption(PRECONDITIONED, notes),
            measured,
            ["preconditioned", "threshold"],
            vertical,
        ),
    ]
    return [found for found in drawn if found is not None]


def _figure(
    key: str,
    title: str,
    text: str,
    measured: Mapping[int, Sequence[tuple[Run, Sharpness]]],
    lines: Sequence[str],
    vertical: Sequence[Spec],
) -> Figure | None:
    """A figure of the fields `lines` of the sharpness; the runs are the points of the first. None below two sizes."""
    points = [
        {"batch": batch, "value": value, "of": line, "lr": run.lr, "seed": run.seed, "run": run.name}
        for batch, of_batch in measured.items()
        for run, last in of_batch
        for line in lines
        if (value := getattr(last, line)) is not None and value > 0
    ]
    if len({point["batch"] for point in points if point["of"] == lines[0]}) < 2:
        return None
    y = log("value", uncapitalised(title.partition(" against")[0]))
    told = tooltip("run", "of", "batch", "lr", "seed", "value")
    layers: list[Spec] = [
        {"mark": {"type": "line", "style": "accent"}, "encoding": {"y": {**y, "aggregate": "mean"}, **dashed(lines)}},
        {"mark": {"type": "point", "filled": True, "size": 80, "style": "ink"},
         "encoding": {"y": y, "tooltip": told}, "transform": [{"filter": f"datum.of == '{lines[0]}'"}]},
        *vertical,
    ]  # fmt: skip
    x = log("batch", "batch size, tokens a step", measured, ",")
    return figure(key, title, text, {"data": {"values": points}, "layer": layers, "encoding": {"x": x}})
