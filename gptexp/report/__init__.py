"""`gptexp report DIR`: what the runs of a sweep say, from their directories alone.

`records` reads them; `noise`, `curves`, `law` and `critical` are the statistics, on plain numbers; `analysis` brings
both together; `verdict`, `figures`, `page` and `proposals` tell it.
"""

import argparse
import csv
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptexp import run_dir
from gptexp.errors import first_line

if TYPE_CHECKING:
    from gptexp.report.analysis import Analysis, Arm

PAGE, NUMBERS, TABLE, PICTURES = "report.html", "report.json", "cells.csv", "pictures"
FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would take for one


@dataclass(frozen=True)
class Report:
    """What was written: the analysis, its verdict, and the commands worth running next."""

    analysis: "Analysis"
    verdict: list[str]
    further: list[str]
    files: list[Path]


def write_report(directory: Path) -> Report:
    """Write `report.html`, `report.json`, `cells.csv` and `pictures/*.png` into `directory`, a run's or a sweep's."""
    from gptexp.report.analysis import analyse
    from gptexp.report.figures import figures
    from gptexp.report.page import page, sections
    from gptexp.report.pictures import bundle, png
    from gptexp.report.proposals import commands
    from gptexp.report.records import find_runs, printable
    from gptexp.report.verdict import verdict

    analysis = analyse(printable(directory.resolve().name), find_runs(directory))
    lines, pictures = [printable(line) for line in verdict(analysis)], figures(analysis)
    sweep = run_dir.read_json(directory / run_dir.SWEEP)
    further = [printable(line) for line in commands(analysis, sweep["overrides"], sweep["name"])] if sweep else []
    parts = sections(analysis, lines, pictures, further)
    run_dir.write_atomically(directory / PAGE, page(analysis.name, parts, pictures, bundle()))
    run_dir.write_json(directory / NUMBERS, {**numbers(analysis), "verdict": lines, "next": further})
    _write_table(directory / TABLE, analysis)
    (directory / PICTURES).mkdir(exist_ok=True)
    drawn = [directory / PICTURES / f"{picture.key}.png" for picture in pictures]
    for path, picture in zip(drawn, pictures, strict=True):
        path.write_bytes(png(picture.spec))
    return Report(analysis, lines, further, [*(directory / name for name in (PAGE, NUMBERS, TABLE)), *drawn])


def files_of_report(directory: Path) -> list[Path]:
    """What `write_report` writes, the page first; where it fails, a line says so: the runs are what they are."""
    try:
        return write_report(directory).files
    except Exception as error:
        print(f"gptexp: no report: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        return []


def numbers(analysis: "Analysis") -> dict[str, Any]:
    """The analysis as plain JSON values: what a script would read."""
    from gptexp.report.table import values

    return {
        "name": analysis.name,
        "warnings": analysis.warnings,
        "arms": [_arm(arm) for arm in analysis.arms],
        "runs": values(analysis.runs, analysis.apart),
    }


def _arm(arm: "Arm") -> dict[str, Any]:
    curves = []
    for batch, curve in arm.curves.of.items():
        values: dict[str, Any] = {"total_batch_size": batch, **vars(curve)}
        if (optimum := curve.optimum) is not None:
            fit = optimum.parabola
            values["optimum"] = {key: value for key, value in vars(optimum).items() if key != "parabola"}
            values["fit"] = {"a": fit.a, "b": fit.b, "c": fit.c, "centre": fit.centre, "lrs": fit.lrs}
        curves.append(values)
    return {
        "choices": arm.choices,
        "noise": arm.curves.noise and asdict(arm.curves.noise),
        "skewed": arm.curves.skewed,
        "learning_rates_in_fit": arm.curves.width,
        "curves": curves,
        "law": arm.law and asdict(arm.law),
        "target_loss": arm.target_loss,
        "critical_batch_size": arm.critical and {**asdict(arm.critical), "at_an_edge": arm.at_an_edge},
        "best": arm.best,
        "ties": arm.ties,
        "runs": [run.name for run in arm.runs],
    }


def _write_table(path: Path, analysis: "Analysis") -> None:
    """A line for each run, with the values as they were read. What a spreadsheet would take for a formula gets a '."""
    from gptexp.report.table import values

    rows = values(analysis.runs, analysis.apart)
    with run_dir.storage(path), run_dir.atomic(path) as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        for row in rows:
            safe = {k: f"'{v}" if isinstance(v, str) and v.startswith(FORMULA) else v for k, v in row.items()}
            table.writerow(safe)


def show(report: Report) -> None:
    """The table of runs, the verdict and what to run next, for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gptexp.report.table import shown

    runs = report.analysis.runs
    # The names of a sweep's cells say what the other columns do, unless more than those was swept.
    named = len(runs) == 1 or len(report.analysis.arms) > 1
    table = Table(box=None, pad_edge=False)
    columns, rows = shown(runs, all_of_them=False)
    for column in columns[not named :]:
        table.add_column(column, justify="left" if column in ("run", "status") else "right")
    for row in rows:
        table.add_row(*map(Text, row[not named :]))
    console = Console()
    console.print(table)
    for line in report.verdict:
        console.print(Text(f"- {line}"))
    for command in report.further:
        console.print(Text(f"next: {command}"), soft_wrap=True)


def main(argv: list[str] | None = None) -> None:
    """Report what the runs of a sweep, or a single run, say: a page, pictures, numbers, a table and a verdict."""
    parser = argparse.ArgumentParser(prog="gptexp report", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a sweep's directory, or a run's")
    parser.add_argument(
        "--write-optim", type=Path, metavar="FILE", help="write the fitted law as a config, conf/optim/NAME.yaml"
    )
    args = parser.parse_args(argv)

    from gptexp.report.fitted import write_optim

    report = write_report(args.directory)
    show(report)
    print(f"\nthe page: {args.directory / PAGE}")
    if args.write_optim is not None:
        write_optim(args.write_optim, report.analysis)
        print(f"the law: {args.write_optim}; use it with optim={args.write_optim.stem}")
