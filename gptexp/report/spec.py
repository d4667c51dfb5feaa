"""What the Vega-Lite specifications of all pictures share: the page and the PNGs are drawn from the same ones.

Fields of data have plain names: Vega-Lite reads dots and brackets in a name as paths.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
HEIGHT = 300


@dataclass(frozen=True)
class Figure:
    """One picture: `key` names files and anchors, `caption` says what is to be seen in it."""

    key: str
    title: str
    caption: str
    spec: Spec


def figure(key: str, title: str, caption: str, spec: Spec) -> Figure:
    """A picture of `spec`, a layer or several; each layer's data gets a name, so that a page can replace them."""
    layers = [spec, *spec.get("layer", [])]
    named = [layer for layer in layers if "data" in layer]
    for number, layer in enumerate(named):
        layer["data"] = {"name": f"data{number}", **layer["data"]}
    shared = {"$schema": SCHEMA, "width": "container", "height": HEIGHT, "description": f"{title}. {caption}"}
    return Figure(key, title, caption, {**shared, **spec, "config": {"legend": {"orient": "bottom", "columns": 4}}})


def number(field: str, title: str) -> Spec:
    """An encoding of a quantity whose scale need not hold zero."""
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False}}


def log(field: str, title: str, ticks: Iterable[float] = (), form: str = "~g") -> Spec:
    """An encoding on a logarithmic scale; `ticks`: where to put them, and no others."""
    axis = {"values": sorted(set(ticks)), "format": form, "labelOverlap": True} if ticks else {"format": form}
    scale = {"type": "log", "nice": False, "padding": 16}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def shown(*fields: str) -> list[Spec]:
    """What a tooltip tells."""
    return [{"field": field} for field in fields]
