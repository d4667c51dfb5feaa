"""The report as one HTML file that includes Vega-Lite's JavaScript, which draws the figures.

A content security policy forbids loading anything from a network. Names of runs are escaped. `gptexp watch` serves the
same page and updates it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from gptexp.reporting.analysis import Analysis
from gptexp.reporting.proposals import Proposal
from gptexp.reporting.records import Run
from gptexp.reporting.table import shown
from gptexp.reporting.vega_lite import Figure, Spec

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)

MOST_SAMPLES = 5  # one for each run

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: #1a1a1a; background: #fff;
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.verdict { border-left: 4px solid #3b528b; margin: 1rem 0; padding: .25rem 0 .25rem 2rem; }
.verdict li { margin: .3rem 0; overflow-wrap: anywhere; }
.figures { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure h3 { font-size: 1rem; margin: 0; }
figcaption { color: #4a4a4a; font-size: .875rem; }
.plot { width: 100%; min-height: 20rem; }
.scroll { overflow-x: auto; }
.low { max-height: 18rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f4f4f4; margin: .5rem 0; overflow-x: auto; padding: .6rem; }
progress { width: 8rem; }
#state:empty { display: none; }
#state { background: #fdecc8; padding: .3rem .6rem; }
"""

# `vegaEmbed` is defined by the bundle. A figure of which only the data have changed is not drawn again: it gets the new
# data, so that it keeps its zoom and does not flicker.
SCRIPT = """
const options = {renderer: "svg", actions: {export: true, source: false, compiled: false, editor: false}};
const views = new Map();
const layers = spec => [spec, ...(spec.layer ?? [])].filter(layer => layer.data);
const bare = spec => JSON.stringify(
    {...spec, data: null, layer: spec.layer?.map(layer => ({...layer, data: layer.data?.name}))});
async function draw(pictures) {
    for (const [key, spec] of pictures) {
        const element = document.getElementById(key), known = views.get(key), form = bare(spec);
        try {
            if (known?.form === form && element.contains(known.view.container())) {
                for (const layer of layers(spec)) known.view.data(layer.data.name, layer.data.values);
                await known.view.runAsync();
            } else {
                known?.finalize();
                views.set(key, {form, ...await vegaEmbed(element, spec, options)});
            }
        } catch (error) {
            console.error(key, error);
        }
    }
    return [...views.values()];
}
"""

FROM_THE_FILE = '\nwindow.drawn = draw(JSON.parse(document.getElementById("specs").textContent));\n'

# innerHTML is safe here: the sections come from gptexp's own server, which has escaped all names and texts.
FROM_THE_SERVER = """
let have = "";
async function answer() {
    const response = await fetch(`state.json?have=${have}`, {signal: AbortSignal.timeout(PATIENCE_MS)});
    if (!response.ok) throw new Error(response.statusText);
    return response.status === 204 ? null : response.json();
}
async function poll() {
    const state = document.getElementById("state");
    const news = await answer().then(found => { state.textContent = ""; return found; }, () => {
        state.textContent = "gptexp watch does not answer. This is the last state that it sent.";
        return null;
    });
    if (news) {
        have = news.version;
        for (const [name, html] of Object.entries(news.sections)) {
            const section = document.getElementById(name);
            if (section.shown !== html) section.innerHTML = section.shown = html;
        }
        for (const [key, {finalize}] of views)
            if (!document.getElementById(key)) { finalize(); views.delete(key); }
        window.drawn = draw(news.pictures);
        await window.drawn;
    }
    setTimeout(poll, POLL_MS);
}
poll();
"""
POLL_MS = 1000
PATIENCE_MS = 20_000  # for one answer


def page(name: str, sections: Mapping[str, str], pictures: Sequence[Figure], bundle: str) -> str:
    """The whole HTML file. `sections`: id -> HTML; `bundle`: Vega-Lite's JavaScript."""
    shown = [f'<div id="{key}">{html}</div>' for key, html in sections.items()]
    # Without "<" the JSON cannot end the script element that holds it.
    specs = json.dumps(specifications(pictures), separators=(",", ":")).replace("<", "\\u003c")
    data = f'<script type="application/json" id="specs">{specs}</script>'
    return _document(name, POLICY, [*shown, "</main>", data], bundle, SCRIPT + FROM_THE_FILE)


def live_page(name: str, bundle: str) -> str:
    """The same page without content. It polls its server's `state.json` and shows what that holds."""
    body = ['<p id="state" role="status"></p>', *(f'<div id="{key}"></div>' for key in SECTIONS), "</main>"]
    script = SCRIPT + FROM_THE_SERVER.replace("POLL_MS", str(POLL_MS)).replace("PATIENCE_MS", str(PATIENCE_MS))
    return _document(name, f"{POLICY}; connect-src 'self'", body, bundle, script)


def _document(name: str, policy: str, body: list[str], bundle: str, script: str) -> str:
    lines = "\n".join(body)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)} · gptexp</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(name)}</h1>
{lines}
<script>{bundle}</script>
<script>{script}</script>
</body>
</html>
"""


def specifications(pictures: Sequence[Figure]) -> list[tuple[str, Spec]]:
    """The id of each figure's HTML element, and its Vega-Lite specification."""
    return [(f"plot-{picture.key}", picture.spec) for picture in pictures]


SECTIONS = ("verdict", "cells", "next", "figures", "notes", "common", "runs")  # in the order of the page


def sections(
    analysis: Analysis, lines: Sequence[str], pictures: Sequence[Figure], further: Sequence[Proposal], cells: str = ""
) -> dict[str, str]:
    """The HTML of each of `SECTIONS`. `lines`: the verdict; `cells`: HTML of the progress."""
    columns = shown(analysis.runs)
    rows = zip(*(texts for _, texts in columns), strict=True)
    return {
        "verdict": _list(lines),
        "cells": cells,
        "next": _next(further),
        "figures": _figures(pictures),
        "notes": _notes(analysis.runs),
        "common": _common(analysis),
        "runs": "<h2>Runs</h2>"
        + html_table("All runs", [title for title, _ in columns], (map(escape, row) for row in rows)),
    }


def _list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="verdict">{items}</ul>' if items else ""


def _figures(pictures: Sequence[Figure]) -> str:
    elements = "".join(
        f'<figure><h3>{escape(picture.title)}</h3><div class="plot" id="plot-{picture.key}"></div>'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
        for picture in pictures
    )
    return f'<h2>Pictures</h2><div class="figures">{elements}</div>' if elements else ""


def _notes(runs: Sequence[Run]) -> str:
    """The warnings of all runs, and the newest sample of each run."""
    warnings, samples = [], []
    for run in runs:
        name = f"<b>{escape(run.name)}</b> " if len(runs) > 1 else ""
        for note in run.notes:
            if note.kind != "sample":
                warnings.append(f"<li>{name}step {note.step:,}: {escape(note.text)}</li>")
        if sampled := [note for note in run.notes if note.kind == "sample"]:
            newest = sampled[-1]
            samples.append(f'<p>{name}after step {newest.step:,}</p><pre tabindex="0">{escape(newest.text)}</pre>')
    html = f'<h2>Warnings</h2><ul class="verdict">{"".join(warnings)}</ul>' if warnings else ""
    return html + (f"<h2>Samples</h2>{''.join(samples[:MOST_SAMPLES])}" if samples else "")


def _next(proposals: Sequence[Proposal]) -> str:
    blocks = "".join(
        f'<p>{escape(proposal.cost)}: {escape(proposal.why)}</p><pre tabindex="0">{escape(proposal.command)}</pre>'
        for proposal in proposals
    )
    return f"<h2>Run next</h2>{blocks}" if blocks else ""


def html_table(label: str, titles: Sequence[str], rows: Iterable[Iterable[str]], css_class: str = "scroll") -> str:
    """A table in a scrollable region. The cells of `rows` are HTML."""
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="{css_class}" tabindex="0" role="region" aria-label="{label}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _common(analysis: Analysis) -> str:
    """Config values and facts of the machine that are equal in all runs."""
    readable = [run for run in analysis.runs if run.config]
    if not readable:
        return ""
    first = readable[0]
    same = {k: v for k, v in first.config.items() if all(run.config.get(k) == v for run in readable) and v is not None}
    for key in ("parameters", "world_size", "device", "data_hash", "git_commit"):
        values = {repr(run.summary[key]) for run in readable if key in run.summary}
        if len(values) == 1:
            same[key] = first.summary.get(key, "")
    lines = "\n".join(f"{key:<28}{value}" for key, value in same.items())
    return f'<details><summary>Values common to all runs</summary><pre tabindex="0">{escape(lines)}</pre></details>'
