"""Charts with a line per run over its training: loss and noise scale, and more of a single run or of a few."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from gptexp.process.words import counted, uncapitalised
from gptexp.reporting.charts.figures_of_sharpness import PLAIN, PRECONDITIONED
from gptexp.reporting.charts.vega_lite import (
    END_LABELS,
    LABELLED,
    MARGIN,
    MOST_LABELS,
    Control,
    Figure,
    Spec,
    apart,
    caption,
    coloured,
    count,
    dashed,
    faint_unless_isolated,
    figure,
    isolated,
    linear,
    log,
    not_shown,
    ordinal,
    tooltip,
)
from gptexp.reporting.listings.records import Point, Run, Sharpness, Step

ZOOM = "Drag to move, Shift and scroll to zoom, double-click to reset."
THIN, LEAST = 64, 8  # points of a run in a chart of several runs, at least; the fewer, the more runs
MOST_POINTS = 16_384  # in such a chart, about
SMOOTH, LEAST_SMOOTH = 0.05, 5  # of a run's logged steps, and steps: the window of the running mean of a loss
RUNNING = 0.1  # of a run's logged steps: the window of the running mean of the share of clipped steps
NEARLY_ALL = 0.98  # of the losses after the warm-up: a few spikes do not decide the range

AVERAGED = "averaged"  # the kind of loss that the averaged weights have
TITLES = {"training": "Training loss", "validation": "Validation loss", AVERAGED: "Validation loss, averaged weights"}

StepValue = Callable[[Step], float | None]
T = TypeVar("T")
BATCH, CRITICAL = "batch size in use", "critical batch size, measured"
LEGEND_CHARACTERS = 44  # of a row on a phone
LABEL_WIDTH = 0.12  # of a chart's width, about
IN_VIEW = "inrange(datum[over], domain('x')) && inrange(datum.smooth, domain('y'))"


@dataclass(frozen=True)
class Lines:
    """The runs that a chart draws, and how a reader tells them apart."""

    runs: Sequence[Run]
    labels: Mapping[str, str] | None = None  # of each run by its name; None: learning rate and batch size tell them
    critical_batch: float | None = None  # measured, in tokens

    @property
    def in_detail(self) -> bool:
        """Whether there is room for all points and for charts of every metric."""
        return len(self.runs) == 1 or (self.labels is not None and len(self.runs) <= MOST_LABELS)

    @property
    def in_legends(self) -> tuple[str, ...]:
        """The fields of the points that a click on a legend isolates."""
        return ("rate", "size") if self.labels is None else ("run",)

    @property
    def told_by(self) -> tuple[str, ...]:
        """The fields of the points that name the run in a tooltip."""
        return ("run", "rate", "size") if self.labels is None else ("run",)


def line_charts(lines: Lines) -> list[Figure]:
    """The charts that the runs have values for; loss first."""
    cosine = (
        "Near 1 the gradients have the same direction, and a larger batch helps little; this is usual early in "
        "training. Near 0 the gradients are orthogonal."
    )
    norm = "The norm before clipping. A norm that rises, or has repeated spikes, often precedes divergence."
    clipping = "Of the last tenth of the logged steps, the share whose gradient was clipped to optim.grad_clip."
    charts = [
        *_loss_charts(lines),
        _noise_scale(lines),
        _chart(lines, "cosine", "Cosine of two micro-batches' gradients", cosine, lambda step: step.cosine),
    ]
    if lines.in_detail:
        charts += [
            _chart(lines, "learning-rate", "Learning rate", ZOOM, lambda step: step.lr),
            _chart(lines, "gradient-norm", "Gradient norm", norm, lambda step: step.grad_norm or None, log),
            _chart(lines, "clipping", "Clipped steps", clipping, lambda step: step.clip_fraction, running=RUNNING),
            _chart(lines, "speed", "Tokens per second", ZOOM, lambda step: step.tokens_per_s),
            *_sharpness(lines),
        ]
    return [chart for chart in charts if chart is not None]


def _loss_charts(lines: Lines) -> list[Figure | None]:
    """Of a single run all losses in one chart, of labelled runs in several. Of other runs the validation losses.

    Of several runs of which none has been evaluated twice only the training loss.
    """
    if len(lines.runs) == 1:
        averaged = [AVERAGED] if lines.runs[0].val_ema else []
        return [_losses(lines, "loss", ["validation", *averaged, "training"])]
    validated = any(len(run.val) > 1 for run in lines.runs)
    if not validated:
        return [_losses(lines, "loss", ["training"])]
    charts = [_losses(lines, "loss", ["validation"]), _losses(lines, "averaged-loss", [AVERAGED])]
    if lines.labels is not None:
        charts.append(_losses(lines, "training-loss", ["training"]))
    return charts


def _losses(lines: Lines, key: str, kinds: Sequence[str]) -> Figure | None:
    """The losses of all runs over tokens, steps or time."""
    points = [point for run in lines.runs for kind in kinds for point in _course(lines, run, kind)]
    if not points:
        return None
    unit, points = _in_readable_time(points)
    low, high = _range(points)
    params = [{"name": "low", "value": low}, {"name": "high", "value": high}]
    over = _over(unit)
    between = {"domainMin": {"expr": "low"}, "domainMax": {"expr": "high"}, "zero": False, "nice": False}
    y = {**linear("smooth", "loss, nats per token"), "scale": between}
    spec = {
        "data": {"values": points},
        "params": [*params, {"name": "over", "value": "tokens"}],
        "layer": _loss_layers(lines, points, _end_labels(lines, points, low, high)),
        "encoding": {"x": over["tokens"], "y": y, **_told_apart(lines, kinds)},
        "padding": LABELLED,
    }
    single = len(lines.runs) == 1
    title = "Loss" if single else TITLES[kinds[0]]
    averaged = "Averaged: the validation loss of the averaged weights." if single and AVERAGED in kinds else ""
    text = caption(_smoothing(kinds), averaged, ZOOM, _absent_losses(lines, kinds, points, high))
    # In place of the labels at the ends:
    legend: Spec = {"encoding": {"color": {"legend": {"title": "loss", "symbolOpacity": 1}}}}
    controls = _loss_controls(over, params, kinds)
    return figure(key, title, text, spec, controls=controls, on_a_phone=legend if single else {}, is_wide=True)


def _over(unit: str) -> dict[str, Spec]:
    """The x axes that a reader can choose, by the field of the points that they show."""
    time = {**linear("time", f"{unit} of training"), "scale": {"zero": True, "nice": False}}
    return {"tokens": count("tokens", "training tokens"), "steps": count("steps", "steps"), "time": time}


def _loss_controls(over: Mapping[str, Spec], params: Sequence[Spec], kinds: Sequence[str]) -> list[Control]:
    """What a reader can choose in a chart of losses. `params`: those of the chart besides `over`."""
    axes = {
        name: {"encoding": {"x": x}, "params": [*params, {"name": "over", "value": name}]} for name, x in over.items()
    }
    to_log: Spec = {"encoding": {"y": {"scale": {"type": "log", "zero": None}}}}
    controls = [Control("Over", axes), Control("Axis", {"linear": {}, "log": to_log})]
    if "training" in kinds:
        controls.append(Control("Training loss", {"smoothed": {}, "as logged": {"encoding": {"y": {"field": "loss"}}}}))
    return controls


def _told_apart(lines: Lines, kinds: Sequence[str]) -> Spec:
    """Encoding by which a reader tells the lines of a chart of losses apart: runs, or the two losses of one run."""
    if len(lines.runs) > 1:
        return {**_per_run(lines), "tooltip": tooltip(*lines.told_by, "tokens", "steps", "loss")}
    colour = {**coloured("of", "loss", kinds, "batch"), "legend": None}
    return {**_per_run(lines), "color": colour, "tooltip": tooltip("of", "rate", "size", "tokens", "steps", "loss")}


def _loss_layers(lines: Lines, points: Sequence[Spec], labels: Sequence[Spec]) -> list[Spec]:
    """Layers of the lines, of the dots of evaluations, and of the labels at the ends."""
    line = {"type": "line", "strokeWidth": 1.75, "clip": True}
    layers: list[Spec] = [{"mark": line, "params": [_zoom(), *isolated(*lines.in_legends)]}]
    if len(lines.runs) == 1:
        layers.append({"mark": {**line, "strokeWidth": 1, "opacity": 0.3},
                       "encoding": {"y": {"field": "loss", "type": "quantitative"}},
                       "transform": [{"filter": "datum.of == 'training'"}]})  # fmt: skip
    if any(point["dot"] for point in points):
        layers.append({"mark": {"type": "point", "filled": True, "size": 20, "clip": True},
                       "transform": [{"filter": "datum.dot"}]})  # fmt: skip
    if labels:
        text = {"condition": {"test": IN_VIEW, "field": "label"}, "value": ""}
        layers.append({"name": END_LABELS, "data": {"values": labels},
                       "transform": [{"calculate": "datum.heights[over]", "as": "height"}],
                       "mark": {"type": "text", "style": "label", "clip": False},
                       "encoding": {"y": {"field": "height", "type": "quantitative"}, "text": text, "tooltip": None,
                                    "strokeDash": None}})  # fmt: skip
    return layers


def _smoothing(kinds: Sequence[str]) -> str:
    if "training" not in kinds:
        return ""
    return f"The training loss is a running mean over {SMOOTH:.0%} of the steps, at least {LEAST_SMOOTH} of them."


def _absent_losses(lines: Lines, kinds: Sequence[str], points: list[Spec], high: float) -> str:
    """What a chart of losses lacks, and why; empty if it has everything."""
    drawn = {point["run"] for point in points}
    diverged = sum(run.status == "diverged" and run.name in drawn for run in lines.runs)
    if len(lines.runs) == 1:
        of_kinds = {point["of"] for point in points}
        instead = "The run has no validation loss so far." if "validation" not in of_kinds else ""
        ends = "The line ends where the run diverged." if diverged else ""
    else:
        stands_in = "validation" not in kinds and all(len(run.val) < 2 for run in lines.runs)
        instead = "The training loss stands in for the validation loss, which no run has twice." if stands_in else ""
        why = "ends early, because its run" if diverged == 1 else "end early, because their runs"
        ends = f"{counted(diverged, 'line')} {why} diverged." if diverged else ""
    missing = "averaged weights" if kinds == [AVERAGED] else f"a {' or '.join(kinds)} loss"
    return caption(
        instead,
        not_shown(len(lines.runs) - len(drawn), f"without {missing}"),
        ends,
        "Lines have gaps where logged steps are missing." if _have_gaps(lines, drawn) else "",
        "Higher losses, as at the start, lie outside the axis." if any(p["smooth"] > high for p in points) else "",
    )


def _absent_values(lines: Lines, points: list[Spec]) -> str:
    """What a chart of another value lacks, and why; empty if it has everything."""
    drawn = {point["run"] for point in points}
    return caption(
        not_shown(len(lines.runs) - len(drawn), "that did not log it"),
        "Lines have gaps where logged steps are missing." if _have_gaps(lines, drawn) else "",
    )


def _have_gaps(lines: Lines, drawn: Collection[str]) -> bool:
    return any(run.gaps and run.name in drawn for run in lines.runs)


def _course(lines: Lines, run: Run, kind: str) -> list[Spec]:
    """The points of a run's validation or training loss, with the running mean of the training loss."""
    courses: dict[str, Sequence[Point]] = {"training": run.train, "validation": run.val, AVERAGED: run.val_ema}
    course = courses[kind]
    finite = [(point, point.loss) for point in course if point.loss is not None]
    around = max(LEAST_SMOOTH, round(SMOOTH * len(finite))) // 2 if kind == "training" else 0
    means = _running_mean([loss for _, loss in finite], around, around)
    dot = kind != "training" or len(finite) == 1
    counts = len(lines.runs) == 1 or run.status != "diverged"  # in the range of the losses
    smoothed = list(zip(finite, means, strict=True))
    return [
        {"tokens": p.tokens, "steps": p.step, "time": p.seconds, "loss": loss, "smooth": mean, "of": kind,
         "dot": dot, "settled": counts and p.tokens > run.warmup_tokens, **_labels(lines, run, p)}
        for (p, loss), mean in (_thinned(lines, smoothed) if kind == "training" else smoothed)
    ]  # fmt: skip


def _running_mean(values: Sequence[float], before: int, after: int) -> list[float]:
    """The mean of each value, those `before` it and those `after` it, as far as there are as many."""
    return [fmean(values[max(0, at - before) : at + after + 1]) for at in range(len(values))]


def _in_readable_time(points: Sequence[Spec]) -> tuple[str, list[Spec]]:
    """The unit that suits the longest run, and the points with their `time`, so far in seconds, in this unit."""
    longest = max(point["time"] for point in points)
    unit, seconds = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 120 else ("seconds", 1)
    return unit, [{**point, "time": point["time"] / seconds} for point in points]


def _range(points: list[Spec]) -> tuple[float, float]:
    """The range of nearly all losses after the warm-up, with a margin; of all losses until a run has got there.

    Of several runs, those that diverged do not count.
    """
    shown = sorted([point["smooth"] for point in points if point["settled"]] or [point["smooth"] for point in points])
    low, high = shown[0], shown[int(NEARLY_ALL * (len(shown) - 1))]
    margin = MARGIN * (high - low) or MARGIN
    return low - margin, high + margin


def _end_labels(lines: Lines, points: list[Spec], low: float, high: float) -> list[Spec]:
    """A label at the end of the lines of each run, or of each learning rate and batch size; none if there are many."""
    single, several_sizes = len(lines.runs) == 1, len({run.batch for run in lines.runs}) > 1
    with_loss = single or lines.labels is not None
    ends: dict[str, Spec] = {}
    for p in points:
        of_cell = f"{p['rate']}, {p['size']}" if several_sizes else p["rate"]
        name = p["of"] if single else p["short"] if with_loss else of_cell
        if name not in ends or p["tokens"] >= ends[name]["tokens"]:  # another seed may not be as far
            ends[name] = p
    ends = {name: p for name, p in ends.items() if low <= p["smooth"] <= high}
    if len(ends) > MOST_LABELS:
        return []
    heights = {over: _heights(ends, over, low, high) for over in ("tokens", "steps", "time")}
    return [
        {**p, "label": f"{name} {p['smooth']:.3f}" if with_loss else name,
         "heights": {over: of_labels[name] for over, of_labels in heights.items()}}
        for name, p in ends.items()
    ]  # fmt: skip


def _heights(ends: Mapping[str, Spec], over: str, low: float, high: float) -> dict[str, float]:
    """The heights of labels at the ends of lines over tokens, steps or time. Only labels side by side are moved."""
    names = sorted(ends, key=lambda name: float(ends[name][over]))
    groups: list[list[str]] = []
    for name, before in zip(names, [None, *names], strict=False):
        if before is None or ends[name][over] - ends[before][over] > LABEL_WIDTH * ends[names[-1]][over]:
            groups.append([])
        groups[-1].append(name)
    apart_in = [apart({name: ends[name]["smooth"] for name in group}, low, high) for group in groups]
    return {name: height for group in apart_in for name, height in group.items()}


def _noise_scale(lines: Lines) -> Figure | None:
    """Noise scale over tokens, with the batch sizes in use, which a ramp changes, and the measured critical one."""
    points = _values(lines, lambda step: step.noise_scale)
    if not points:
        return None
    ramped = {run.name: run for run in lines.runs if any(step.batch != run.batch for step in run.train)}
    fixed = {run.batch for run in lines.runs if run.name not in ramped}
    rules: list[Spec] = [{"value": batch, "what": BATCH} for batch in sorted(fixed)]
    if lines.critical_batch is not None:
        rules.append({"value": lines.critical_batch, "what": CRITICAL})
    sizes = [
        {"value": step.batch, "what": BATCH, "tokens": step.tokens, **_labels(lines, run, step)}
        for run in ramped.values()
        for step in run.train
    ]
    dashes = {"field": "what", "type": "nominal", "title": None, "sort": [BATCH, CRITICAL],
              "scale": {"range": [[2, 3], [8, 3]]}}  # fmt: skip
    used: list[Spec] = []
    if rules:
        used.append({"data": {"values": rules}, "mark": {"type": "rule", "style": "faint"}})
    if sizes:
        over = {"x": {"field": "tokens", "type": "quantitative"}, "detail": {"field": "run"}}
        line = {"type": "line", "style": "faint", "interpolate": "step-before"}
        used.append({"data": {"values": sizes}, "mark": line, "encoding": over})
    batches = {
        "layer": used,
        "encoding": {"y": {"field": "value", "type": "quantitative"}, "strokeDash": dashes,
                     "tooltip": tooltip("what", "value", value="tokens a step")},
    }  # fmt: skip
    scales = _lines(lines, points, log("value", "gradient noise scale, tokens", form="~s"))
    text = (
        "Running average of the batch size at which the noise in a gradient has the same norm as its signal. In "
        "smaller batches the noise is larger than the signal, in larger batches it is smaller. The noise scale is a "
        "proxy for the critical batch size, and assumes plain gradient steps."
    )
    spec = {"layer": [scales, batches], "resolve": {"scale": {"strokeDash": "independent"}}}
    text = caption(text, _absent_values(lines, points))
    return figure("noise-scale", "Gradient noise scale", text, spec, is_diagnostic=True)


def _chart(
    lines: Lines,
    key: str,
    title: str,
    text: str,
    value: StepValue,
    scale: Callable[[str, str], Spec] = linear,
    running: float = 0.0,
) -> Figure | None:
    """A chart of one value of the logged steps over tokens; `running`: the share of the steps to take the mean over."""
    points = _values(lines, value, running)
    if not points:
        return None
    text = caption(text, _absent_values(lines, points))
    return figure(key, title, text, _lines(lines, points, scale("value", uncapitalised(title))), is_diagnostic=True)


def _sharpness(lines: Lines) -> list[Figure]:
    """Charts of the largest eigenvalue of the Hessian, of the preconditioned one with its threshold, and of SAM's."""
    plain = caption(PLAIN, "It depends on how the model is parametrised, and is no limit of the learning rate of Adam.")
    sam = "How much that loss rises over a distance of 0.05 along its gradient (arXiv 2010.01412)."
    drawn = [
        ("sharpness", "Sharpness", plain, ["hessian"]),
        ("preconditioned-sharpness", "Preconditioned sharpness", PRECONDITIONED, ["preconditioned", "threshold"]),
        ("sam-sharpness", "Sharpness of SAM", sam, ["sam"]),
    ]
    found = []
    for key, title, text, kinds in drawn:
        points = [
            {"tokens": s.tokens, "value": value, "of": kind, **_labels(lines, run, s)}
            for run in lines.runs
            for kind in kinds
            for s in run.sharpness
            if (value := getattr(s, kind)) is not None and value > 0
        ]
        if not any(point["of"] == kinds[0] for point in points):
            continue
        spec = _lines(lines, points, log("value", uncapitalised(title)))
        spec["mark"]["point"] = {"size": 25}  # there are few
        spec["encoding"] |= {"tooltip": tooltip(*lines.told_by, "of", "tokens", "value"), **dashed(kinds)}
        found.append(figure(key, title, caption(text, _absent_values(lines, points)), spec, is_diagnostic=True))
    return found


def _thinned(lines: Lines, course: Sequence[T]) -> Sequence[T]:
    """Those of a run's points that the chart shows."""
    wanted = max(LEAST, min(THIN, MOST_POINTS // len(lines.runs)))
    stride = 1 if lines.in_detail else max(1, len(course) // wanted)
    return course[stride - 1 :: stride]


def _values(lines: Lines, value_of: StepValue, running: float = 0.0) -> list[Spec]:
    points: list[Spec] = []
    for run in lines.runs:
        steps = [(step, value) for step in _thinned(lines, run.train) if (value := value_of(step)) is not None]
        means = _running_mean([value for _, value in steps], max(0, round(running * len(steps)) - 1), 0)
        points += [
            {"tokens": step.tokens, "value": mean, **_labels(lines, run, step)}
            for (step, _), mean in zip(steps, means, strict=True)
        ]
    return points


def _labels(lines: Lines, run: Run, point: Point | Sharpness) -> Spec:
    """The run of a point; of a run with missing steps also the part of its line, which has a gap there."""
    label = {"run": lines.labels[run.name], "short": run.name} if lines.labels is not None else {}
    part = {"part": bisect_right(run.gaps, point.step, key=lambda gap: gap.stop)} if run.gaps else {}
    return {"run": run.name, "rate": f"{run.lr:.3g}", "size": f"{run.batch:,}", **label, **part}


def _per_run(lines: Lines) -> Spec:
    """One line per run.

    Runs with labels have a colour each. Other runs have a colour for each learning rate and a dash pattern for each
    batch size.
    """
    encoding: Spec = {"detail": [{"field": "run"}, {"field": "part"}]}
    if lines.labels is not None:
        names = [lines.labels[run.name] for run in lines.runs]
        columns = max(1, LEGEND_CHARACTERS // (max(map(len, names)) + 4))
        encoding["color"] = {"field": "run", "type": "nominal", "title": None, "sort": names,
                             "legend": {"columns": columns, "labelLimit": 0}}  # fmt: skip
        encoding["opacity"] = faint_unless_isolated(*lines.in_legends)
    elif len(lines.runs) > 1:
        rates = [f"{lr:.3g}" for lr in sorted({run.lr for run in lines.runs})]
        sizes = [f"{batch:,}" for batch in sorted({run.batch for run in lines.runs})]
        encoding["color"] = coloured("rate", "learning rate", rates, "rate")
        encoding["opacity"] = faint_unless_isolated(*lines.in_legends)
        if len(sizes) > 1:
            encoding["strokeDash"] = {**ordinal("size", "tokens a step", sizes), "legend": {"symbolType": "stroke"}}
    return encoding


def _lines(lines: Lines, points: list[Spec], y: Spec) -> Spec:
    """Lines over training tokens that the reader can move, zoom and isolate."""
    return {
        "data": {"values": points},
        "mark": {"type": "line", "strokeWidth": 1.5, "clip": True, "point": len(points) == 1},
        "encoding": {"x": count("tokens", "training tokens"), "y": y, **_per_run(lines),
                     "tooltip": tooltip(*lines.told_by, "tokens", "value", value=y["title"])},
        "params": [_zoom(), *isolated(*lines.in_legends)],
    }  # fmt: skip


def _zoom() -> Spec:
    return {"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"}
