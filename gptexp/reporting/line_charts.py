"""Charts with a line per run over its training: losses and noise scale, and more of a single run."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from gptexp.reporting.analysis import Arm
from gptexp.reporting.records import Point, Run, Step
from gptexp.reporting.vega_lite import Figure, Spec, figure, linear, log, tooltip

ZOOM = "Drag to move. Hold Shift and scroll to zoom."
THIN = 64  # points per run in a chart of several runs: at least this many, at most twice as many
StepValue = Callable[[Step], float | None]
BATCH, CRITICAL = "batch size in use", "critical batch size, measured"


def line_charts(arm: Arm) -> list[Figure]:
    """The charts that the runs have values for; loss first."""
    cosine_caption = (
        "Near 1 the gradients have the same direction, and a larger batch helps little; this is usual early in "
        "training. Near 0 the gradients are orthogonal."
    )
    norm_caption = "The norm before clipping. A norm that rises, or has repeated spikes, often precedes divergence."
    clipping_caption = "Share of the steps since the last logged step whose gradient was clipped to optim.grad_clip."
    charts = [
        *_losses(arm),
        _noise_scale(arm),
        _chart(arm, "cosine", "Cosine of two micro-batches' gradients", cosine_caption, lambda step: step.cosine),
    ]
    if len(arm.runs) == 1:
        charts += [
            _chart(arm, "learning-rate", "Learning rate", ZOOM, lambda step: step.lr),
            _chart(arm, "gradient-norm", "Gradient norm", norm_caption, lambda step: step.grad_norm or None, log),
            _chart(arm, "clipping", "Clipped steps", clipping_caption, lambda step: step.clip_fraction),
            _chart(arm, "speed", "Tokens per second", ZOOM, lambda step: step.tokens_per_s),
        ]
    return [chart for chart in charts if chart is not None]


def _losses(arm: Arm) -> list[Figure]:
    """Validation losses over tokens, steps and seconds; of a single run the training loss too."""
    single = len(arm.runs) == 1
    points = []
    for run in arm.runs:
        losses: dict[str, Sequence[Point]] = {"validation": run.val, "training": run.train if single else []}
        for kind, course in losses.items():
            for p in course:
                if p.loss is not None:
                    at = {"tokens": p.tokens, "steps": p.step, "seconds": p.seconds}
                    points.append({**at, "loss": p.loss, "of": kind, **_labels(run, p)})
    if not points:
        return []
    y = linear("loss", "loss, nats per token")
    encoding = _encoding(arm, y, tooltip("run", "rate", "size", "tokens", "loss"))
    if single:
        encoding["color"] = {"field": "of", "type": "nominal", "title": None,
                             "scale": {"range": ["#35b779", "#440154"]}}  # fmt: skip
    what = "Validation and training loss" if single else "Validation losses"
    return [
        figure(f"course-{field}", f"{what} over {title}", ZOOM, _lines(points, field, title, encoding))
        for field, title in (("tokens", "training tokens"), ("steps", "steps"), ("seconds", "seconds of training"))
    ]


def _noise_scale(arm: Arm) -> Figure | None:
    """Noise scale over tokens, with rules at the batch sizes in use and at the measured critical batch size."""
    points = _values(arm, lambda step: step.noise_scale)
    if not points:
        return None
    rules = [{"value": batch, "what": BATCH} for batch in sorted({run.batch for run in arm.runs})]
    if arm.critical is not None and arm.critical.hyperbola is not None:
        rules.append({"value": arm.critical.hyperbola.tokens, "what": CRITICAL})
    encoding = _encoding(arm, log("value", "tokens", form="~s"), tooltip("run", "rate", "size", "tokens", "value"))
    dashes = {"field": "what", "type": "nominal", "title": None, "sort": [BATCH, CRITICAL],
              "scale": {"range": [[2, 3], [8, 3]]}}  # fmt: skip
    rule_layer = {
        "data": {"values": rules},
        "mark": {"type": "rule", "color": "#555555"},
        "encoding": {"y": {"field": "value", "type": "quantitative"}, "strokeDash": dashes,
                     "tooltip": tooltip("what", "value")},
    }  # fmt: skip
    caption = (
        "Running average of the batch size at which the noise in a gradient has the same norm as its signal. In "
        "smaller batches the noise is larger than the signal, in larger batches it is smaller. The noise scale is a "
        "proxy for the critical batch size, and assumes plain gradient steps."
    )
    layers = [_lines(points, "tokens", "training tokens", encoding), rule_layer]
    spec = {"layer": layers, "resolve": {"scale": {"strokeDash": "independent"}}}
    return figure("noise-scale", "Gradient noise scale", caption, spec)


def _chart(
    arm: Arm, key: str, title: str, caption: str, value: StepValue, scale: Callable[[str, str], Spec] = linear
) -> Figure | None:
    """A chart of one value of the logged steps over tokens."""
    points = _values(arm, value)
    if not points:
        return None
    encoding = _encoding(arm, scale("value", title.lower()), tooltip("run", "rate", "size", "tokens", "value"))
    return figure(key, title, caption, _lines(points, "tokens", "training tokens", encoding))


def _values(arm: Arm, value_of: StepValue) -> list[Spec]:
    points = []
    for run in arm.runs:
        stride = 1 if len(arm.runs) == 1 else max(1, len(run.train) // THIN)
        for step in run.train[stride - 1 :: stride]:
            if (value := value_of(step)) is not None:
                points.append({"tokens": step.tokens, "value": value, **_labels(run, step)})
    return points


def _labels(run: Run, point: Point) -> Spec:
    """The run of a point; of a run with missing steps also the part of its line, which has a gap there."""
    part = {"part": bisect_right(run.gaps, point.step, key=lambda gap: gap.stop)} if run.gaps else {}
    return {"run": run.name, "rate": f"{run.lr:.3g}", "size": f"{run.batch:,}", **part}


def _encoding(arm: Arm, y: Spec, fields: list[Spec]) -> Spec:
    """One line per run. Several runs have a colour for each learning rate and a dash pattern for each batch size."""
    encoding: Spec = {"y": y, "detail": [{"field": "run"}, {"field": "part"}], "tooltip": fields}
    if len(arm.runs) > 1:
        rates = [f"{lr:.3g}" for lr in sorted({run.lr for run in arm.runs})]
        sizes = [f"{batch:,}" for batch in sorted({run.batch for run in arm.runs})]
        encoding["color"] = {"field": "rate", "type": "nominal", "title": "learning rate", "sort": rates,
                             "scale": {"scheme": "viridis"}}  # fmt: skip
        encoding["strokeDash"] = {"field": "size", "type": "nominal", "title": "tokens a step", "sort": sizes,
                                  "legend": {"symbolType": "stroke"}}  # fmt: skip
    return encoding


def _lines(points: list[Spec], field: str, title: str, encoding: Spec) -> Spec:
    """Lines over `field` that the reader can move and zoom."""
    return {
        "data": {"values": points},
        "mark": {"type": "line", "strokeWidth": 1.5, "clip": True},
        "encoding": {"x": {**linear(field, title), "axis": {"format": "~s"}}, **encoding},
        "params": [{"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"},
                    "bind": "scales"}],
    }  # fmt: skip
