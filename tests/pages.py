"""What tests of pages share: Chromium, and axe's rules of accessibility."""

import shutil
from pathlib import Path

import axe_core_python
import pytest
from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(axe_core_python.__file__).with_name("axe.min.js")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; apt-get install chromium")


def violations(page: Page) -> list[str]:
    """Those of axe's rules that the page breaks."""
    page.evaluate(AXE.read_text())
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in page.evaluate("axe.run()")["violations"]]
