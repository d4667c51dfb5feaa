"""Parts that all figures' Vega-Lite specifications share. The page and the PNGs are drawn from the same specifications.

Data fields have plain names, because Vega-Lite reads dots and brackets in a name as paths. Colours are named in the
specifications and defined by the theme, so that the page can change from light to dark.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gptexp.process.words import counted

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
HEIGHT = 320  # pixels
FONT_SIZE = 12  # pixels; smaller text is hard to read on a phone
MOST_LABELS = 12  # lines of a chart that are labelled at their ends
LABEL_ROOM = 1 / 18  # of a chart's height: needed by one label
MARGIN = 0.06  # of a range of losses, above and below it
END_LABELS = "ends"  # name of a layer of labels that a phone has no room for
LABELLED = {"left": 5, "top": 5, "bottom": 5, "right": 90}  # pixels around a chart whose lines are labelled

# Sequences of colours that differ in lightness as well as in hue, for the colour-blind. Batch sizes are cool, learning
# rates warm. On its background each has a contrast of 4.5 or more.
BATCH_COLOURS = {
    "light": ["#3b0f70", "#2f6cb3", "#0b7a75", "#4d7c0f"],
    "dark": ["#9a86e8", "#5aa5ea", "#3fc4b0", "#c3e06b"],
}
RATE_COLOURS = {
    "light": ["#5c1a66", "#b3294e", "#b4480a", "#8a6a00"],
    "dark": ["#b98be0", "#f0708f", "#f7a04a", "#f5dc6a"],
}
# Of runs, which have no order: the same colours, with different neighbours.
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
    on_a_phone: Spec = field(default_factory=dict)  # changes to the specification there, as a JSON merge patch
    is_diagnostic: bool = False  # of interest if something is wrong, or to few readers
    is_wide: bool = False


def figure(key: str, title: str, caption: str, spec: Spec, **more: Any) -> Figure:
    """A figure of `spec`. Names the data of each layer, so that a live page can replace them."""
    layers = [spec, *spec.get("layer", [])]
    for number, layer in enumerate(layer for layer in layers if "data" in layer):
        layer["data"] = {"name": f"data{number}", **layer["data"]}
    shared = {"$schema": SCHEMA, "width": "container", "height": HEIGHT, "description": f"{title}. {caption}"}
    return Figure(key, title, caption, {**shared, **spec}, **more)


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
            "ordinal": {"scheme": BATCH_COLOURS[brightness]},
            "ramp": {"scheme": RATE_COLOURS[brightness]},
            "category": RUN_COLOURS[brightness],
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


def caption(*sentences: str) -> str:
    """The sentences that are not empty."""
    return " ".join(filter(None, sentences))


def not_shown(runs: int, why: str) -> str:
    """A sentence on runs that a chart does not have, for example "2 runs without an evaluation are not shown."."""
    return f"{counted(runs, 'run')} {why} {'is' if runs == 1 else 'are'} not shown." if runs else ""


def linear(field: str, title: str) -> Spec:
    """Encoding of a number on a linear scale that need not include zero."""
    axis = {"format": "~r", "tickCount": 6}
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False}, "axis": axis}


def log(field: str, title: str, ticks: Iterable[float] = (), form: str = "~r") -> Spec:
    """Encoding of a number on a logarithmic scale, with ticks at `ticks` only if given; `form` formats them."""
    axis = {"values": sorted(set(ticks)), "format": form, "labelOverlap": True} if ticks else {"format": form}
    scale = {"type": "log", "nice": False, "padding": 16}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def count(field: str, title: str) -> Spec:
    """Encoding of a large number, with ticks as people write them: 0, 200k, 1.5M, 3B."""
    axis = {"labelExpr": "replace(format(datum.value, '~s'), 'G', 'B')", "tickCount": 6}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"zero": False, "nice": False},
        "axis": axis,
    }


def ordinal(field: str, title: str, values: Sequence[str]) -> Spec:
    """Encoding of ordered texts."""
    return {"field": field, "type": "ordinal", "title": title, "sort": list(values)}


def isolated(field: str) -> Spec:
    """A parameter that a click on an entry of the legend sets, so that the other lines can become faint."""
    return {"name": "isolated", "select": {"type": "point", "fields": [field]}, "bind": "legend"}


def tooltip(*fields: str) -> list[Spec]:
    return [{"field": field} for field in fields]


def apart(heights: Mapping[str, float], low: float, high: float) -> dict[str, float]:
    """Move labels at these heights apart, as far as each needs room on an axis from `low` to `high`.

    The order of the labels is kept, and their middle stays where it was.
    """
    room = (high - low) * LABEL_ROOM
    moved: dict[str, float] = {}
    above = -float("inf")
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        moved[name] = above = max(height, above + room)
    shift = sum(moved[name] - height for name, height in heights.items()) / max(1, len(heights))
    return {name: height - shift for name, height in moved.items()}
