"""The sentences of each page, as a reader last approved them. Elsewhere tests read codes and fields.

Numbers stand as `#`. `SNAPSHOTS=write pytest tests/reporting/test_snapshots.py` writes them anew after a change that is
meant: read what `git diff` shows.
"""

import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sweeps import write_run, write_sweep

from gptexp.reporting.listings.listing import read_row
from gptexp.reporting.page.comparison import compare
from gptexp.reporting.page.page import Live, comparison_page, index_page, report_page
from gptexp.reporting.page.report import build_report

UNSEEN = {"head", "script", "style", "svg"}
INLINE = {"a", "b", "code", "em", "i", "label", "small", "span", "strong", "sub", "sup"}


class Text(HTMLParser):
    """The text of a page. Each element begins a line, unless it stands within one."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.unseen = "", 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.unseen += tag in UNSEEN
        self.text += "" if tag in INLINE else "\n"

    def handle_endtag(self, tag: str) -> None:
        self.unseen -= tag in UNSEEN
        self.text += "" if tag in INLINE else "\n"

    def handle_data(self, data: str) -> None:
        self.text += "" if self.unseen else data.replace("\n", " ")


def sentences(html: str, folder: Path) -> str:
    """The lines of more than one word, each once."""
    parser = Text()
    parser.feed(html)
    lines = [" ".join(line.split()) for line in parser.text.replace(str(folder), "FOLDER").splitlines()]
    shown = [re.sub(r"[-−+]?\d[\d,.]*(e[-+]?\d+)?", "#", line) for line in lines]
    return "".join(f"{line}\n" for line in dict.fromkeys(shown) if re.search(r"[a-z]+ .*[a-z]", line))


def sweep(folder: Path) -> str:
    return report_page(build_report(write_sweep(folder / "sweep", batches=(4096, 8192))), "")


def run(folder: Path) -> str:
    (folder / "run").mkdir()
    write_run(folder / "run", 8192, 0.02, 1, 4.0)
    return report_page(build_report(folder / "run"), "")


def comparison(folder: Path) -> str:
    root = write_sweep(folder / "sweep", batches=(4096,))
    cells = [root / f"lr={lr},total_batch_size=4096,seed={seed}" for lr in ("0.01", "0.02") for seed in (1337, 1338)]
    compared = compare(cells)
    return comparison_page(compared.report, compared.differences, "")


def index(folder: Path) -> str:
    write_sweep(folder / "sweep", batches=(4096,))
    return index_page(folder, read_row, "", Live(None, ""))


@pytest.mark.parametrize("page", [sweep, run, comparison, index])
def test_a_page_has_the_sentences_of_its_snapshot(page: Callable[[Path], str], tmp_path: Path) -> None:
    snapshot = Path(__file__).parent / "snapshots" / f"{page.__name__}.txt"
    shown = sentences(page(tmp_path), tmp_path)
    if os.environ.get("SNAPSHOTS") == "write":
        snapshot.write_text(shown)
    assert shown == snapshot.read_text()
