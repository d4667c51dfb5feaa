"""The pictures of runs over their length: losses, and of a single run all else that is worth watching."""

from collections.abc import Callable, Iterable, Sequence

from gptexp.report.analysis import Arm
from gptexp.report.records import Point, Run, Step
from gptexp.report.spec import Figure, Spec, figure, log, number, shown

ZOOM = "Drag to move, shift and scroll to zoom."
THIN = 64  # points of a run, at most twice that, where several are drawn
BATCH, CRITICAL = "batch size in use", "critical batch size, measured"


def courses(arm: Arm) -> list[Figure]:
    """All that the runs allow; loss first."""
    found = [*_losses(arm), _noise_scale(arm), _cosine(arm)]
    if len(arm.runs) == 1:
        found += [_learning_rate(arm), _gradient_norm(arm), _clipping(arm), _speed(arm)]
    return [picture for picture in found if picture is not None]


def _losses(arm: Arm) -> list[Figure]:
    """Losses over tokens, steps and seconds: of several runs their validation, of one its training too."""
    alone = len(arm.runs) == 1
    points = []
    for run in arm.runs:
        told: list[tuple[str, Sequence[Point]]] = [("validation", run.val)]
        for of, course in (*told, ("training", run.train)) if alone else told:
            points += [
                {"tokens": p.tokens, "steps": p.step, "seconds": p.seconds, "loss": p.loss, "of": of, **_of_run(run)}
                for p in course
                if p.loss is not None
            ]
    if not points:
        return []
    y = number("loss", "loss, nats per token")
    colours = {"field": "of", "type": "nominal", "title": None, "scale": {"range": ["#35b779", "#440154"]}}
    encoding = _encoding(arm, y, shown("run", "rate", "size", "tokens", "loss"))
    if alone:
        encoding["color"] = colours
    what = "Validation and training loss" if alone else "Validation losses"
    return [
        figure(f"course-{field}", f"{what} over {title}", ZOOM, _lines(points, field, title, encoding))
        for field, title in (("tokens", "training tokens"), ("steps", "steps"), ("seconds", "seconds of training"))
    ]


def _noise_scale(arm: Arm) -> Figure | None:
    """Beside the batch sizes in use, and the critical one where the runs have measured it."""
    points = _values(arm, lambda step: step.noise_scale)
    if not points:
        return None
    rules = [{"value": batch, "what": BATCH} for batch in sorted({run.batch for run in arm.runs})]
    if arm.critical is not None and arm.critical.hyperbola is not None:
        rules.append({"value": arm.critical.hyperbola.tokens, "what": CRITICAL})
    encoding = _encoding(arm, log("value", "tokens", form="~s"), shown("run", "rate", "size", "tokens", "value"))
    dashes = {"field": "what", "type": "nominal", "title": None, "sort": [BATCH, CRITICAL],
              "scale": {"range": [[2, 3], [8, 3]]}}  # fmt: skip
    marked = {
        "data": {"values": rules},
        "mark": {"type": "rule", "color": "#555555"},
        "encoding": {"y": {"field": "value", "type": "quantitative"}, "strokeDash": dashes,
                     "tooltip": shown("what", "value")},
    }  # fmt: skip
    caption = (
        "The batch size at which a gradient's noise is as long as its signal, a running average; smaller batches are "
        "mostly noise, larger ones mostly repeat themselves. A proxy of the critical batch size: it takes updates to "
        "be plain gradient steps."
    )
    layers = [_lines(points, "tokens", "training tokens", encoding), marked]
    spec = {"layer": layers, "resolve": {"scale": {"strokeDash": "independent"}}}
    return figure("noise-scale", "Gradient noise scale", caption, spec)


def _cosine(arm: Arm) -> Figure | None:
    caption = (
        "Near 1 micro-batches agree on where to go, near 0 each goes its own way: early in training they agree, and a "
        "larger batch then buys little."
    )
    return _single(arm, "cosine", "Cosine of two micro-batches' gradients", caption, lambda step: step.cosine)


def _learning_rate(arm: Arm) -> Figure | None:
    return _single(arm, "learning-rate", "Learning rate", ZOOM, lambda step: step.lr)


def _gradient_norm(arm: Arm) -> Figure | None:
    caption = "Before clipping. A norm that climbs, or spikes again and again, announces a run that diverges."
    return _single(arm, "gradient-norm", "Gradient norm", caption, lambda step: step.grad_norm or None, log)


def _clipping(arm: Arm) -> Figure | None:
    caption = "Share of the steps since the last logged one whose gradient was shortened to optim.grad_clip."
    return _single(arm, "clipping", "Clipped steps", caption, lambda step: step.clip_fraction)


def _speed(arm: Arm) -> Figure | None:
    return _single(arm, "speed", "Tokens per second", ZOOM, lambda step: step.tokens_per_s)


def _single(
    arm: Arm,
    key: str,
    title: str,
    caption: str,
    of: Callable[[Step], float | None],
    scale: Callable[[str, str], Spec] = number,
) -> Figure | None:
    """One value of the logged steps over tokens, a line for each run."""
    points = _values(arm, of)
    if not points:
        return None
    encoding = _encoding(arm, scale("value", title.lower()), shown("run", "rate", "size", "tokens", "value"))
    return figure(key, title, caption, _lines(points, "tokens", "training tokens", encoding))


def _values(arm: Arm, of: Callable[[Step], float | None]) -> list[Spec]:
    few = len(arm.runs) == 1
    return [
        {"tokens": step.tokens, "value": value, **_of_run(run)}
        for run in arm.runs
        for step in (run.train if few else _thinned(run.train))
        if (value := of(step)) is not None
    ]


def _thinned(steps: list[Step]) -> Iterable[Step]:
    stride = max(1, len(steps) // THIN)
    return steps[stride - 1 :: stride]


def _of_run(run: Run) -> Spec:
    return {"run": run.name, "rate": f"{run.lr:.3g}", "size": f"{run.batch:,}"}


def _encoding(arm: Arm, y: Spec, tooltip: list[Spec]) -> Spec:
    """A line for each run; where there are several, coloured by learning rate and dashed by batch size."""
    encoding: Spec = {"y": y, "detail": [{"field": "run"}], "tooltip": tooltip}
    if len(arm.runs) > 1:
        rates = [f"{lr:.3g}" for lr in sorted({run.lr for run in arm.runs})]
        sizes = [f"{batch:,}" for batch in sorted({run.batch for run in arm.runs})]
        encoding["color"] = {"field": "rate", "type": "nominal", "title": "learning rate", "sort": rates,
                             "scale": {"scheme": "viridis"}}  # fmt: skip
        encoding["strokeDash"] = {"field": "size", "type": "nominal", "title": "tokens a step", "sort": sizes,
                                  "legend": {"symbolType": "stroke"}}  # fmt: skip
    return encoding


def _lines(points: list[Spec], field: str, title: str, encoding: Spec) -> Spec:
    """Lines over `field`, to be moved and zoomed."""
    return {
        "data": {"values": points},
        "mark": {"type": "line", "strokeWidth": 1.5, "clip": True},
        "encoding": {"x": {**number(field, title), "axis": {"format": "~s"}}, **encoding},
        "params": [{"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"},
                    "bind": "scales"}],
    }  # fmt: skip
