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
from importlib.metadata import version
from typing import Any

from gptexp.config.paths import user_cache_dir
from gptexp.process.terminal import warn
from gptexp.reporting.charts.vega_lite import theme

VEGA_LITE = "6.4"  # newest version in vl-convert 1.9; the page and the PNGs use the same
PNG_WIDTH = 640  # pixels before scaling; replaces the width of the page's container
SCALE = 2.0
ENTRY = "window.vegaEmbed = vegaEmbed;"


def pngs(specs: Sequence[dict[str, Any]]) -> list[bytes]:
    """Draw the specifications. If that fails, prints why and returns nothing."""
    look = {"width": PNG_WIDTH, "config": {**theme("light"), "background": "white"}}
    return [base64.b64decode(text) for text in _converted([{**spec, **look} for spec in specs], "no pictures")]


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
    scripts = _converted(ENTRY, "the page has no charts")
    if not scripts:
        return ""
    [script] = scripts
    script = script.replace("</script", "<\\/script")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_name(f"{cached.name}.{os.getpid()}")
        unfinished.write_text(script)
        unfinished.replace(cached)
    except OSError:  # without a cache the next report only takes longer
        pass
    return script


def _converted(request: list[dict[str, Any]] | str, without: str) -> list[str]:
    """What `main` answers; nothing, after a line that begins with `without`, if its process fails."""
    child = subprocess.run([sys.executable, "-Pm", __name__], input=json.dumps(request).encode(), capture_output=True)
    if child.returncode == 0:
        answer: list[str] = json.loads(child.stdout)
        return answer
    why = (child.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"])[-1]
    if child.returncode < 0:
        why = f"its process was ended by {signal.Signals(-child.returncode).name}; it may lack memory (ulimit -v)"
    warn(f"{without}: vl-convert failed: {why}")
    return []


def main() -> None:
    """Answer the request in the standard input: specifications become PNGs in base64, an entry point its bundle."""
    import vl_convert

    request = json.load(sys.stdin)
    if isinstance(request, str):
        answer = [vl_convert.javascript_bundle(request, vl_version=VEGA_LITE)]
    else:
        images = (vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=SCALE) for spec in request)
        answer = [base64.b64encode(bytes(image)).decode() for image in images]
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
