"""The files and terminal output of `gptexp report DIR`.

`records` reads the runs. `noise`, `shape`, `linex`, `curves`, `law` and `critical` hold the statistics, on plain
numbers, and `analysis` applies them to the runs. `verdict`, `figures`, `table`, `overview` and `proposals` present the
result, `report` puts them together, and `page` makes HTML of it.
"""

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gptexp.process.errors import first_line
from gptexp.process.terminal import warn
from gptexp.reporting.analysis import Arm
from gptexp.reporting.arms import Transfer, transfers
from gptexp.reporting.arms_table import ARM, arms_table
from gptexp.reporting.finding import BEHIND_NATS
from gptexp.reporting.page import page
from gptexp.reporting.pictures import bundle, png
from gptexp.reporting.report import Report, build_report
from gptexp.reporting.sharpness import at_best_lr
from gptexp.reporting.table import shown, values
from gptexp.reporting.terminal_table import PIPE_WIDTH, print_table
from gptexp.storage import run_dir

# Columns that are left out first on a narrow terminal, in this order.
LEAST_NEEDED = ("tokens/parameter", "hours", "MFU", "steps", "tokens", "tokens/s", "seed", "status")
PAGE, NUMBERS, TABLE, PICTURES = "report.html", "report.json", "cells.csv", "pictures"


def write_report(directory: Path, behind_nats: float = BEHIND_NATS) -> tuple[Report, list[Path]]:
    """Write `report.html`, `report.json`, `cells.csv` and `pictures/*.png` into `directory`, of a run or a sweep.

    Returns the report and the files, the page first. `behind_nats`: see `arms.falls_behind`.
    """
    report = build_report(directory, behind_nats=behind_nats)
    with run_dir.storage(directory):
        for name in (PAGE, NUMBERS, TABLE, PICTURES):  # runs may be links: a report only reads them
            run_dir.refuse_link(directory / name)
        run_dir.refuse_links(directory / PICTURES)
    run_dir.write_atomically(directory / PAGE, page(report, bundle()))
    run_dir.write_json(directory / NUMBERS, numbers(report))
    rows = values(report.analysis.runs, report.analysis.differing)
    with run_dir.storage(directory / TABLE), run_dir.atomic(directory / TABLE) as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    files = [directory / name for name in (PAGE, NUMBERS, TABLE)]
    with run_dir.storage(directory / PICTURES):
        (directory / PICTURES).mkdir(exist_ok=True)
    for picture in report.figures:
        files.append(directory / PICTURES / f"{picture.key}.png")
        with run_dir.storage(files[-1]), run_dir.atomic(files[-1], "wb") as file:
            file.write(png(picture.spec))
    return report, files


def files_of_report(directory: Path) -> list[Path]:
    """Write a report and return its files. An error is printed, not raised: it must not fail a run that succeeded."""
    try:
        return write_report(directory)[1]
    except Exception as error:
        warn(f"the report failed: {type(error).__name__}: {first_line(error)}")
        return []


def numbers(report: Report) -> dict[str, Any]:
    """The content of report.json: the report as JSON values."""
    analysis = report.analysis
    return {
        "name": analysis.name,
        "warnings": analysis.warnings,
        "arms": [_arm(arm) for arm in analysis.arms],
        "transfers": [_transfer(transfer) for transfer in transfers(analysis.arms)],
        "runs": values(analysis.runs, analysis.differing),
        "verdict": report.verdict.lines,
        "next": [asdict(proposal) for proposal in report.further],
    }


def _transfer(transfer: Transfer) -> dict[str, Any]:
    found = asdict(transfer)
    for optimum in found["optima"].values():
        del optimum["curve"]  # the arm of that size has it
    return found


def _arm(arm: Arm) -> dict[str, Any]:
    curves = []
    for batch, curve in arm.curves.of.items():
        values: dict[str, Any] = {"total_batch_size": batch, **asdict(curve)}
        if curve.optimum is not None:
            fit = values["optimum"].pop("curve")
            values["fit"] = fit and {key: value for key, value in fit.items() if key != "covariance"}
        curves.append(values)
    return {
        "choices": arm.choices,
        "usual_spread": arm.curves.usual_spread,
        "curves": curves,
        "law": arm.law and asdict(arm.law),
        "target_loss": arm.target_loss,
        "critical_batch_size": arm.critical and {**asdict(arm.critical), "at_an_edge": arm.at_an_edge},
        "sharpness": {
            batch: [{"run": run.name, **asdict(last)} for run, last in of_batch]
            for batch, of_batch in at_best_lr(arm).items()
        },
        "best": arm.best,
        "ties": arm.ties,
        "runs": [run.name for run in arm.runs],
    }


def show(report: Report, width: int | None = None) -> None:
    """Print the tables of runs and of arms, the verdict and the commands to run next.

    On lines of `width` characters if given. On a narrow terminal the tables have fewer columns. No number is cut.
    """
    runs = report.analysis.runs
    # The column of names repeats what the other columns show, unless other keys were swept too.
    named = len(runs) == 1 or len(report.analysis.arms) > 1
    columns = shown(runs, all_of_them=False)[not named :]
    print_table(columns, "run", ("status",), LEAST_NEEDED, width)
    if of_arms := arms_table(report.analysis.arms):
        print()
        print_table(of_arms, ARM, (), ("loss", "95% interval"), width, narrowest_name=40)
    show_findings(report, width)


def show_findings(report: Report, width: int | None = None) -> None:
    """Print the verdict and the commands to run next."""
    console = Console(width=width or PIPE_WIDTH)
    for line in report.verdict.lines:
        console.print(Text(f"- {line}"))
    for proposal in report.further:
        console.print(Text(f"next: {proposal.cost}: {proposal.why}\n  {proposal.command}"), soft_wrap=True)
