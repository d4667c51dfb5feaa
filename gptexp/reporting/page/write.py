"""The files and terminal output of `gptexp report DIR`.

`records` reads the runs. `forms`, `likelihood` and `posterior` fit a sweep, `curves` and `law` say what the posterior
means. These five work on plain numbers; `analysis` applies them to the runs. `answers`, `proposals`, `verdict`,
`figures`, `table` and `overview` present the result, `report` puts it together, and `page` makes HTML of it.
"""

import csv
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from gptexp.process.errors import first_line
from gptexp.process.terminal import as_command, printable, warn
from gptexp.process.words import counted, listed
from gptexp.reporting.charts.pictures import Drawing, bundle
from gptexp.reporting.listings.table import informative, values
from gptexp.reporting.listings.terminal_table import PIPE_WIDTH, print_table, texts_of
from gptexp.reporting.page.page import report_page
from gptexp.reporting.page.report import Report, build_report, key_of
from gptexp.reporting.statistics.analysis import Arm
from gptexp.reporting.statistics.arms import transfers
from gptexp.reporting.words.answers import NOTHING, TEXTS, table_of_answers
from gptexp.reporting.words.sharpness import at_best_lr
from gptexp.reporting.words.thresholds import BEHIND_NATS
from gptexp.storage import run_dir

# Columns that are left out first on a narrow terminal, in this order.
LEAST_NEEDED = ("tokens/parameter", "hours", "MFU", "steps", "tokens", "tokens/s", "seed", "status")
# Columns of the answer that are left out first on a narrow terminal.
OPTIONAL = ("its interval", "within a seed's spread", "loss there", "surer with", "status")
NARROWEST_TEXT = 15  # characters of the answer's columns of text, on a narrow terminal
MOST_SENTENCES, MOST_COMMANDS = 5, 3  # without --verbose
PAGE, NUMBERS, TABLE, PICTURES = "report.html", "report.json", "cells.csv", "pictures"


def write_report(
    directory: Path,
    behind_nats: float = BEHIND_NATS,
    within: float | None = None,
    objective: str | None = None,
    drawing: Drawing | None = None,
) -> tuple[Report, list[Path]]:
    """Write `report.html`, `report.json`, `cells.csv` and `pictures/*.png` into `directory`, of a run or a sweep.

    Returns the report and the files, the page first. For `behind_nats`, `within` and `objective` see `build_report`;
    `drawing` is one that has started already.
    """
    with Drawing() if drawing is None else nullcontext(drawing) as drawing:
        return _write(
            build_report(directory, behind_nats=behind_nats, within=within, objective=objective, drawing=drawing),
            drawing,
        )


def _write(report: Report, drawing: Drawing) -> tuple[Report, list[Path]]:
    directory = report.directory
    with run_dir.storage(directory):
        for name in (PAGE, NUMBERS, TABLE, PICTURES):  # runs may be links, but what a report writes may not
            run_dir.refuse_link(directory / name)
        run_dir.refuse_links(directory / PICTURES)
    run_dir.write_atomically(directory / PAGE, report_page(report, bundle()))
    run_dir.write_json(directory / NUMBERS, numbers(report))
    rows = values(report.analysis.runs, report.analysis.differing)
    with run_dir.storage(directory / TABLE), run_dir.atomic(directory / TABLE) as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    files = [directory / name for name in (PAGE, NUMBERS, TABLE)]
    with run_dir.storage(directory / PICTURES):
        (directory / PICTURES).mkdir(exist_ok=True)
    images = drawing.pngs()
    for key in (figure.key for figure in report.figures if figure.key in images):
        files.append(directory / PICTURES / f"{key}.png")
        with run_dir.storage(files[-1]), run_dir.atomic(files[-1], "wb") as file:
            file.write(images[key])
    return report, files


def report_or_warning(directory: Path) -> tuple[Report, list[Path]] | None:
    """Write a report. An error is printed, not raised: it must not fail a run that succeeded."""
    try:
        return write_report(directory)
    except Exception as error:
        warn(f"the report failed: {type(error).__name__}: {first_line(error)}")
        return None


def numbers(report: Report) -> dict[str, Any]:
    """The content of report.json: the report as JSON values."""
    analysis = report.analysis
    return {
        "name": analysis.name,
        "objective": report.objective,
        "warnings": analysis.warnings,
        "answers": [asdict(answer) for answer in report.answers],
        "arms": [_arm(arm) for arm in analysis.arms],
        "transfers": [asdict(transfer) for transfer in transfers(analysis.arms)],
        "runs": values(analysis.runs, analysis.differing),
        "verdict": report.verdict.lines,
        "next": [asdict(proposal) for proposal in report.further],
    }


def _arm(arm: Arm) -> dict[str, Any]:
    curves = [
        {
            "total_batch_size": batch, **asdict(curve),
            "tested": [{"lr": lr, "mean": arm.means.get((batch, lr)), "losses": of_seeds, "fitted": fitted}
                       for (lr, of_seeds), fitted in zip(arm.losses[batch].items(), _fitted(arm, batch), strict=True)],
        }
        for batch, curve in arm.curves.by_batch.items()
    ]  # fmt: skip
    law = arm.law and {key: value for key, value in vars(arm.law).items() if key != "lines"}
    return {
        "choices": arm.choices,
        "usual_spread": arm.curves.usual_spread,
        "curves": curves,
        "law": law,
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


def _fitted(arm: Arm, batch: int) -> list[float | None]:
    """The loss of the fitted curve at each learning rate of a batch size."""
    lrs = list(arm.losses[batch])
    if batch not in arm.curves.fits:
        return [None] * len(lrs)
    return [float(np.median(draws)) for draws in arm.curves.cell_losses([(batch, lr) for lr in lrs]).T]


def show(report: Report, width: int | None = None, is_verbose: bool = False) -> None:
    """Print the answer of a sweep, the most important findings, and the commands to run next.

    `width`: characters of a line, if given. On a narrow terminal tables have fewer columns. No number is cut. With
    `is_verbose`, or if there is no answer, it prints the table of runs and all findings too.
    """
    runs = report.analysis.runs
    if report.answers:
        hidden = print_table(
            table_of_answers(report.answers, key_of(report.search)), TEXTS, TEXTS, OPTIONAL, width, NARROWEST_TEXT
        )
        if hidden:
            Console(width=width).print(Text(f"In a wider terminal: {listed(hidden)}."))
        print()
    if is_verbose or not report.answers:
        # The column of names repeats what the other columns show, unless other keys were swept too.
        named = len(runs) == 1 or len(report.analysis.arms) > 1
        columns = informative(runs)[not named :]
        print_table(texts_of(columns, runs), ("run",), ("status",), LEAST_NEEDED, width)
        print()
    show_findings(report, width, is_verbose or not report.answers)


def show_findings(report: Report, width: int | None = None, is_verbose: bool = True) -> None:
    """Print the verdict and the commands to run next, or the most important of both."""
    console = Console(width=width or PIPE_WIDTH)
    lines, further = report.verdict.lines, report.further
    if not is_verbose:
        lines, further = report.verdict.shortest[:MOST_SENTENCES], further[:MOST_COMMANDS]
    for line in lines:
        console.print(Text(f"- {line}"))
    if report.answers and all(answer.wanted == NOTHING for answer in report.answers):
        console.print(f"The interval of each batch size is narrow enough.{' Optional:' if further else ''}")
    for how, commands in report.to_continue if report.sweep is not None else ():
        console.print(Text(how))
        for command in commands:
            console.print(Text(f"  {command}"), soft_wrap=True)
    for proposal in further:
        arm = f"{proposal.arm}: " if proposal.arm else ""
        console.print(Text(printable(f"next: {proposal.cost}: {arm}{proposal.why}")))
        console.print(Text(f"  {proposal.command}"), soft_wrap=True)
    left = len(report.verdict.lines) - len(lines)
    if not is_verbose and (left or len(report.further) > len(further)):
        command = as_command(["report", str(report.directory), "--verbose"])
        more = f"{counted(left, 'more sentence')}, every proposal and the table of runs"
        console.print(Text(f"{command} prints {more}."), soft_wrap=True)
