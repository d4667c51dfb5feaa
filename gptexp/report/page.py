"""The report as one HTML file: words, tables, and pictures drawn by Vega-Lite's own code, which is in the file.

Nothing in it comes from a network: a content security policy forbids that. Whatever a run is called ends up as text.
`gptexp watch` serves the same page live.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape

from gptexp.report.analysis import Analysis
from gptexp.report.records import Run
from gptexp.report.spec import Figure, Spec
from gptexp.report.table import shown

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)

MOST_SAMPLES = 5  # of different runs

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

# `vegaEmbed` is what the bundle leaves in the global scope. A picture whose specification differs from before in its
# data only gets new data: what somebody has zoomed into stays, and nothing flickers.
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

FROM_THE_FILE = """
window.drawn = draw(JSON.parse(document.getElementById("specs").textContent));
"""

# What a server on this machine sends is HTML of ours: whatever a run is called was made into text before.
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
        state.textContent = "No answer from gptexp watch: this is what it said last.";
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
    """The whole file. `sections` of HTML, in their order; `bundle`: Vega-Lite's JavaScript."""
    shown = [f'<div id="{key}">{html}</div>' for key, html in sections.items()]
    specs = json.dumps(specifications(pictures), separators=(",", ":"))
    data = f'<script type="application/json" id="specs">{_inert(specs)}</script>'
    return _document(name, POLICY, [f"<h1>{escape(name)}</h1>", *shown], [data], bundle, SCRIPT + FROM_THE_FILE)


def live_page(name: str, bundle: str) -> str:
    """The same page, empty: `state.json` of the server that it comes from fills it, over and over."""
    body = [f"<h1>{escape(name)}</h1>", '<p id="state" role="status"></p>']
    shown = [f'<div id="{key}"></div>' for key in SECTIONS]
    script = SCRIPT + FROM_THE_SERVER.replace("POLL_MS", str(POLL_MS)).replace("PATIENCE_MS", str(PATIENCE_MS))
    return _document(name, f"{POLICY}; connect-src 'self'", [*body, *shown], [], bundle, script)


def _document(name: str, policy: str, body: list[str], data: list[str], bundle: str, script: str) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(name)} · gptexp</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            *data,
            f"<script>{bundle}</script>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def specifications(pictures: Sequence[Figure]) -> list[tuple[str, Spec]]:
    """What the page draws: the element of each picture, and its Vega-Lite specification."""
    return [(f"plot-{picture.key}", picture.spec) for picture in pictures]


# In the order of the page.
SECTIONS = ("verdict", "cells", "next", "figures", "notes", "common", "runs")


def sections(
    analysis: Analysis, lines: Sequence[str], pictures: Sequence[Figure], commands: Sequence[str], cells: str = ""
) -> dict[str, str]:
    """The HTML of each of `SECTIONS`. `lines`: the verdict; `commands`: what to run next; `cells`: how far they are."""
    return {
        "verdict": _verdict(lines),
        "cells": cells,
        "next": _next(commands),
        "figures": _figures(pictures),
        "notes": _notes(analysis.runs),
        "common": _common(analysis),
        "runs": f"<h2>Runs</h2>{_table(analysis.runs)}",
    }


def _verdict(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="verdict">{items}</ul>' if items else ""


def _figures(pictures: Sequence[Figure]) -> str:
    shells = "".join(_figure(picture) for picture in pictures)
    return f'<h2>Pictures</h2><div class="figures">{shells}</div>' if shells else ""


def _notes(runs: Sequence[Run]) -> str:
    """What the runs said besides numbers: warnings, and the newest samples."""
    several = len(runs) > 1

    def of(run: Run) -> str:
        return f"<b>{escape(run.name)}</b> " if several else ""

    warned = [(run, note) for run in runs for note in run.notes if note.kind != "sample"]
    samples = [(run, run_samples[-1]) for run in runs if (run_samples := [n for n in run.notes if n.kind == "sample"])]
    items = "".join(f"<li>{of(run)}step {note.step:,}: {escape(note.text)}</li>" for run, note in warned)
    texts = "".join(
        f'<p>{of(run)}after step {note.step:,}</p><pre tabindex="0">{escape(note.text)}</pre>'
        for run, note in samples[:MOST_SAMPLES]
    )
    return (f'<h2>Warnings</h2><ul class="verdict">{items}</ul>' if items else "") + (
        f"<h2>Samples</h2>{texts}" if texts else ""
    )


def _inert(text: str) -> str:
    """JSON that cannot end the element it stands in."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _figure(picture: Figure) -> str:
    key = f"plot-{picture.key}"
    return (
        f'<figure><h3>{escape(picture.title)}</h3><div class="plot" id="{key}"></div>'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _next(commands: Sequence[str]) -> str:
    if not commands:
        return ""
    return f'<h2>Worth running next</h2><pre tabindex="0">{escape(chr(10).join(commands))}</pre>'


def _table(runs: Sequence[Run]) -> str:
    names, rows = shown(runs)
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="All runs">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _common(analysis: Analysis) -> str:
    """What all runs have in common, and where they ran."""
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
    return f'<details><summary>What all runs have in common</summary><pre tabindex="0">{escape(lines)}</pre></details>'
