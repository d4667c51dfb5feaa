"""Pages as one HTML file each, with Vega-Lite's JavaScript, which draws the figures.

A content security policy forbids loading anything from a network. Names of runs are escaped. `gptexp watch` serves the
same pages, which update themselves. `web/` holds templates, styles and the script.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gptexp.process.terminal import printable
from gptexp.process.words import shown, uncapitalised
from gptexp.reporting.charts.vega_lite import END_LABELS, Figure, theme
from gptexp.reporting.listings.differences import Difference
from gptexp.reporting.listings.listing import Read
from gptexp.reporting.page.cells_table import MINOR, cells_table, commands, results_table
from gptexp.reporting.page.index import Index, build_index
from gptexp.reporting.page.report import Report, key_of
from gptexp.reporting.words.answers import TEXTS, table_of_answers
from gptexp.reporting.words.decisions import table_of_decisions
from gptexp.storage.run_dir import finite

# Only the page's own two scripts run, known by their hashes: a script in a run's name would not. Vega compiles its
# expressions by `eval` and writes styles into the page, so both are allowed.
POLICY = (
    "default-src 'none'; script-src {hashes} 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
DIGITS = 7  # of a number in a picture; ten thousand pixels need five
TONES = {  # badge of a finding or an answer -> tone; others warn
    "bracketed": "good", "significant": "good", "jagged": "bad", "diverged": "bad", "not comparable": "bad",
    **dict.fromkeys(("tied", "flat", "noise unknown", "too few", "so far"), "plain"),
}  # fmt: skip


@dataclass(frozen=True)
class Live:
    """What makes a page update itself."""

    changed: float | None  # Unix time of the newest change of a file, in s
    up: str  # relative address of the page that lists this one; empty if there is none
    every_ms: int = 1000  # between two requests
    patience_ms: int = 20_000  # for one response


def report_page(report: Report, bundle: str, live: Live | None = None) -> str:
    """The page of a run or a sweep. `bundle`: Vega-Lite's JavaScript."""
    parts = sections(report, is_live=live is not None)
    return _document(report.tab_title, parts, bundle, report.figures, live)


def comparison_page(report: Report, differences: Sequence[Difference], bundle: str) -> str:
    """The page of a comparison of runs."""
    part, runs = _macros("sections.html"), report.analysis.runs
    parts = {
        "header": part.header(report),
        "verdict": part.verdict(report, []),
        "next": part.next(report, []),
        "differences": part.differences(differences, [run.name for run in runs]),
        "charts": part.charts(report),
        "runs": part.runs(results_table(runs), MINOR, False),
        "foot": part.foot(report, _settings(report)),
    }
    return _document(report.tab_title, parts, bundle, report.figures)


def index_page(directory: Path, read: Read, bundle: str, live: Live) -> str:
    """The page of a directory with runs and sweeps. `read`: see `list_runs`. Raises `ConfigError`."""
    index = build_index(directory, read)
    return _document(f"{index.title} · gptexp", index_sections(index), bundle, live=live)


def message_page(name: str, message: str, bundle: str, live: Live) -> str:
    """The page of a directory that cannot be shown. `message`: HTML that says why."""
    part = {"verdict": f'<p class="problem">{message}</p>'}
    return _document(f"{name} · gptexp", part, bundle, live=live)


def index_sections(index: Index) -> dict[str, str]:
    """The HTML of each part of the page of a directory with runs and sweeps, in their order."""
    part = _macros("index.html")
    return {"header": part.header(index), "tiles": part.tiles(index), "runs": part.runs(index)}


def sections(report: Report, is_live: bool = False) -> dict[str, str]:
    """The HTML of each part of a report's page, in their order.

    On a live page a row of the table has a link to the page of its run.
    """
    part = _macros("sections.html")
    table = cells_table(report, is_live)
    run = report.analysis.runs[0] if table is None else None
    actions = [(what, [text]) for what, text in commands(run, is_live)] if run is not None else report.to_continue
    return {
        "header": part.header(report),
        "tiles": part.tiles(report),
        "verdict": part.verdict(report, table_of_answers(report.answers, key_of(report.search)), TEXTS),
        "next": part.next(report, actions),
        "charts": part.charts(report),
        "search": part.search(table_of_decisions(report.search) if report.search is not None else []),
        "runs": part.runs(table, MINOR, is_live),
        "notes": part.notes_of_the_run(run),
        "foot": part.foot(report, _settings(report)),
    }


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("gptexp.reporting.page", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "tone": _tone,
        "uncapitalised": uncapitalised,
        "sortable": _sortable,
        "printable": printable,
    }
    return environment


def _macros(template: str) -> Any:
    return _templates().get_template(template).module


def _sortable(value: Any) -> Any:
    """A value to sort by; empty ones come last."""
    return "" if value is None else printable(value) if isinstance(value, str) else value


def _tone(badge: str, badges: Sequence[str]) -> str:
    """The class of one of a finding's badges, which colours it. If the noise is unknown, none is "good"."""
    tone = TONES.get(badge, "warn")
    return "plain" if tone == "good" and "noise unknown" in badges else tone


def _document(
    title: str, parts: Mapping[str, str], bundle: str, figures: Sequence[Figure] = (), live: Live | None = None
) -> str:
    web = files("gptexp.reporting.page") / "web"
    script = (web / "page.js").read_text()
    hashes = " ".join(_hash(text) for text in (bundle, script))
    data = {
        "figures": [
            {
                "key": figure.key,
                "spec": _packed(figure.spec),
                "controls": [asdict(control) for control in figure.controls],
                "on_a_phone": figure.on_a_phone,
            }
            for figure in figures
        ],
        "themes": {brightness: theme(brightness) for brightness in ("light", "dark")},
        "end_labels": END_LABELS,
        "live": asdict(live) if live is not None else None,
    }
    # Without "<" the JSON cannot end the script element that holds it.
    text = json.dumps(finite(data), separators=(",", ":")).replace("<", "\\u003c")
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            up=live.up if live is not None else "",
            policy=POLICY.format(hashes=hashes) + ("; connect-src 'self'" if live is not None else ""),
            sections={name: Markup(html) for name, html in parts.items()},
            data=Markup(text),
            bundle=Markup(bundle),
            style=Markup((web / "page.css").read_text()),
            script=Markup(script),
        )
    )


def _packed(spec: Any) -> Any:
    """A specification whose points are columns, in a fraction of the bytes; `unpacked` in page.js undoes it.

    A column in which values repeat is a list of them with their counts. Numbers keep the digits that a picture shows.
    """
    if isinstance(spec, list):
        return [_packed(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    if points := spec.get("data", {}).get("values"):
        return {**_packed({**spec, "data": {}}), "data": {"values": _columns(points)}}
    return {key: _packed(value) for key, value in spec.items()}


def _columns(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for point in points for name in point):
        column = [point.get(name) for point in points]
        column = [float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value for value in column]
        repeats = [(value, len([*of])) for value, of in groupby(column)]
        columns[name] = {"repeats": repeats} if len(repeats) <= len(column) / 2 else column
    return {"columns": columns, "length": len(points)}


def _hash(script: str) -> str:
    """A script's hash, as a content security policy has it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _settings(report: Report) -> list[tuple[str, str]]:
    """Config values that are equal in all runs."""
    readable = [run for run in report.analysis.runs if run.config]
    return [
        (key, printable(shown(value)))
        for key, value in (readable[0].config if readable else {}).items()
        if value is not None and all(run.config.get(key) == value for run in readable)
    ]
