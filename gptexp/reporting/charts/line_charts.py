"""Charts with a line per run over its training: losses and noise scale; for one run or a few, other metrics too."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from gptexp.process.terminal import printable
from gptexp.process.words import counted, uncapitalised
from gptexp.reporting.charts import vega_lite as vl
from gptexp.reporting.charts.batch_charts import PLAIN, PRECONDITIONED
from gptexp.reporting.charts.vega_lite import Control, Figure, Spec, caption, figure, tooltip
from gptexp.reporting.listings.records import Point, Run, Sharpness, Step

T = TypeVar("T")

ZOOM = "Drag to move, Shift and scroll to zoom, double-click to reset."
GAPS = "Lines have gaps where logged steps are missing."
THIN, LEAST = 64, 8  # each of several runs in a chart keeps at least THIN points, each of very many at least LEAST
MOST_POINTS = 16_384  # approximate limit of the points of all runs in such a chart
SMOOTH, LEAST_SMOOTH = 0.05, 5  # window of a loss's running mean: share of the logged steps; at least so many steps
RUNNING = 0.1  # window of the running mean of clipped steps: share of a run's logged steps
NEARLY_ALL = 0.98  # share of the losses after the warm-up that the axis shows, so that no spike decides its range

AVERAGED = "averaged"  # a kind of loss: that of the averaged weights
TITLES = {"training": "Training loss", "validation": "Validation loss", AVERAGED: "Validation loss, averaged weights"}
BATCH, CRITICAL = "batch size in use", "critical batch size, measured"
LEGEND_CHARACTERS = 44  # in a row of a legend on a phone
LABEL_WIDTH = 0.12  # approximate width of a label, as a share of the chart's width
IN_VIEW = "inrange(datum[over], domain('x')) && inrange(datum.smooth, domain('y'))"


@dataclass(frozen=True)
class Lines:
    """The runs that a chart draws, and how a reader tells them apart."""

    runs: Sequence[Run]
    labels: Mapping[str, str] | None = None  # by name of the run; None: learning rate and batch size tell runs apart
    critical_batch: float | None = None  # measured, in tokens

    @property
    def in_detail(self) -> bool:
        """Whether there is room for all points and for charts of every metric."""
        return len(self.runs) == 1 or (self.labels is not None and len(self.runs) <= vl.MOST_LABELS)

    @property
    def legend_fields(self) -> tuple[str, ...]:
        """The fields of a point by which a click on a legend isolates lines."""
        return ("rate", "size") if self.labels is None else ("run",)

    @property
    def tooltip_fields(self) -> tuple[str, ...]:
        """The fields of a point that name its run in a tooltip."""
        return ("run", "rate", "size") if self.labels is None else ("run",)

    @property
    def params(self) -> list[Spec]:
        """What a reader can do with the lines: move, zoom, isolate."""
        zoom = {"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"}
        return [zoom, *vl.isolated(*self.legend_fields)]


@dataclass(frozen=True)
class StepChart:
    """A chart over tokens of one value that is logged with each step."""

    key: str
    title: str
    caption: str
    value: Callable[[Step], float | None]
    scale: Callable[[str, str], Spec] = vl.linear
    running: float = 0.0  # share of the steps over which values are averaged
    in_detail: bool = True  # is drawn only where `Lines.in_detail` is true


STEP_CHARTS = (
    StepChart(
        "cosine",
        "Cosine of two micro-batches' gradients",
        "Near 1 the gradients have the same direction, and a larger batch helps little; this is usual early in "
        "training. Near 0 the gradients are orthogonal.",
        lambda step: step.cosine,
        in_detail=False,
    ),
    StepChart("learning-rate", "Learning rate", ZOOM, lambda step: step.lr),
    StepChart(
        "gradient-norm",
        "Gradient norm",
        "The norm before clipping. A norm that rises, or has repeated spikes, often precedes divergence.",
        lambda step: step.grad_norm or None,
        vl.log,
    ),
    StepChart(
        "clipping",
        "Clipped steps",
        "Of the last tenth of the logged steps, the share whose gradient was clipped to optim.grad_clip.",
        lambda step: step.clip_fraction,
        running=RUNNING,
    ),
    StepChart("speed", "Tokens per second", ZOOM, lambda step: step.tokens_per_s),
)
SHARPNESS = (  # key, title, caption, fields of `Sharpness`
    (
        "sharpness",
        "Sharpness",
        f"{PLAIN} It depends on how the model is parametrised, and is no limit of the learning rate of Adam.",
        ["hessian"],
    ),
    ("preconditioned-sharpness", "Preconditioned sharpness", PRECONDITIONED, ["preconditioned", "threshold"]),
    (
        "sam-sharpness",
        "Sharpness of SAM",
        "How much that loss rises over a distance of 0.05 along its gradient (arXiv 2010.01412).",
        ["sam"],
    ),
)


def line_charts(lines: Lines) -> list[Figure]:
    """The charts that the runs have values for; loss first."""
    charts = [*_loss_charts(lines), _noise_scale(lines)]
    charts += [_step_chart(lines, chart) for chart in STEP_CHARTS if lines.in_detail or not chart.in_detail]
    if lines.in_detail:
        charts += [*_metrics(lines), *_sharpness(lines)]
    return [chart for chart in charts if chart is not None]


def _loss_charts(lines: Lines) -> Iterator[Figure | None]:
    """One run: all losses in one chart. Several runs: one chart for each kind; training loss only if they have labels.

    If no run of several has been evaluated twice, there is a chart of the training loss alone.
    """
    if len(lines.runs) == 1:
        averaged = [AVERAGED] if lines.runs[0].val_ema else []
        yield _losses(lines, "loss", ["validation", *averaged, "training"])
    elif not any(len(run.val) > 1 for run in lines.runs):
        yield _losses(lines, "loss", ["training"])
    else:
        yield _losses(lines, "loss", ["validation"])
        yield _losses(lines, "averaged-loss", [AVERAGED])
        if lines.labels is not None:
            yield _losses(lines, "training-loss", ["training"])


def _losses(lines: Lines, key: str, kinds: Sequence[str]) -> Figure | None:
    """The losses of all runs over tokens, steps or time."""
    points = [point for run in lines.runs for kind in kinds for point in _loss_points(lines, run, kind)]
    if not points:
        return None
    unit, seconds = _unit_of_time(max(point["time"] for point in points))
    points = [{**point, "time": point["time"] / seconds} for point in points]
    low, high = _range(points)
    axes = {
        "tokens": vl.count("tokens", "training tokens"),
        "steps": vl.count("steps", "steps"),
        "time": vl.quantitative(
            "time", f"{unit} of training", scale={"zero": True, "nice": False}, axis={"format": "~r", "tickCount": 6}
        ),
    }
    params = [{"name": "low", "value": low}, {"name": "high", "value": high}]
    over = {name: [*params, {"name": "over", "value": name}] for name in axes}
    between = {"domainMin": {"expr": "low"}, "domainMax": {"expr": "high"}, "zero": False, "nice": False}
    y = {**vl.linear("smooth", "loss, nats per token"), "scale": between}
    spec = {
        "data": {"values": points},
        "params": over["tokens"],
        "layer": _loss_layers(lines, points, low, high),
        "encoding": {"x": axes["tokens"], "y": y, **_encode_losses(lines, kinds)},
        "padding": vl.LABELLED,
    }
    controls = [
        Control("Over", {name: {"encoding": {"x": x}, "params": over[name]} for name, x in axes.items()}),
        Control("Axis", {"linear": {}, "log": {"encoding": {"y": {"scale": {"type": "log", "zero": None}}}}}),
    ]
    if "training" in kinds:
        as_logged = {"encoding": {"y": {"field": "loss"}}}
        controls.append(Control("Training loss", {"smoothed": {}, "as logged": as_logged}))
    single = len(lines.runs) == 1
    # On a phone a legend replaces the labels at the ends.
    legend: Spec = {"encoding": {"color": {"legend": {"title": "loss", "symbolOpacity": 1}}}} if single else {}
    title = "Loss" if single else TITLES[kinds[0]]
    text = _loss_caption(lines, kinds, points, high)
    return figure(key, title, text, spec, controls=controls, on_a_phone=legend, is_wide=True)


def _encode_losses(lines: Lines, kinds: Sequence[str]) -> Spec:
    """Encoding that tells the lines of a chart of losses apart: by run, or for one run by kind of loss."""
    if len(lines.runs) > 1:
        return {**_encode_runs(lines), "tooltip": tooltip(*lines.tooltip_fields, "tokens", "steps", "loss")}
    colour = {**vl.coloured("of", "loss", kinds, "batch"), "legend": None}
    fields = ("of", "rate", "size", "tokens", "steps", "loss")
    return {**_encode_runs(lines), "color": colour, "tooltip": tooltip(*fields)}


def _loss_layers(lines: Lines, points: Sequence[Spec], low: float, high: float) -> list[Spec]:
    """Layers of lines, of dots at the evaluations, and of labels at the ends of lines."""
    layers = [{**vl.layer("line", strokeWidth=1.75, clip=True), "params": lines.params}]
    if len(lines.runs) == 1:
        as_logged = vl.layer("line", None, {"y": vl.quantitative("loss")}, strokeWidth=1, clip=True, opacity=0.3)
        layers.append({**as_logged, "transform": [{"filter": "datum.of == 'training'"}]})
    if any(point["dot"] for point in points):
        dots = vl.layer("point", filled=True, size=20, clip=True)
        layers.append({**dots, "transform": [{"filter": "datum.dot"}]})
    text = {"condition": {"test": IN_VIEW, "field": "label"}, "value": ""}
    encoding = {"y": vl.quantitative("height"), "text": text, "tooltip": None, "strokeDash": None}
    ends = vl.layer("text", _end_labels(lines, points, low, high), encoding, style="label", clip=False)
    to_height = [{"calculate": "datum.heights[over]", "as": "height"}]
    return [*layers, {"name": vl.END_LABELS, **ends, "transform": to_height}]


def _loss_caption(lines: Lines, kinds: Sequence[str], points: Sequence[Spec], high: float) -> str:
    """What a chart of losses shows, what it lacks, and why."""
    drawn = {point["run"] for point in points}
    diverged = sum(run.status == "diverged" and run.name in drawn for run in lines.runs)
    averaged = instead = ends = ""
    if len(lines.runs) == 1:
        averaged = "Averaged: the validation loss of the averaged weights." if AVERAGED in kinds else ""
        if "validation" not in {point["of"] for point in points}:
            instead = "The run has no validation loss so far."
        if diverged:
            ends = "The line ends where the run diverged."
    else:
        if "validation" not in kinds and all(len(run.val) < 2 for run in lines.runs):
            instead = "The training loss stands in for the validation loss, which no run has twice."
        if diverged:
            why = "ends early, because its run" if diverged == 1 else "end early, because their runs"
            ends = f"{counted(diverged, 'line')} {why} diverged."
    smoothing = f"The training loss is a running mean over {SMOOTH:.0%} of the steps, at least {LEAST_SMOOTH} of them."
    missing = "averaged weights" if kinds == [AVERAGED] else f"a {' or '.join(kinds)} loss"
    return caption(
        smoothing if "training" in kinds else "",
        averaged,
        ZOOM,
        instead,
        vl.not_shown(len(lines.runs) - len(drawn), f"without {missing}"),
        ends,
        GAPS if _have_gaps(lines, points) else "",
        "Higher losses, as at the start, lie outside the axis." if any(p["smooth"] > high for p in points) else "",
    )


def _caption(lines: Lines, text: str, points: Sequence[Spec]) -> str:
    """The caption of a chart of other values than losses: `text`, and what the chart lacks."""
    missing = vl.not_shown(len(lines.runs) - len({point["run"] for point in points}), "that did not log it")
    return caption(text, missing, GAPS if _have_gaps(lines, points) else "")


def _have_gaps(lines: Lines, points: Sequence[Spec]) -> bool:
    drawn = {point["run"] for point in points}
    return any(run.gaps and run.name in drawn for run in lines.runs)


def _loss_points(lines: Lines, run: Run, kind: str) -> list[Spec]:
    """The points of one kind of loss of a run, with the running mean of the training loss."""
    curves: dict[str, Sequence[Point]] = {"training": run.train, "validation": run.val, AVERAGED: run.val_ema}
    finite = [(point, point.loss) for point in curves[kind] if point.loss is not None]
    around = max(LEAST_SMOOTH, round(SMOOTH * len(finite))) // 2 if kind == "training" else 0
    means = _running_mean([loss for _, loss in finite], around, around)
    dot = kind != "training" or len(finite) == 1
    counts = len(lines.runs) == 1 or run.status != "diverged"  # whether it decides the range of the axis
    smoothed = list(zip(finite, means, strict=True))
    return [
        {"tokens": p.tokens, "steps": p.step, "time": p.seconds, "loss": loss, "smooth": mean, "of": kind,
         "dot": dot, "settled": counts and p.tokens > run.warmup_tokens, **_run_fields(lines, run, p)}
        for (p, loss), mean in _thinned(lines, smoothed, THIN if kind == "training" else MOST_POINTS)
    ]  # fmt: skip


def _running_mean(values: Sequence[float], before: int, after: int) -> list[float]:
    """For each value, the mean of it, the `before` values before it and the `after` values after it, if they exist."""
    return [fmean(values[max(0, at - before) : at + after + 1]) for at in range(len(values))]


def _unit_of_time(longest: float) -> tuple[str, int]:
    """The unit that suits a time of `longest` seconds, and its length in seconds."""
    return ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 120 else ("seconds", 1)


def _range(points: Sequence[Spec]) -> tuple[float, float]:
    """The range of nearly all losses after the warm-up, with a margin.

    Diverged runs among several do not count. If no run has ended its warm-up, all losses count.
    """
    shown = sorted([point["smooth"] for point in points if point["settled"]] or [point["smooth"] for point in points])
    low, high = shown[0], shown[int(NEARLY_ALL * (len(shown) - 1))]
    margin = vl.MARGIN * (high - low) or vl.MARGIN
    return low - margin, high + margin


def _end_labels(lines: Lines, points: Sequence[Spec], low: float, high: float) -> list[Spec]:
    """A label at the line's end for each run, kind of loss, or learning rate and batch size; none if there are many."""
    single, several_sizes = len(lines.runs) == 1, len({run.batch for run in lines.runs}) > 1
    with_loss = single or lines.labels is not None
    ends: dict[str, Spec] = {}
    for p in points:
        of_cell = f"{p['rate']}, {p['size']}" if several_sizes else p["rate"]
        name = p["of"] if single else p["short"] if with_loss else of_cell
        if name not in ends or p["tokens"] >= ends[name]["tokens"]:  # another seed may have got less far
            ends[name] = p
    ends = {name: p for name, p in ends.items() if low <= p["smooth"] <= high}
    if len(ends) > vl.MOST_LABELS:
        return []
    heights = {over: _heights(ends, over, low, high) for over in ("tokens", "steps", "time")}
    return [
        {**p, "label": f"{name} {p['smooth']:.3f}" if with_loss else name,
         "heights": {over: of_labels[name] for over, of_labels in heights.items()}}
        for name, p in ends.items()
    ]  # fmt: skip


def _heights(ends: Mapping[str, Spec], over: str, low: float, high: float) -> dict[str, float]:
    """The heights of labels at the ends of lines over tokens, steps or time. Labels move only if others are close."""
    names = sorted(ends, key=lambda name: float(ends[name][over]))
    groups: list[list[str]] = []
    for name, before in zip(names, [None, *names], strict=False):
        if before is None or ends[name][over] - ends[before][over] > LABEL_WIDTH * ends[names[-1]][over]:
            groups.append([])
        groups[-1].append(name)
    apart_in = [vl.apart({name: ends[name]["smooth"] for name in group}, low, high) for group in groups]
    return {name: height for group in apart_in for name, height in group.items()}


def _noise_scale(lines: Lines) -> Figure | None:
    """Noise scale over tokens, measured critical batch size, and batch sizes in use, which a ramp changes."""
    points = _values(lines, lambda step: step.noise_scale)
    if not points:
        return None
    ramped = {run.name: run for run in lines.runs if any(step.batch != run.batch for step in run.train)}
    fixed = sorted({run.batch for run in lines.runs if run.name not in ramped})
    rules: list[Spec] = [{"value": batch, "what": BATCH} for batch in fixed]
    if lines.critical_batch is not None:
        rules.append({"value": lines.critical_batch, "what": CRITICAL})
    sizes = [
        {"value": step.batch, "what": BATCH, "tokens": step.tokens, **_run_fields(lines, run, step)}
        for run in ramped.values()
        for step in run.train
    ]
    over = {"x": vl.quantitative("tokens"), "detail": {"field": "run"}}
    used = [
        vl.layer("rule", rules, style="faint"),
        vl.layer("line", sizes, over, style="faint", interpolate="step-before"),
    ]
    dashes = {"field": "what", "type": "nominal", "title": None, "sort": [BATCH, CRITICAL],
              "scale": {"range": [[2, 3], [8, 3]]}}  # fmt: skip
    entries = tooltip("what", "value", value="tokens a step")
    batches = {
        "layer": [layer for layer in used if layer["data"]["values"]],
        "encoding": {"y": vl.quantitative("value"), "strokeDash": dashes, "tooltip": entries},
    }
    scales = _line_spec(lines, points, vl.log("value", "gradient noise scale, tokens", form="~s"))
    text = (
        "Running average of the batch size at which the noise in a gradient has the same norm as its signal. In "
        "smaller batches the noise is larger than the signal, in larger batches it is smaller. The noise scale is a "
        "proxy for the critical batch size, and assumes plain gradient steps."
    )
    spec = {"layer": [scales, batches], "resolve": {"scale": {"strokeDash": "independent"}}}
    return figure("noise-scale", "Gradient noise scale", _caption(lines, text, points), spec, is_diagnostic=True)


def _step_chart(lines: Lines, chart: StepChart) -> Figure | None:
    points = _values(lines, chart.value, chart.running)
    if not points:
        return None
    spec = _line_spec(lines, points, chart.scale("value", uncapitalised(chart.title)))
    return figure(chart.key, chart.title, _caption(lines, chart.caption, points), spec, is_diagnostic=True)


def _sharpness(lines: Lines) -> Iterator[Figure]:
    """Charts of the Hessian's largest eigenvalue, of the preconditioned one with its threshold, of SAM's sharpness."""
    for key, title, text, fields in SHARPNESS:
        points = [
            {"tokens": s.tokens, "value": value, "of": field, **_run_fields(lines, run, s)}
            for run in lines.runs
            for field in fields
            for s in run.sharpness
            if (value := getattr(s, field)) is not None and value > 0
        ]
        if not any(point["of"] == fields[0] for point in points):
            continue
        spec = _line_spec(lines, points, vl.log("value", uncapitalised(title)))
        spec["mark"]["point"] = {"size": 25}  # there are few points
        spec["encoding"] |= {"tooltip": tooltip(*lines.tooltip_fields, "of", "tokens", "value"), **vl.dashed(fields)}
        yield figure(key, title, _caption(lines, text, points), spec, is_diagnostic=True)


def _metrics(lines: Lines) -> Iterator[Figure]:
    """A chart of each metric that is not the validation's: of more texts, own ones (several by name in one), scores."""
    several = defaultdict[str, list[str]](list)
    for name in dict.fromkeys(name for run in lines.runs for name in run.metrics):
        is_one_of_several = name.startswith(("own/", "eval/")) and name.count("/") > 1
        several[name.rpartition("/")[0] if is_one_of_several else name].append(name)
    for name, of in several.items():
        short = {one: printable(one.removeprefix(f"{name}/")) for one in of}
        points = [
            {"tokens": point.tokens, "value": point.loss, "of": short[one], **_run_fields(lines, run, point)}
            for run in lines.runs
            for one in of
            for point in _thinned(lines, run.curves.get(one, []))
            if point.loss is not None
        ]
        spec = _line_spec(lines, points, vl.linear("value", printable(name)))
        spec["mark"]["point"] = {"size": 25} if not name.startswith("own/") else False  # evaluations are few
        if len(of) > 1:
            spec["encoding"]["detail"] = [*spec["encoding"]["detail"], {"field": "of"}]
            spec["encoding"]["tooltip"] = tooltip(*lines.tooltip_fields, "of", "tokens", "value")
            if len(lines.runs) == 1:
                spec["encoding"]["color"] = {
                    "field": "of", "type": "nominal", "title": None, "legend": {"columns": 2, "labelLimit": 0}
                }  # fmt: skip
        yield figure(re.sub(r"\W", "-", name), printable(name), _caption(lines, ZOOM, points), spec, is_diagnostic=True)


def _thinned(lines: Lines, points: Sequence[T], enough: int = THIN) -> Sequence[T]:
    """The points of a run that the chart shows, with the last one: at least `enough`, fewer of very many runs."""
    kept = max(LEAST, min(enough, MOST_POINTS // len(lines.runs)))
    stride = 1 if lines.in_detail else max(1, len(points) // kept)
    return points[(len(points) - 1) % stride :: stride]


def _values(lines: Lines, value_of: Callable[[Step], float | None], running: float = 0.0) -> list[Spec]:
    points: list[Spec] = []
    for run in lines.runs:
        steps = [(step, value) for step in _thinned(lines, run.train) if (value := value_of(step)) is not None]
        means = _running_mean([value for _, value in steps], max(0, round(running * len(steps)) - 1), 0)
        points += [
            {"tokens": step.tokens, "value": mean, **_run_fields(lines, run, step)}
            for (step, _), mean in zip(steps, means, strict=True)
        ]
    return points


def _run_fields(lines: Lines, run: Run, point: Point | Sharpness) -> Spec:
    """The fields that name a point's run. If steps are missing, also the part of its line, between two gaps."""
    label = {"run": lines.labels[run.name], "short": run.name} if lines.labels is not None else {}
    part = {"part": bisect_right(run.gaps, point.step, key=lambda gap: gap.stop)} if run.gaps else {}
    return {"run": run.name, "rate": f"{run.lr:.3g}", "size": f"{run.batch:,}", **label, **part}


def _encode_runs(lines: Lines) -> Spec:
    """Encoding of one line per run.

    Runs with labels have a colour each. Other runs have a colour for each learning rate and a dash pattern for each
    batch size.
    """
    encoding: Spec = {"detail": [{"field": "run"}, {"field": "part"}]}
    if lines.labels is not None:
        names = [lines.labels[run.name] for run in lines.runs]
        columns = max(1, LEGEND_CHARACTERS // (max(map(len, names)) + 4))
        encoding["color"] = {"field": "run", "type": "nominal", "title": None, "sort": names,
                             "legend": {"columns": columns, "labelLimit": 0}}  # fmt: skip
    elif len(lines.runs) > 1:
        rates = [f"{lr:.3g}" for lr in sorted({run.lr for run in lines.runs})]
        sizes = [f"{batch:,}" for batch in sorted({run.batch for run in lines.runs})]
        encoding["color"] = vl.coloured("rate", "learning rate", rates, "rate")
        if len(sizes) > 1:
            dashes = vl.ordinal("size", "tokens a step", sizes)
            encoding["strokeDash"] = {**dashes, "legend": {"symbolType": "stroke"}}
    if "color" in encoding:
        encoding["opacity"] = vl.faint_unless_isolated(*lines.legend_fields)
    return encoding


def _line_spec(lines: Lines, points: Sequence[Spec], y: Spec) -> Spec:
    """Lines over training tokens that the reader can move, zoom and isolate."""
    entries = tooltip(*lines.tooltip_fields, "tokens", "value", value=y["title"])
    encoding = {"x": vl.count("tokens", "training tokens"), "y": y, **_encode_runs(lines), "tooltip": entries}
    line = vl.layer("line", points, encoding, strokeWidth=1.5, clip=True, point=len(points) == 1)
    return {**line, "params": lines.params}
