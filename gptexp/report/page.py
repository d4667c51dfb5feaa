"""The report as one HTML file: words, tables, and pictures drawn by Vega-Lite's own code, which is in the file.

Nothing in it comes from a network: a content security policy forbids that. Whatever a run is called ends up as text.
"""

import json
from collections.abc import Sequence
from html import escape

from gptexp.report.analysis import Analysis
from gptexp.report.records import Run
from gptexp.report.spec import Figure
from gptexp.report.table import shown

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)

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
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f4f4f4; margin: .5rem 0; overflow-x: auto; padding: .6rem; }
"""

# `vegaEmbed` is what the bundle leaves in the global scope.
SCRIPT = """
const specs = JSON.parse(document.getElementById("specs").textContent);
const options = {renderer: "svg", actions: {export: true, source: false, compiled: false, editor: false}};
window.drawn = Promise.all(specs.map(([key, spec]) => vegaEmbed(document.getElementById(key), spec, options)));
"""


def page(
    analysis: Analysis, lines: Sequence[str], pictures: Sequence[Figure], commands: Sequence[str], bundle: str
) -> str:
    """The whole file. `lines`: the verdict; `commands`: what to run next; `bundle`: Vega-Lite's JavaScript."""
    specs = json.dumps([[f"plot-{picture.key}", picture.spec] for picture in pictures], separators=(",", ":"))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(analysis.name)} · gptexp</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{escape(analysis.name)}</h1>",
            '<ul class="verdict">',
            *(f"<li>{escape(line)}</li>" for line in lines),
            "</ul>",
            *_next(commands),
            "<h2>Pictures</h2>",
            '<div class="figures">',
            *(_figure(picture) for picture in pictures),
            "</div>",
            *_common(analysis),
            "<h2>Runs</h2>",
            _table(analysis.runs),
            "</main>",
            f'<script type="application/json" id="specs">{_inert(specs)}</script>',
            f"<script>{bundle}</script>",
            f"<script>{SCRIPT}</script>",
            "</body>",
            "</html>",
            "",
        ]
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


def _next(commands: Sequence[str]) -> list[str]:
    if not commands:
        return []
    return ["<h2>Worth running next</h2>", f'<pre tabindex="0">{escape(chr(10).join(commands))}</pre>']


def _table(runs: Sequence[Run]) -> str:
    names, rows = shown(runs)
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="All runs">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _common(analysis: Analysis) -> list[str]:
    """What all runs have in common, and where they ran."""
    readable = [run for run in analysis.runs if run.config]
    if not readable:
        return []
    first = readable[0]
    same = {k: v for k, v in first.config.items() if all(run.config.get(k) == v for run in readable) and v is not None}
    for key in ("parameters", "world_size", "device", "data_hash", "git_commit"):
        values = {repr(run.summary[key]) for run in readable if key in run.summary}
        if len(values) == 1:
            same[key] = first.summary.get(key, "")
    lines = "\n".join(f"{key:<28}{value}" for key, value in same.items())
    return [
        f'<details><summary>What all runs have in common</summary><pre tabindex="0">{escape(lines)}</pre></details>'
    ]
