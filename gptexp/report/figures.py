"""The pictures of a report, as Vega-Lite specifications: data and grammar, drawn by the page and into PNGs alike.

Fields of data have plain names: Vega-Lite reads dots and brackets in a name as paths.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptexp.report.analysis import Analysis, Arm
from gptexp.report.law import SLOPES

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
SAMPLES = 48  # points of a fitted curve
HEIGHT = 300


@dataclass(frozen=True)
class Figure:
    """One picture: `key` names files and anchors, `caption` says what is to be seen in it."""

    key: str
    title: str
    caption: str
    spec: Spec


def figures(analysis: Analysis) -> list[Figure]:
    """All pictures that the runs allow, arm by arm, those of single runs last."""
    found = []
    for number, arm in enumerate(analysis.arms):
        suffix = f"-{number}" if len(analysis.arms) > 1 else ""
        of_arm = [_curves(arm), _heat_map(arm), _law(arm), _loss_at_optimum(arm), _iso_loss(arm), *_courses(arm),
                  _throughput(arm)]  # fmt: skip
        found += [Figure(f"{f.key}{suffix}", f.title, f.caption, f.spec) for f in of_arm if f is not None]
    return found


def _figure(key: str, title: str, caption: str, spec: Spec) -> Figure:
    layers = {"$schema": SCHEMA, "width": "container", "height": HEIGHT, "description": f"{title}. {caption}"}
    return Figure(key, title, caption, {**layers, **spec, "config": {"legend": {"orient": "bottom", "columns": 4}}})


def _number(field: str, title: str) -> Spec:
    """An encoding of a quantity whose scale need not hold zero."""
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False}}


def _log(field: str, title: str, ticks: Iterable[float] = (), form: str = "~g") -> Spec:
    """An encoding on a logarithmic scale; `ticks`: where to put them, and no others."""
    axis = {"values": sorted(set(ticks)), "format": form, "labelOverlap": True} if ticks else {"format": form}
    scale = {"type": "log", "nice": False, "padding": 16}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def _batch(sizes: Iterable[int]) -> Spec:
    return _log("batch", "batch size, tokens a step", sizes, ",")


def _colour_of_batch(batches: list[int]) -> Spec:
    return {
        "field": "size", "type": "nominal", "title": "tokens a step", "sort": [f"{b:,}" for b in batches],
        "scale": {"scheme": {"name": "viridis", "extent": [0.0, 0.85]}},
    }  # fmt: skip


def _shown(*fields: str) -> list[Spec]:
    return [{"field": field} for field in fields]


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
    x = _log("lr", "peak learning rate", lrs, "~r")
    y = _number("loss", "final validation loss, nats per token")
    layers: list[Spec] = [
        {"data": {"values": fitted}, "mark": {"type": "line"}},
        {
            "data": {"values": runs},
            "mark": {"type": "point", "filled": True, "size": 60},
            "encoding": {"tooltip": _shown("run", "lr", "size", "seed", "loss")},
        },
        {
            "data": {"values": diverged},
            "mark": {"type": "point", "shape": "cross", "angle": 45, "size": 90, "filled": True},
            "encoding": {"tooltip": _shown("size", "lr")},
        },
        {
            "data": {"values": optima},
            "mark": {"type": "rule", "size": 5, "opacity": 0.6},
            "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"},
                         "tooltip": _shown("size", "lr", "low", "high", "loss")},
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
    return _figure("curves", "Loss against learning rate", caption, spec)


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
         "encoding": {"color": colour, "tooltip": _shown("batch", "lr", "loss", "seeds")}},
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
    return _figure("heatmap", "Loss of every cell", "Mean over seeds; the lowest is framed, grey diverged.", spec)


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
    y = _log("lr", "best learning rate")
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
         "encoding": {"y": y, "tooltip": _shown("batch", "lr", "low", "high")}},
    ]  # fmt: skip
    caption = (
        f"The fitted exponent is {law.exponent:.2f} ({law.low:.2f} to {law.high:.2f}); the band is the line's 95% "
        "interval, dashed lines are the rules of thumb through its middle."
    )
    return _figure("law", "Best learning rate against batch size", caption,
                   {"layer": layers, "encoding": {"x": _batch(law.sizes)}})  # fmt: skip


def _loss_at_optimum(arm: Arm) -> Figure | None:
    noise = arm.curves.noise
    if noise is None or len(arm.curves.optima) < 2:
        return None
    optima = [
        {"batch": b, "loss": o.loss, "low": o.loss - noise.t * o.loss_sd, "high": o.loss + noise.t * o.loss_sd}
        for b, o in arm.curves.optima.items()
    ]
    y = _number("loss", "loss at the best learning rate")
    layers: list[Spec] = [
        {"mark": {"type": "line", "color": "#3b528b", "opacity": 0.5}, "encoding": {"y": y}},
        {"mark": {"type": "rule", "size": 2},
         "encoding": {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}},
        {"mark": {"type": "point", "filled": True, "size": 80, "color": "black"},
         "encoding": {"y": y, "tooltip": _shown("batch", "loss", "low", "high")}},
    ]  # fmt: skip
    spec = {"data": {"values": optima}, "layer": layers, "encoding": {"x": _batch(arm.curves.of)}}
    return _figure("optima", "Loss at the optimum", "What each batch size reaches at its own best learning rate, "
                   "with 95% intervals.", spec)  # fmt: skip


def _iso_loss(arm: Arm) -> Figure | None:
    """Steps against tokens to one loss, with the hyperbola where it was fitted."""
    c = arm.critical
    if c is None or len(c.steps) < 2:
        return None
    points = [{"steps": s, "tokens": s * b, "batch": b} for b, s in c.steps.items()]
    layers: list[Spec] = [
        {"data": {"values": points}, "mark": {"type": "point", "filled": True, "size": 80, "color": "black"},
         "encoding": {"tooltip": _shown("batch", "steps", "tokens")}},
        {"data": {"values": points}, "mark": {"type": "text", "dx": 8, "align": "left"},
         "encoding": {"text": {"field": "batch", "type": "quantitative", "format": "~s"}}},
    ]  # fmt: skip
    if (h := c.hyperbola) is not None:
        curve = [
            {"steps": h.least_steps * (1 + h.tokens / b), "tokens": h.least_steps * (b + h.tokens)}
            for b in map(float, np.geomspace(min(c.steps), max(c.steps), SAMPLES))
        ]
        layers.insert(0, {"data": {"values": curve}, "mark": {"type": "line", "color": "#3b528b", "order": False}})
    encoding = {"x": _log("steps", "steps", form="~s"), "y": _log("tokens", "tokens", form="~s")}
    caption = f"What it takes to come to a loss of {arm.target_loss:.4f}; labels are tokens a step."
    return _figure("isoloss", "Steps and tokens to one loss", caption, {"layer": layers, "encoding": encoding})


def _courses(arm: Arm) -> list[Figure]:
    """Losses over tokens, steps and seconds: of several runs their validation, of one its training too."""
    alone = len(arm.runs) == 1
    points = [
        {"tokens": p.tokens, "steps": p.step, "seconds": p.seconds, "loss": p.loss, "run": run.name, "of": of,
         "rate": f"{run.lr:.3g}", "size": f"{run.batch:,}"}
        for run in arm.runs
        for of, course in (("validation", run.val), *([("training", run.train)] if alone else []))
        for p in course
        if p.loss is not None
    ]  # fmt: skip
    if not points:
        return []
    rates = [f"{lr:.3g}" for lr in sorted({run.lr for run in arm.runs})]
    sizes = [f"{batch:,}" for batch in sorted({run.batch for run in arm.runs})]
    colour = {
        "field": "rate",
        "type": "nominal",
        "title": "learning rate",
        "sort": rates,
        "scale": {"scheme": "viridis"},
    }
    encoding: Spec = {"y": _number("loss", "loss, nats per token"), "detail": [{"field": "run"}],
                      "tooltip": _shown("run", "rate", "size", "tokens", "loss")}  # fmt: skip
    if alone:
        encoding["color"] = {
            "field": "of",
            "type": "nominal",
            "title": None,
            "scale": {"range": ["#35b779", "#440154"]},
        }
    else:
        encoding["color"] = colour
        encoding["strokeDash"] = {"field": "size", "type": "nominal", "title": "tokens a step", "sort": sizes,
                                  "legend": {"symbolType": "stroke"}}  # fmt: skip
    found = []
    for field, title in (("tokens", "training tokens"), ("steps", "steps"), ("seconds", "seconds of training")):
        x = {**_number(field, title), "axis": {"format": "~s"}}
        spec = {
            "data": {"values": points}, "mark": {"type": "line", "strokeWidth": 1.5, "clip": True},
            "encoding": {"x": x, **encoding},
            "params": [{"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"},
                        "bind": "scales"}],
        }  # fmt: skip
        what = "Validation and training loss" if alone else "Validation losses"
        found.append(
            _figure(f"course-{field}", f"{what} over {title}", "Drag to move, shift and scroll to zoom.", spec)
        )
    return found


def _throughput(arm: Arm) -> Figure | None:
    points = [
        {"batch": run.batch, "rate": run.tokens_per_s, "lr": run.lr, "run": run.name}
        for run in arm.runs
        if run.tokens_per_s is not None
    ]
    if len({point["batch"] for point in points}) < 2:
        return None
    y = {**_number("rate", "tokens per second"), "axis": {"format": "~s"}, "scale": {"zero": True}}
    spec = {
        "data": {"values": points},
        "mark": {"type": "point", "filled": True, "size": 50, "opacity": 0.6},
        "encoding": {"x": _batch({run.batch for run in arm.runs}), "y": y, "tooltip": _shown("run", "lr", "rate")},
    }
    return _figure("throughput", "Throughput", "Median of each run's steps.", spec)
