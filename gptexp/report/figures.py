"""The pictures of a sweep: what the cells' results say. Those of runs over their length are in courses.py."""

import math
from collections.abc import Iterable

import numpy as np

from gptexp.report.analysis import Analysis, Arm
from gptexp.report.courses import courses
from gptexp.report.law import SLOPES
from gptexp.report.spec import Figure, Spec, figure, log, number, shown

SAMPLES = 48  # points of a fitted curve


def figures(analysis: Analysis) -> list[Figure]:
    """All pictures that the runs allow, arm by arm, those of single runs last."""
    found = []
    for place, arm in enumerate(analysis.arms):
        suffix = f"-{place}" if len(analysis.arms) > 1 else ""
        of_arm = [_curves(arm), _heat_map(arm), _law(arm), _loss_at_optimum(arm), _iso_loss(arm), *courses(arm),
                  _throughput(arm)]  # fmt: skip
        found += [Figure(f"{f.key}{suffix}", f.title, f.caption, f.spec) for f in of_arm if f is not None]
    return found


def _batch(sizes: Iterable[int]) -> Spec:
    return log("batch", "batch size, tokens a step", sizes, ",")


def _colour_of_batch(batches: list[int]) -> Spec:
    return {
        "field": "size", "type": "nominal", "title": "tokens a step", "sort": [f"{b:,}" for b in batches],
        "scale": {"scheme": {"name": "viridis", "extent": [0.0, 0.85]}},
    }  # fmt: skip


def _curves(arm: Arm) -> Figure | None:
    """Loss over learning rate, a colour for each batch size."""
    if not arm.is_grid:
        return None
    batches = sorted({*arm.losses, *arm.diverged})
    runs = [
        {"lr": r.lr, "loss": r.loss, "size": f"{r.batch:,}", "seed": r.seed, "run": r.name}
        for r in arm.runs
        if r.loss is not None
    ]
    top = max(loss for at_batch in arm.losses.values() for of in at_batch.values() for loss in of)
    diverged = [{"lr": lr, "loss": top, "size": f"{b:,}"} for b, lrs in arm.diverged.items() for lr in lrs]
    fitted, optima = [], []
    for batch, o in arm.curves.optima.items():
        for octave in map(float, np.linspace(math.log2(o.parabola.lrs[0]), math.log2(o.parabola.lrs[-1]), SAMPLES)):
            fitted.append({"lr": 2**octave, "loss": o.parabola.at(octave), "size": f"{batch:,}"})
        optima.append({"lr": o.lr, "low": o.low, "high": o.high, "loss": o.loss, "size": f"{batch:,}"})
    colour = _colour_of_batch(batches)
    lrs = {r.lr for r in arm.runs}
    x = log("lr", "peak learning rate", lrs, "~r")
    y = number("loss", "final validation loss, nats per token")
    layers: list[Spec] = [
        {"data": {"values": fitted}, "mark": {"type": "line"}},
        {
            "data": {"values": runs},
            "mark": {"type": "point", "filled": True, "size": 60},
            "encoding": {"tooltip": shown("run", "lr", "size", "seed", "loss")},
        },
        {
            "data": {"values": diverged},
            "mark": {"type": "point", "shape": "cross", "angle": 45, "size": 90, "filled": True},
            "encoding": {"tooltip": shown("size", "lr")},
        },
        {
            "data": {"values": optima},
            "mark": {"type": "rule", "size": 5, "opacity": 0.6},
            "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"},
                         "tooltip": shown("size", "lr", "low", "high", "loss")},
        },
        {"data": {"values": optima}, "mark": {"type": "point", "shape": "diamond", "size": 130, "filled": True}},
    ]  # fmt: skip
    caption = (
        "Each point is a run; lines are the parabolas, drawn over the learning rates they were fitted to. Diamonds are "
        "their minima, bars the 95% intervals, which hold as far as the curve is a parabola; crosses at the top are "
        "runs that diverged."
    )
    spec = {"layer": [layer for layer in layers if layer["data"]["values"]],
            "encoding": {"x": x, "y": y, "color": colour}}  # fmt: skip
    return figure("curves", "Loss against learning rate", caption, spec)


def _heat_map(arm: Arm) -> Figure | None:
    """Mean final loss of each cell."""
    if len(arm.losses) < 2 or arm.best is None:
        return None
    cells = [
        {"lr": f"{lr:.3g}", "batch": f"{b:,}", "loss": mean, "text": f"{mean:.3f}", "seeds": len(arm.losses[b][lr])}
        for (b, lr), mean in arm.means.items()
    ]
    gone = [{"lr": f"{lr:.3g}", "batch": f"{b:,}", "what": "diverged"} for b, of in arm.diverged.items() for lr in of]
    lrs = sorted({lr for of in (*arm.losses.values(), *arm.diverged.values()) for lr in of})
    batches = sorted({*arm.losses, *arm.diverged}, reverse=True)
    losses = sorted(arm.means.values())
    # Cells that are far off would take all the colours there are.
    ceiling = min(losses[-1], 2 * losses[len(losses) * 3 // 4] - losses[0])
    colour = {
        "field": "loss", "type": "quantitative", "title": "loss",
        "scale": {"scheme": "viridis", "reverse": True, "domain": [losses[0], ceiling], "clamp": True},
    }  # fmt: skip
    dark = (losses[0] + ceiling) / 2
    best = [{"lr": f"{arm.best[1]:.3g}", "batch": f"{arm.best[0]:,}"}]
    layers: list[Spec] = [
        {"data": {"values": cells}, "mark": "rect",
         "encoding": {"color": colour, "tooltip": shown("batch", "lr", "loss", "seeds")}},
        {"data": {"values": gone}, "mark": {"type": "rect", "color": "#d0d0d0"}},
        {"data": {"values": best}, "mark": {"type": "rect", "filled": False, "stroke": "#d62728", "strokeWidth": 3}},
        {"data": {"values": cells}, "mark": {"type": "text", "fontSize": 12},
         "encoding": {"text": {"field": "text"},
                      "color": {"condition": {"test": f"datum.loss < {dark!r}", "value": "black"}, "value": "white"}}},
        {"data": {"values": gone}, "mark": {"type": "text", "color": "#333333"},
         "encoding": {"text": {"field": "what"}}},
    ]  # fmt: skip
    encoding = {
        "x": {"field": "lr", "type": "ordinal", "title": "peak learning rate", "sort": [f"{lr:.3g}" for lr in lrs],
              "axis": {"labelAngle": 0}},
        "y": {"field": "batch", "type": "ordinal", "title": "tokens a step", "sort": [f"{b:,}" for b in batches]},
    }  # fmt: skip
    spec = {"layer": [layer for layer in layers if layer["data"]["values"]], "encoding": encoding}
    return figure("heatmap", "Loss of every cell", "Mean over seeds; the lowest is framed, grey diverged.", spec)


def _law(arm: Arm) -> Figure | None:
    """Best learning rate over batch size in log-log, with the law and the rules of thumb."""
    law = arm.law
    if law is None:
        return None
    optima = [{"batch": b, "lr": o.lr, "low": o.low, "high": o.high} for b, o in arm.curves.optima.items()]
    reach = (law.high - law.low) / (2 * law.sd) if law.sd else 0.0  # standard errors to either side
    sizes = np.geomspace(min(law.sizes), max(law.sizes), SAMPLES)
    band, rules = [], []
    for size in map(float, sizes):
        octaves = math.log2(size / law.tokens)
        off = reach * math.hypot(law.lr_sd_octaves, octaves * law.sd)
        band.append({"batch": size, "lr": law.at(size), "low": law.at(size) * 2**-off, "high": law.at(size) * 2**off})
    for name, slope in SLOPES.items():
        for size in (float(sizes[0]), float(sizes[-1])):
            rules.append({"batch": size, "lr": law.lr * (size / law.tokens) ** slope, "rule": f"{name} ({slope:g})"})
    y = log("lr", "best learning rate")
    layers: list[Spec] = [
        {"data": {"values": band}, "mark": {"type": "area", "opacity": 0.2, "color": "#3b528b"},
         "encoding": {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}},
        {"data": {"values": band}, "mark": {"type": "line", "color": "#3b528b"}, "encoding": {"y": y}},
        {"data": {"values": rules}, "mark": {"type": "line", "strokeDash": [4, 4], "strokeWidth": 1.5},
         "encoding": {"y": y, "color": {"field": "rule", "type": "nominal", "title": "rule (exponent)",
                                        "sort": None, "scale": {"range": ["#777777", "#d95f02", "#1b7837"]}}}},
        {"data": {"values": optima}, "mark": {"type": "rule", "size": 2},
         "encoding": {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}},
        {"data": {"values": optima}, "mark": {"type": "point", "filled": True, "size": 80, "color": "black"},
         "encoding": {"y": y, "tooltip": shown("batch", "lr", "low", "high")}},
    ]  # fmt: skip
    caption = (
        f"The fitted exponent is {law.exponent:.2f} ({law.low:.2f} to {law.high:.2f}); the band is the line's 95% "
        "interval, dashed lines are the rules of thumb through its middle."
    )
    return figure("law", "Best learning rate against batch size", caption,
                   {"layer": layers, "encoding": {"x": _batch(law.sizes)}})  # fmt: skip


def _loss_at_optimum(arm: Arm) -> Figure | None:
    noise = arm.curves.noise
    if noise is None or len(arm.curves.optima) < 2:
        return None
    optima = [
        {"batch": b, "loss": o.loss, "low": o.loss - noise.t * o.loss_sd, "high": o.loss + noise.t * o.loss_sd}
        for b, o in arm.curves.optima.items()
    ]
    y = number("loss", "loss at the best learning rate")
    layers: list[Spec] = [
        {"mark": {"type": "line", "color": "#3b528b", "opacity": 0.5}, "encoding": {"y": y}},
        {"mark": {"type": "rule", "size": 2},
         "encoding": {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}},
        {"mark": {"type": "point", "filled": True, "size": 80, "color": "black"},
         "encoding": {"y": y, "tooltip": shown("batch", "loss", "low", "high")}},
    ]  # fmt: skip
    spec = {"data": {"values": optima}, "layer": layers, "encoding": {"x": _batch(arm.curves.of)}}
    return figure("optima", "Loss at the optimum", "What each batch size reaches at its own best learning rate, "
                   "with 95% intervals.", spec)  # fmt: skip


def _iso_loss(arm: Arm) -> Figure | None:
    """Steps against tokens to one loss, with the hyperbola where it was fitted."""
    c = arm.critical
    if c is None or len(c.steps) < 2:
        return None
    points = [{"steps": s, "tokens": s * b, "batch": b} for b, s in c.steps.items()]
    layers: list[Spec] = [
        {"data": {"values": points}, "mark": {"type": "point", "filled": True, "size": 80, "color": "black"},
         "encoding": {"tooltip": shown("batch", "steps", "tokens")}},
        {"data": {"values": points}, "mark": {"type": "text", "dx": 8, "align": "left"},
         "encoding": {"text": {"field": "batch", "type": "quantitative", "format": "~s"}}},
    ]  # fmt: skip
    if (h := c.hyperbola) is not None:
        curve = [
            {"steps": h.least_steps * (1 + h.tokens / b), "tokens": h.least_steps * (b + h.tokens)}
            for b in map(float, np.geomspace(min(c.steps), max(c.steps), SAMPLES))
        ]
        layers.insert(0, {"data": {"values": curve}, "mark": {"type": "line", "color": "#3b528b", "order": False}})
    encoding = {"x": log("steps", "steps", form="~s"), "y": log("tokens", "tokens", form="~s")}
    caption = f"What it takes to come to a loss of {arm.target_loss:.4f}; labels are tokens a step."
    return figure("isoloss", "Steps and tokens to one loss", caption, {"layer": layers, "encoding": encoding})


def _throughput(arm: Arm) -> Figure | None:
    points = [
        {"batch": run.batch, "rate": run.tokens_per_s, "lr": run.lr, "run": run.name}
        for run in arm.runs
        if run.tokens_per_s is not None
    ]
    if len({point["batch"] for point in points}) < 2:
        return None
    y = {**number("rate", "tokens per second"), "axis": {"format": "~s"}, "scale": {"zero": True}}
    spec = {
        "data": {"values": points},
        "mark": {"type": "point", "filled": True, "size": 50, "opacity": 0.6},
        "encoding": {"x": _batch({run.batch for run in arm.runs}), "y": y, "tooltip": shown("run", "lr", "rate")},
    }
    return figure("throughput", "Throughput", "Median of each run's steps.", spec)
