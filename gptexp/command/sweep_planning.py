"""`gptexp plan -m`: the plan of each cell of a sweep, and the time of all."""

import heapq
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gptexp.command.planning import ASSUMPTION, HERE, Epoch, Plan, Request, add_prediction, add_times, plan, uncounted
from gptexp.config.scaling import scaled_optim
from gptexp.distributed.ranks import AT_ONCE
from gptexp.machine.effective import Effective
from gptexp.model.gpus import Gpu
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import terminal_width, warn
from gptexp.process.words import counted, duration, rounded, titled
from gptexp.reporting.listings.terminal_table import print_table
from gptexp.sweep.cells import Draft, confounds, refuse_illegal
from gptexp.sweep.grid import Grid

SCALED = "effective lr"
TIME = "time"
# Title -> the text about the plan of a legal cell.
CELL_COLUMNS: dict[str, Callable[[Plan], str]] = {
    "steps": lambda p: f"{p.run.steps:,}",
    "micro-steps": lambda p: f"{p.run.batch.grad_accum_steps} × {p.run.batch.micro_batch_size} × {p.run.batch.seq_len}",
    SCALED: lambda p: f"{scaled_optim(p.config).lr:.4g}",
    "epochs": lambda p: "?" if p.epochs is None else rounded(p.epochs),
    "GiB per rank": lambda p: f"{p.memory.peak / 2**30:.2f}",
    TIME: lambda p: "?" if p.time is None else duration(p.time.total_s),
}
ILLEGAL = {"steps": "illegal"}
LEAST_NEEDED = ("epochs", "micro-steps", "GiB per rank")  # columns that a narrow terminal leaves out first


@dataclass(frozen=True)
class CellPlan:
    """A cell of a sweep: its plan, or the problems that make it illegal."""

    draft: Draft
    plan: Plan | None


def share_machine(grid: Grid) -> None:
    """Plan from now on for runs that share the cores and the memory of this machine, if those of `grid` will."""
    if grid.sweeper.launcher.shares_machine:
        os.environ[AT_ONCE] = str(grid.at_once or 1)


def plan_sweep(drafts: Sequence[Draft], gpu: Gpu | None = None) -> list[CellPlan]:
    """Plan each cell. Later cells reuse the choices of the first legal one."""
    cells: list[CellPlan] = []
    earlier: Effective | None = None
    epochs: dict[str, Epoch] = {}
    for draft in drafts:
        planned = None
        if draft.config is not None:
            try:
                planned = plan(draft.config, earlier, gpu, epochs)
                earlier = earlier or planned.effective
            except ConfigError as error:
                draft = replace(draft, problems=error.problems)
        cells.append(CellPlan(draft, planned))
    return cells


def print_sweep(grid: Grid, request: Request = HERE) -> None:
    """Print the plan of a sweep, like `print_plan` of a run. Raises `ConfigError` for illegal cells, after printing."""
    share_machine(grid)
    cells = plan_sweep(grid.drafts, request.gpu)
    plans = [cell.plan for cell in cells if cell.plan is not None]
    if request.gpu is not None:
        for planned in plans:
            add_prediction(planned, request)
    if request.with_time and not any(cell.draft.problems for cell in cells):
        add_times(plans)
    if request.as_json:
        values = [
            {
                "values": cell.draft.values,
                "problems": cell.draft.problems,
                "plan": cell.plan and cell.plan.to_dict(),
            }
            for cell in cells
        ]
        print(json.dumps({"cells": values, "of": grid.of, "at_once": grid.at_once}, indent=1))
    else:
        show_sweep(cells, grid.of, grid.at_once, "gptexp tune" if grid.sweeper.is_search else "Optuna")
    warnings = [line for planned in plans for line in planned.warnings]
    warnings += confounds([draft.config for draft in grid.drafts if draft.config is not None])
    for line in dict.fromkeys(warnings):
        warn(f"warning: {line}")
    refuse_illegal([cell.draft for cell in cells])


def show_sweep(cells: Sequence[CellPlan], total: int, at_once: int | None, chooser: str = "Optuna") -> None:
    """Print a line for each cell, and the totals of the sweep: `total` cells will run, `at_once` of them at a time.

    None: a trial decides when the sweep begins. `chooser`: who chooses cells by the results of others.
    """
    plans = [cell.plan for cell in cells if cell.plan is not None]
    times = [planned.time for planned in plans if planned.time is not None]
    keys = dict.fromkeys(key for cell in cells for key in cell.draft.values)
    values = [(key.rpartition(".")[2], [cell.draft.values.get(key, "") for cell in cells]) for key in keys]
    longest, _ = max(values, key=lambda column: max(map(len, column[1])), default=("", []))
    needless = set() if times else {TIME}
    if all(scaled_optim(planned.config).lr == planned.config.optim.lr for planned in plans):
        needless.add(SCALED)
    columns = [
        (title, [ILLEGAL.get(title, "") if cell.plan is None else text(cell.plan) for cell in cells])
        for title, text in CELL_COLUMNS.items()
        if title not in needless
    ]
    print_table([*values, *columns], (longest,), (), LEAST_NEEDED, terminal_width())
    if not plans:
        return
    scale = total / len(cells)  # cells that results decide are not chosen yet; these rows are examples
    tokens = round(sum(planned.run.tokens - planned.run.first_tokens for planned in plans) * scale)
    side_by_side = "; a trial at the start decides how many run at once" if at_once is None else ""
    if at_once is not None and at_once > 1:
        side_by_side = f", {at_once} at once"
    chosen = f"; {chooser} chooses their values, for example as in these rows" if total != len(cells) else ""
    print(f"{counted(total, 'cell')}, {tokens:,} tokens in all{side_by_side}{chosen}")
    time = plans[0].time_in_words()
    if times:
        seconds = scale * makespan([each.total_s for each in times], at_once or 1)
        one_by_one = " one after the other" if at_once is None else ""
        more = "" if len(times) == len(plans) else ", plus the cells marked ?"
        assumption = f": {ASSUMPTION}" if plans[0].gpu is not None else ""
        time = f"about {duration(seconds)}{one_by_one}{more}{assumption}{uncounted(plans, scale)}"
    print("\n".join(titled([("device", plans[0].device_in_words()), ("time", time)])))


def makespan(seconds: Sequence[float], at_once: int) -> float:
    """Return the time at which the last job ends if `at_once` jobs run at a time, in the given order."""
    ends = [0.0] * at_once
    for needed in seconds:
        heapq.heapreplace(ends, ends[0] + needed)
    return max(ends)
