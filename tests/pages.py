"""Helpers of tests of pages: Chromium, and the accessibility rules of axe."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _missing() -> str:
    """What to install before pages can be tested; empty if nothing is missing."""
    packages = [name for name in ("playwright", "axe_core_python") if find_spec(name) is None]
    if packages:
        return f"no {' and no '.join(packages)}; pip install 'gptexp[test]'"
    return "" if CHROMIUM else "no Chromium; apt-get install chromium"


needs_chromium = pytest.mark.skipif(bool(_missing()), reason=_missing() or "never skipped")


def leave_out_pictures(patch: pytest.MonkeyPatch) -> None:
    """Let reports have empty PNGs; drawing them takes most of the time."""
    drawing = "gptexp.reporting.charts.pictures.Drawing"
    patch.setattr(f"{drawing}.__init__", lambda self, at_once=1: setattr(self, "keys", []))
    patch.setattr(f"{drawing}.__exit__", lambda self, *error: None)
    patch.setattr(f"{drawing}.add", lambda self, key, spec: self.keys.append(key))
    patch.setattr(f"{drawing}.pngs", lambda self: dict.fromkeys(self.keys, b""))


def violations(page: "Page") -> list[str]:
    """The rules of axe that the page violates, each with the first element that does."""
    import axe_core_python

    page.evaluate(Path(axe_core_python.__file__).with_name("axe.min.js").read_text())
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in page.evaluate("axe.run()")["violations"]]
