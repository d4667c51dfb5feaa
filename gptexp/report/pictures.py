"""Vega-Lite without a browser, and its code for one: what vl-convert brings."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

VEGA_LITE = "6.4"  # the newest that vl-convert 1.9 has; the same in the page and in PNGs
PNG_WIDTH = 640  # pixels before scaling, where a page would give the width
SCALE = 2.0


def png(spec: dict[str, Any]) -> bytes:
    """A picture of `spec`."""
    import vl_convert

    fixed = {**spec, "width": PNG_WIDTH, "background": "white"}
    return bytes(vl_convert.vegalite_to_png(fixed, vl_version=VEGA_LITE, scale=SCALE))


def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which leaves `vegaEmbed` in the global scope.

    Putting it together takes seconds, so the user's cache keeps it.
    """
    import vl_convert

    kept = Path(platformdirs.user_cache_dir("gptexp")) / f"vega-lite-{VEGA_LITE}-{version('vl-convert-python')}.js"
    try:
        return kept.read_text()
    except OSError:
        pass
    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE))
    script = script.replace("</script", "<\\/script")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_name(f"{kept.name}.{os.getpid()}")
        unfinished.write_text(script)
        unfinished.replace(kept)
    except OSError:  # a cache that takes nothing costs time only
        pass
    return script
