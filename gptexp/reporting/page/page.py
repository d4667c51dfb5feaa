"""The report as one HTML file that includes Vega-Lite's JavaScript, which draws the figures.

A content security policy forbids loading anything from a network. Names of runs are escaped. `gptexp watch` serves the
same page and updates it. `web/` holds its templates, styles and script.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gptexp.process.terminal import printable
from gptexp.process.words import shown, uncapitalised
from gptexp.reporting.charts.vega_lite import END_LABELS, Figure, theme
from gptexp.reporting.listings.differences import Difference
from gptexp.reporting.listings.records import Run
from gptexp.reporting.page.cells_table import MINOR, cells_table, commands, results_table
from gptexp.reporting.page.index import Index
from gptexp.reporting.page.report import Report
from gptexp.reporting.words.answers import TEXTS, table_of_answers

# Only the page's own two scripts run, known by their hashes: a script in a run's name would not. Vega compiles its
# expressions by `eval`, and writes styles into the page.
POLICY = (
    "default-src 'none'; script-src {hashes} 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
SECTIONS = ("header", "tiles", "verdict", "next", "charts", "runs", "notes", "foot")  # in the order of the page
TONES = {  # of the badges of findings and answers; others warn
    "bracketed": "good", "significant": "good", "jagged": "bad", "diverged": "bad", "not comparable": "bad",
    **dict.fromkeys(("tied", "flat", "noise unknown", "too few", "so far"), "plain"),
}  # fmt: skip
EVERY_MS = 1000  # between two questions of a live page
PATIENCE_MS = 20_000  # for one answer


def page(report: Report, bundle: str) -> str:
    """The whole HTML file. `bundle`: Vega-Lite's JavaScript."""
    data = {"figures": specifications(report.figures)}
    return _document(title(report), POLICY, sections(report), data, bundle)


def comparison_page(report: Report, found: Sequence[Difference], bundle: str) -> str:
    """The whole HTML file of a comparison of runs. `found`: what differs between them."""
    part: Any = _templates().get_template("sections.html").module
    runs = report.analysis.runs
    parts = {
        "header": part.header(report),
        "verdict": part.verdict(report, []),
        "next": part.next(report, []),
        "differences": part.differences(found, [run.name for run in runs]),
        "charts": part.charts(report),
        "runs": part.runs(results_table(runs), MINOR, False),
        "foot": part.foot(report, _settings(report)),
    }
    return _document(title(report), POLICY, parts, {"figures": specifications(report.figures)}, bundle)


def live_page(name: str, bundle: str, up: str) -> str:
    """The same page without content. It polls its server's `state.json` and shows what that holds.

    `up`: relative address of the page that lists this one; empty if there is none.
    """
    data = {"figures": [], "live": {"every_ms": EVERY_MS, "patience_ms": PATIENCE_MS}}
    return _document(name, f"{POLICY}; connect-src 'self'", dict.fromkeys(SECTIONS, ""), data, bundle, up)


def title(report: Report) -> str:
    """The title of the browser's tab: the progress, and what runs."""
    share = "" if report.overview.is_done else f"{report.overview.share:.0%} "
    return f"{share}{report.overview.title} · gptexp"


def index_sections(index: Index) -> dict[str, str]:
    """The HTML of each of `SECTIONS`, for a directory with runs and sweeps."""
    part: Any = _templates().get_template("index.html").module
    of_index = {"header": part.header(index), "tiles": part.tiles(index), "runs": part.runs(index)}
    return {**dict.fromkeys(SECTIONS, ""), **of_index}


def sections(report: Report, is_live: bool = False) -> dict[str, str]:
    """The HTML of each of `SECTIONS`. On a live page a row of the table has a link to the page of its run."""
    part: Any = _templates().get_template("sections.html").module
    table = cells_table(report, is_live)
    run = report.analysis.runs[0] if table is None else None
    return {
        "header": part.header(report),
        "tiles": part.tiles(report),
        "verdict": part.verdict(report, table_of_answers(report.answers), TEXTS),
        "next": part.next(report, _of_the_run(run, is_live) if run is not None else report.to_continue),
        "charts": part.charts(report),
        "runs": part.runs(table, MINOR, is_live),
        "notes": part.notes_of_the_run(run),
        "foot": part.foot(report, _settings(report)),
    }


def _of_the_run(run: Run, is_live: bool) -> list[tuple[str, list[str]]]:
    """What to do with a run: in words, and as a command."""
    return [(what, [text]) for what, text in commands(run, is_live)]


def specifications(figures: list[Figure]) -> list[dict[str, Any]]:
    """What the page's script draws."""
    return [
        {
            "key": f.key,
            "spec": f.spec,
            "controls": [{"label": c.label, "options": c.options} for c in f.controls],
            "on_a_phone": f.on_a_phone,
        }
        for f in figures
    ]


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("gptexp.reporting.page", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tone"] = _tone
    environment.filters["uncapitalised"] = uncapitalised
    return environment


def _tone(badge: str, badges: Sequence[str]) -> str:
    """The class of one of a finding's badges, which colours it. Without a known noise nothing is quite good."""
    tone = TONES.get(badge, "warn")
    return "plain" if tone == "good" and "noise unknown" in badges else tone


def _document(
    name: str, policy: str, parts: Mapping[str, str], data: Mapping[str, Any], bundle: str, up: str = ""
) -> str:
    web = files("gptexp.reporting.page") / "web"
    script = (web / "page.js").read_text()
    hashes = " ".join(_hash(text) for text in (bundle, script))
    themes = {brightness: theme(brightness) for brightness in ("light", "dark")}
    # Without "<" the JSON cannot end the script element that holds it.
    values = {"live": None, "themes": themes, "end_labels": END_LABELS, **data}
    text = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    return (
        _templates()
        .get_template("page.html")
        .render(
            title=name,
            up=up,
            policy=policy.format(hashes=hashes),
            sections={key: Markup(html) for key, html in parts.items()},
            data=Markup(text),
            bundle=Markup(bundle),
            style=Markup((web / "page.css").read_text()),
            script=Markup(script),
        )
    )


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
