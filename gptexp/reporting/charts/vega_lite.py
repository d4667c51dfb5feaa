"""Parts that all figures' Vega-Lite specifications share. The page and the PNGs are drawn from the same specifications.

Data fields have plain names, because Vega-Lite reads dots and brackets in a name as paths. Colours are named in the
specifications and defined by the theme, so that the page can change from light to dark.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from gptexp.process.words import counted

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
HEIGHT = 320  # pixels
FONT_SIZE = 12  # pixels; smaller text is hard to read on a phone
MOST_LABELS = 12  # a chart with more lines has no labels at their ends
LABEL_ROOM = 1 / 18  # share of a chart's height that one label needs
MARGIN = 0.06  # share of a range of losses that is added above and below
TOOLTIPS = {  # field of a point -> its name in a tooltip, and the format of a number
    "run": ("run", ""), "of": ("line", ""), "what": ("line", ""), "rate": ("learning rate", ""),
    "lr": ("learning rate", ".4~g"), "size": ("tokens a step", ""), "batch": ("tokens a step", ","),
    "seed": ("seed", ""), "seeds": ("seeds", ","), "tokens": ("training tokens", ","), "steps": ("steps", ","),
    "loss": ("loss", ".4f"), "low": ("95% interval from", ".5~g"), "high": ("to", ".5~g"),
    "speed": ("tokens per second", ",.0f"), "value": ("value", ".5~g"),
    "number": ("run of the search", ","), "width": ("width of the interval", ".3~g"),
}  # fmt: skip
INTERVAL: Spec = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}
END_LABELS = "ends"  # name of a layer of labels that a phone has no room for
LABELLED = {"left": 5, "top": 5, "bottom": 5, "right": 90}  # pixels around a chart whose lines are labelled

# Sequences of colours whose lightness rises in equal steps, for the colour-blind. Batch sizes are cool, learning rates
# warm. Each has a contrast of 4.5 or more to its background.
BATCH_COLOURS = {
    "light": ["#3b0f70", "#1d4084", "#0b656d", "#4e800f"],
    "dark": ["#8a74de", "#62abef", "#60d6c0", "#d3f08a"],
}
RATE_COLOURS = {
    "light": ["#471157", "#7e1d48", "#9d3d0a", "#8e6e00"],
    "dark": ["#a372d2", "#f58aa2", "#fab56d", "#faea90"],
}
MOST_COLOURS = 12  # up to so many ordered values use the whole sequence of colours; more use its middle
# Runs have no order, so neighbouring colours differ clearly.
RUN_COLOURS = {
    "light": ["#2f6cb3", "#dd6a12", "#178f86", "#b3294e", "#3b0f70", "#c79a00", "#5aa832", "#5c1a66"],
    "dark": ["#5aa5ea", "#f7a04a", "#3fc4b0", "#f0708f", "#9a86e8", "#f5dc6a", "#c3e06b", "#b98be0"],
}
INK = {"light": "#1f2328", "dark": "#e6e8eb"}
FAINT_INK = {"light": "#57606a", "dark": "#a5adb8"}
GRID = {"light": "#e4e7ea", "dark": "#30363d"}
ACCENT = {"light": "#2f6cb3", "dark": "#5aa5ea"}
BEST = {"light": "#c2255c", "dark": "#ff7eb0"}
EMPTY = {"light": "#d5d8dc", "dark": "#3c434b"}


@dataclass(frozen=True)
class Control:
    """A choice that the reader has in a figure: the name of each option, and the changes to the specification.

    The changes are a JSON merge patch (RFC 7396). The first option changes nothing.
    """

    label: str
    options: Mapping[str, Spec]


@dataclass(frozen=True)
class Figure:
    """One figure. `key` names its PNG and its HTML element."""

    key: str
    title: str
    caption: str
    spec: Spec
    controls: list[Control] = field(default_factory=list)
    on_a_phone: Spec = field(default_factory=dict)  # changes to the specification on a phone, as a JSON merge patch
    is_diagnostic: bool = False  # of interest if something is wrong, or to few readers
    is_wide: bool = False


def figure(key: str, title: str, caption: str, spec: Spec, **more: Any) -> Figure:
    """A figure of `spec`, without its layers that have no values."""
    shared = {"$schema": SCHEMA, "width": "container", "height": HEIGHT, "description": f"{title}. {caption}"}
    layers = [layer for layer in spec.get("layer", ()) if "data" not in layer or layer["data"]["values"]]
    return Figure(key, title, caption, {**shared, **spec, **({"layer": layers} if layers else {})}, **more)


def layer(mark: str, values: Sequence[Spec] | None = None, encoding: Spec | None = None, **properties: Any) -> Spec:
    """A layer of marks with these properties, one for each of `values`; None: one for each value of the chart."""
    data = {"data": {"values": values}} if values is not None else {}
    return {**data, "mark": {"type": mark, **properties}, "encoding": encoding or {}}


def theme(brightness: str) -> Spec:
    """Vega-Lite's configuration of colours and fonts, for a "light" or a "dark" page."""
    ink, faint, grid = INK[brightness], FAINT_INK[brightness], GRID[brightness]
    label = {"labelColor": faint, "titleColor": ink, "labelFontSize": FONT_SIZE, "titleFontSize": FONT_SIZE,
             "titleFontWeight": "normal"}  # fmt: skip
    return {
        "background": "transparent",
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
        "view": {"stroke": "transparent"},
        "axis": {**label, "gridColor": grid, "domainColor": grid, "tickColor": grid, "titlePadding": 8},
        "legend": {**label, "orient": "bottom", "columns": 6, "symbolStrokeWidth": 2},
        "range": {
            "category": RUN_COLOURS[brightness],
            **_ranges("batch", BATCH_COLOURS[brightness]),
            **_ranges("rate", RATE_COLOURS[brightness]),
        },
        "text": {"fontSize": FONT_SIZE, "color": ink},
        "style": {
            "ink": {"color": ink, "fill": ink, "stroke": ink},
            "faint": {"color": faint, "stroke": faint},
            "accent": {"color": ACCENT[brightness], "stroke": ACCENT[brightness]},
            "band": {"color": ACCENT[brightness], "stroke": "transparent"},
            "best": {"color": BEST[brightness], "stroke": BEST[brightness]},
            "empty": {"color": EMPTY[brightness], "stroke": "transparent"},
            "label": {"fill": ink, "stroke": "transparent", "align": "left", "dx": 7},
        },
    }


def _ranges(sequence: str, colours: Sequence[str]) -> Spec:
    """The ranges that `coloured` uses. Vega's own choice is the middle of a sequence, whose colours are too alike."""
    counts = range(1, MOST_COLOURS + 1)
    return {sequence: {"scheme": colours}, **{f"{sequence}{n}": spread(colours, n) for n in counts}}


def spread(colours: Sequence[str], count: int) -> list[str]:
    """`count` colours at equal distances, from the first to the last; the middle one if it is the only one."""
    stops = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours]
    places = np.linspace(0, len(stops) - 1, count) if count > 1 else [(len(stops) - 1) / 2]
    channels = [np.interp(places, range(len(stops)), channel) for channel in zip(*stops, strict=True)]
    return ["#" + "".join(f"{round(value):02x}" for value in colour) for colour in zip(*channels, strict=True)]


def caption(*sentences: str) -> str:
    """A caption of the sentences that are not empty."""
    return " ".join(filter(None, sentences))


def not_shown(runs: int, why: str) -> str:
    """A sentence on runs that a chart does not have, for example "2 runs without an evaluation are not shown."."""
    return f"{counted(runs, 'run')} {why} {'is' if runs == 1 else 'are'} not shown." if runs else ""


def quantitative(field: str, title: str | None = None, **more: Any) -> Spec:
    """Encoding of a number. `more`: its scale, its axis, its format."""
    return {"field": field, "type": "quantitative", **({"title": title} if title is not None else {}), **more}


def linear(field: str, title: str) -> Spec:
    """Encoding of a number on a linear scale that need not include zero."""
    return quantitative(field, title, scale={"zero": False}, axis={"format": "~r", "tickCount": 6})


def log(field: str, title: str, ticks: Iterable[float] = (), form: str = "~r") -> Spec:
    """Encoding of a number on a logarithmic scale. If `ticks` are given, there are no others; `form` formats them."""
    axis = {"values": sorted(set(ticks)), "format": form, "labelOverlap": True} if ticks else {"format": form}
    return quantitative(field, title, scale={"type": "log", "nice": False, "padding": 16}, axis=axis)


def batch_axis(sizes: Iterable[int]) -> Spec:
    """Encoding of the batch size, with ticks at `sizes`, in tokens."""
    return log("batch", "batch size, tokens a step", sizes, ",")


def count(field: str, title: str) -> Spec:
    """Encoding of a large number, with ticks as people write them: 0, 200k, 1.5M, 3B."""
    axis = {"labelExpr": "replace(format(datum.value, '~s'), 'G', 'B')", "tickCount": 6}
    return quantitative(field, title, scale={"zero": True, "nice": False}, axis=axis)


def ordinal(field: str, title: str, values: Sequence[str]) -> Spec:
    """Encoding of ordered texts."""
    return {"field": field, "type": "ordinal", "title": title, "sort": list(values)}


def dashed(lines: Sequence[str]) -> Spec:
    """Encoding of the field `of`: the first of `lines` is solid, the second has dashes; empty for a single line."""
    dashes = {**ordinal("of", "", lines), "scale": {"range": [[1, 0], [6, 4]]}, "legend": {"symbolType": "stroke"}}
    return {"strokeDash": dashes} if len(lines) > 1 else {}


def coloured(field: str, title: str, values: Sequence[str], sequence: str) -> Spec:
    """Encoding of ordered texts by the colours of the sequence "batch" or "rate"."""
    count = f"{len(values)}" if len(values) <= MOST_COLOURS else ""
    return {**ordinal(field, title, values), "scale": {"range": f"{sequence}{count}"}}


def isolated(*fields: str) -> list[Spec]:
    """Parameters that clicks on the entries of the legends set, for `faint_unless_isolated`."""
    selects = {field: {"type": "point", "fields": [field]} for field in fields}
    return [{"name": f"isolated_{field}", "select": select, "bind": "legend"} for field, select in selects.items()]


def faint_unless_isolated(*fields: str) -> Spec:
    """Encoding of the opacity of what a click on a legend isolates. Without a click nothing is faint."""
    params = [{"param": f"isolated_{field}"} for field in fields]
    return {"condition": {"test": {"and": params}, "value": 1}, "value": 0.1}


def tooltip(*fields: str, **titles: str) -> list[Spec]:
    """Encoding of a tooltip with these fields, in words and rounded. `titles` replace those of `TOOLTIPS`."""
    entries = []
    for name in fields:
        title, form = TOOLTIPS[name]
        kind = {"type": "quantitative", "format": form} if form else {"type": "nominal"}
        entries.append({"field": name, "title": titles.get(name, title), **kind})
    return entries


def apart(heights: Mapping[str, float], low: float, high: float) -> dict[str, float]:
    """Move labels at these heights apart, as far as each needs room on an axis from `low` to `high`.

    Their order is kept. Labels that touch are moved around the middle of their heights, but not below the axis.
    """
    room = (high - low) * LABEL_ROOM
    placed: list[tuple[float, list[str]]] = []  # middle and labels of each group, the lowest group first
    for name in sorted(heights, key=lambda name: heights[name]):
        middle, group = heights[name], [name]
        while placed and middle - placed[-1][0] < room * (len(placed[-1][1]) + len(group)) / 2:
            group = placed.pop()[1] + group
            middle = max(fmean(heights[name] for name in group), low + room * (len(group) - 1) / 2)
        placed.append((middle, group))
    return {
        name: middle + room * (number - (len(group) - 1) / 2)
        for middle, group in placed
        for number, name in enumerate(group)
    }
