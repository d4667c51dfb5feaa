"""The coordinate check (arXiv 2203.03466, appendix D.1): its limits, its verdict and its picture. No torch.

In the first steps of training, activations must not grow or shrink with the width: then a learning rate means the same
at each width. The logits may shrink: at the initial weights, as 1 / sqrt(width), as the weights of the head do not.
"""

import math
from dataclasses import dataclass

import numpy as np

from gptexp.process.words import counted
from gptexp.reporting.charts.vega_lite import SCHEMA, Spec, coloured, log

# Activation -> the range of the slope of log mean |activation| against log width, at each step.
LIMITS = {"attention": (-0.25, 0.25), "mlp": (-0.25, 0.25), "logits": (-0.6, 0.1)}
PANEL_HEIGHT = 180  # pixels


@dataclass(frozen=True)
class Slope:
    value: float
    error: float  # its standard error, by the spread over the seeds; NaN for one seed

    def __str__(self) -> str:
        return f"{self.value:.2f}" if math.isnan(self.error) else f"{self.value:.2f} ± {self.error:.2f}"


@dataclass(frozen=True)
class Coordinates:
    """Mean |activation| at several widths, over the first steps of training."""

    what: str  # the parametrisation, in words
    widths: list[int]
    lr: float
    sizes: dict[str, list[list[list[float]]]]  # activation -> width -> seed -> step (0: initial weights)

    @property
    def steps(self) -> range:
        return range(len(next(iter(self.sizes.values()))[0][0]))

    def of_width(self, name: str, step: int) -> list[float]:
        """The geometric mean over the seeds at each width; NaN if a size is not a finite number above 0."""
        return [math.exp(np.mean(logs)) for logs in self._logs(name, step)]

    def slope(self, name: str, step: int) -> Slope:
        """The slope of the log of the size against the log of the width, by least squares."""
        logs, x = self._logs(name, step), np.log(self.widths)
        weights = (x - x.mean()) / np.square(x - x.mean()).sum()
        seeds = logs.shape[1]
        error = math.sqrt(float(weights**2 @ logs.var(axis=1, ddof=1)) / seeds) if seeds > 1 else math.nan
        return Slope(float(weights @ logs.mean(axis=1)), error)

    @property
    def slopes(self) -> dict[str, list[Slope]]:
        """Activation -> its slope at each step."""
        return {name: [self.slope(name, step) for step in self.steps] for name in LIMITS}

    @property
    def failures(self) -> list[str]:
        """A line for each activation whose slope leaves its limits, with the worst step. Empty: all is well."""
        lines = []
        for name, slopes in self.slopes.items():
            low, high = LIMITS[name]
            beyond = [max(low - slope.value, slope.value - high) for slope in slopes]
            beyond = [math.inf if math.isnan(distance) else distance for distance in beyond]
            worst = max(self.steps, key=lambda step: beyond[step])
            if beyond[worst] > 0:
                lines.append(
                    f"{name}: slope {slopes[worst]} after {counted(worst, 'step')}, not in {low:g} to {high:g}"
                )
        return lines

    def _logs(self, name: str, step: int) -> np.ndarray:
        """Logs of the sizes (widths, seeds); NaN for one that is not a finite number above 0."""
        sizes = np.array([[of_seed[step] for of_seed in seeds] for seeds in self.sizes[name]])
        return np.log(np.where(np.isfinite(sizes) & (sizes > 0), sizes, np.nan))


def picture(check: Coordinates) -> Spec:
    """A panel for each activation: its size against the width, with a line for each step."""
    points = [
        {"what": name, "width": width, "steps": f"{step}", "size": size}
        for name in LIMITS
        for step in check.steps
        for width, size in zip(check.widths, check.of_width(name, step), strict=True)
        if math.isfinite(size)
    ]
    x = log("width", "width", check.widths)
    return {
        "$schema": SCHEMA,
        "title": {
            "text": f"{check.what}; lr {check.lr:g}",
            "subtitle": check.failures or ["Every slope is within its limits."],
            "anchor": "start",
        },
        "data": {"values": points},
        "height": PANEL_HEIGHT,
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {**x, "scale": {**x["scale"], "base": 2}},
            "y": log("size", "mean |activation|", form="~g"),
            "color": coloured("steps", "after steps", [f"{step}" for step in check.steps], "batch"),
            "row": {"field": "what", "type": "nominal", "title": None, "sort": list(LIMITS)},
        },
        "resolve": {"scale": {"y": "independent"}},
    }
