"""Parts that all figures' Vega-Lite specifications share. The page and the PNGs are drawn from the same specifications.

Data fields have plain names, because Vega-Lite reads dots and brackets in a name as paths.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
HEIGHT = 300


@dataclass(frozen=True)
class Figure:
    """One figure. `key` names its PNG and its HTML element."""

    key: str
    title: str
    caption: str
    spec: Spec


def figure(key: str, title: str, caption: str, spec: Spec) -> Figure:
    """A figure of `spec`. Names the data of each layer, so that a live page can replace them."""
    layers = [spec, *spec.get("layer", [])]
    for number, layer in enumerate(layer for layer in layers if "data" in layer):
        layer["data"] = {"name": f"data{number}", **layer["data"]}
    shared = {"$schema": SCHEMA, "width": "container", "height": HEIGHT, "description": f"{title}. {caption}"}
    return Figure(key, title, caption, {**shared, **spec, "config": {"legend": {"orient": "bottom", "columns": 4}}})


def linear(field: str, title: str) -> Spec:
    """Encoding of a number on a linear scale that need not include zero."""
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False}}


def log(field: str, title: str, ticks: Iterable[float] = (), form: str = "~g") -> Spec:
    """Encoding of a number on a logarithmic scale, with ticks at `ticks` only if given; `form` formats them."""
    axis = {"values": sorted(set(ticks)), "format": form, "labelOverlap": True} if ticks else {"format": form}
    scale = {"type": "log", "nice": False, "padding": 16}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def tooltip(*fields: str) -> list[Spec]:
    return [{"field": field} for field in fields]
