"""PNGs of Vega-Lite specifications, and the JavaScript that draws them in a browser. Both come from vl-convert.

vl-convert ends its process if it gets too little memory. So it runs in a process of its own: this module's `main`.
"""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any
from xml.etree import ElementTree

from gptexp.config.paths import user_cache_dir
from gptexp.process.terminal import warn
from gptexp.reporting.charts.vega_lite import theme

VEGA_LITE = "6.4"  # newest version in vl-convert 1.9; the page and the PNGs use the same
PNG_WIDTH = 640  # pixels before scaling; replaces the width of the page's container
SCALE = 2.0
MOST_AT_ONCE = 4  # processes; each takes 150 MB
NOTHING = {"mark": "point", "data": {"values": []}}
LINES = "role-scope"  # class of a group of lines in the SVG
ENTRY = "window.vegaEmbed = vegaEmbed;"


class Drawing:
    """Processes that draw figures. They start at once and load Vega, which takes them half a second."""

    def __init__(self, at_once: int | None = None) -> None:
        cores = min(MOST_AT_ONCE, len(os.sched_getaffinity(0)))
        self._processes = [_start() for _ in range(at_once or cores)]

    def pngs(self, specs: Sequence[dict[str, Any]]) -> list[bytes]:
        """Draw the specifications, once. If that fails, prints why and returns nothing."""
        look = {"width": PNG_WIDTH, "config": {**theme("light"), "background": "white"}}
        at_once = len(self._processes)
        shares = [[{**spec, **look} for spec in specs[first::at_once]] for first in range(at_once)]
        with ThreadPoolExecutor(at_once) as threads:  # each waits for its process
            drawn = [*threads.map(_answer, self._processes, shares)]
        if failures := [answer for answer in drawn if isinstance(answer, str)]:
            warn(f"no pictures: {failures[0]}")
            return []
        return [base64.b64decode(drawn[number % at_once][number // at_once]) for number in range(len(specs))]


def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which defines the global `vegaEmbed`.

    Bundling takes seconds, so the script is cached in the user's cache directory. If it fails, prints why and returns
    an empty script, so that a page has everything but its charts.
    """
    cached = user_cache_dir() / f"vega-lite-{VEGA_LITE}-{version('vl-convert-python')}.js"
    try:
        return cached.read_text()
    except OSError:
        pass
    answer = _answer(_start(), ENTRY)
    if isinstance(answer, str):
        warn(f"the page has no charts: {answer}")
        return ""
    [script] = answer
    script = script.replace("</script", "<\\/script")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_name(f"{cached.name}.{os.getpid()}")
        unfinished.write_text(script)
        unfinished.replace(cached)
    except OSError:  # without a cache the next report only takes longer
        pass
    return script


def _start() -> "subprocess.Popen[bytes]":
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-Pm", __name__], stdin=pipe, stdout=pipe, stderr=pipe)


def _answer(process: "subprocess.Popen[bytes]", request: list[dict[str, Any]] | str) -> list[str] | str:
    """What `main` answers in that process; if it fails, why."""
    output, errors = process.communicate(json.dumps(request).encode())
    if process.returncode == 0:
        answer: list[str] = json.loads(output)
        return answer
    why = (errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    if process.returncode < 0:
        why = f"its process was ended by {signal.Signals(-process.returncode).name}; it may lack memory (ulimit -v)"
    return f"vl-convert failed: {why}"


def _with_shared_clips(drawing: str) -> str:
    """An SVG in which all lines of a layer are clipped together. Vega clips each alone, which takes resvg seconds."""
    root = ElementTree.fromstring(drawing)
    for layer in root.iterfind(".//{*}g"):
        if LINES in layer.get("class", ""):
            for line in layer.iterfind(".//{*}g[@clip-path]"):
                layer.set("clip-path", line.attrib.pop("clip-path"))  # they are all the same rectangle: the chart
    return ElementTree.tostring(root, encoding="unicode")


def main() -> None:
    """Answer the request in the standard input: specifications become PNGs in base64, an entry point its bundle."""
    import vl_convert

    vl_convert.vegalite_to_svg(NOTHING, vl_version=VEGA_LITE)  # loads Vega, while the request is not there yet
    request = json.load(sys.stdin)
    if isinstance(request, str):
        answer = [vl_convert.javascript_bundle(request, vl_version=VEGA_LITE)]
    else:
        drawings = (vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE) for spec in request)
        images = (vl_convert.svg_to_png(_with_shared_clips(drawing), scale=SCALE) for drawing in drawings)
        answer = [base64.b64encode(bytes(image)).decode() for image in images]
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
