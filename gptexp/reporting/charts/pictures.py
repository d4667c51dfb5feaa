"""PNGs of Vega-Lite specifications, and the JavaScript that draws them in a browser. Both come from vl-convert."""

import os
from importlib.metadata import version
from typing import Any

from gptexp.config.paths import user_cache_dir
from gptexp.reporting.charts.vega_lite import theme

VEGA_LITE = "6.4"  # newest version in vl-convert 1.9; the page and the PNGs use the same
PNG_WIDTH = 640  # pixels before scaling; replaces the width of the page's container
SCALE = 2.0


def png(spec: dict[str, Any]) -> bytes:
    import vl_convert

    fixed = {**spec, "width": PNG_WIDTH, "config": {**theme("light"), "background": "white"}}
    return bytes(vl_convert.vegalite_to_png(fixed, vl_version=VEGA_LITE, scale=SCALE))


def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which defines the global `vegaEmbed`.

    Bundling takes seconds, so the script is cached in the user's cache directory.
    """
    import vl_convert

    cached = user_cache_dir() / f"vega-lite-{VEGA_LITE}-{version('vl-convert-python')}.js"
    try:
        return cached.read_text()
    except OSError:
        pass
    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE))
    script = script.replace("</script", "<\\/script")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_name(f"{cached.name}.{os.getpid()}")
        unfinished.write_text(script)
        unfinished.replace(cached)
    except OSError:  # without a cache the next report only takes longer
        pass
    return script
