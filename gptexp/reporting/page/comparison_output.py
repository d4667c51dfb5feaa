"""A comparison of runs on the terminal, as JSON and as a page."""

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from gptexp.process.terminal import say
from gptexp.reporting.charts.pictures import bundle
from gptexp.reporting.listings.table import BITS
from gptexp.reporting.listings.terminal_table import print_in_blocks
from gptexp.reporting.page.cells_table import BEST_LOSS, LOSS, SPEED, STATUS, TOKENS
from gptexp.reporting.page.comparison import Cell, Comparison, Pair
from gptexp.reporting.page.own_file import MARKS
from gptexp.reporting.page.page import comparison_page
from gptexp.reporting.page.write import show_findings
from gptexp.storage import run_dir

COMMAND = "gptexp compare"
RESULTS = (STATUS, LOSS, BEST_LOSS, BITS, TOKENS, SPEED)


def write_page(path: Path, comparison: Comparison) -> None:
    html = comparison_page(comparison.report, comparison.differences, bundle())
    run_dir.write_atomically(path, f"{MARKS[COMMAND]}\n{html}")


def numbers(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON values."""
    names = [run.name for run in comparison.runs]
    return {
        "runs": [
            {
                "run": run.name,
                "label": comparison.labels[run.name],
                "directory": str(run.directory),
                **{column.key: column.value(run) for column in RESULTS},
            }
            for run in comparison.runs
        ],
        "differences": [
            {"key": d.key, "kind": d.kind, "values": dict(zip(names, d.values, strict=True))}
            for d in comparison.differences
        ],
        "why_incomparable": comparison.why_incomparable,
        "pairs": [_pair(pair) for pair in comparison.pairs],
        "verdict": comparison.report.verdict.lines,
        "next": [asdict(proposal) for proposal in comparison.report.further],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    tie, contrast = pair.is_tie, pair.contrast
    return {
        "lower": _cell(pair.lower),
        "higher": _cell(pair.higher),
        "difference": pair.difference,
        "significant": None if tie is None else not tie,
        "p": contrast and contrast.p,
        "significant_from": contrast and contrast.significant_from,
        "seeds_needed": contrast and contrast.seeds_needed,
        "usual_spread": pair.usual_spread,
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {"runs": cell.names, "mean_loss": cell.mean, "sigma": cell.sigma}


def show(comparison: Comparison, width: int | None = None) -> None:
    """Print the comparison, on lines of `width` characters if given; tables then have as many columns as fit."""
    runs = comparison.runs
    say(*(f"{comparison.labels[run.name]}  {run.directory}" for run in runs))
    for kind, found in groupby(comparison.differences, key=lambda d: d.kind):
        rows = list(found)
        columns = [(run.name, [d.texts[number] for d in rows]) for number, run in enumerate(runs)]
        say(f"\n{kind.capitalize()}:")
        print_in_blocks(("", [d.key for d in rows]), columns, [run.name for run in runs], width)
    if not comparison.differences:
        say("\nNothing differs: configs, data, machines and versions are equal.")
    say()
    known = [column for column in RESULTS if any(map(column.value, runs))]
    results = [(column.title, [column.text(run) for run in runs]) for column in known]
    print_in_blocks(("run", [run.name for run in runs]), results, [STATUS.title], width)
    say()
    show_findings(comparison.report, width)
