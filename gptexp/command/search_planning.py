"""The plan of `gptexp tune`, before it starts: how many runs and how much time, and whether the budget holds them."""

from collections.abc import Sequence

from gptexp.command.planning import Plan, add_times
from gptexp.command.sweep_planning import makespan, plan_sweep
from gptexp.config.budget import FEWEST_RUNS
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import confirmed, reserve_stdout_for_result, say, warn
from gptexp.process.words import counted, duration, titled
from gptexp.reporting.statistics.tuning import law_sizes
from gptexp.sweep.cells import refuse_illegal
from gptexp.sweep.grid import Grid, grid_of
from gptexp.sweep.sweepers import CellSweeper
from gptexp.sweep.tune import USUAL_RUNS, TuneSweeper

MANY_RUNS = 8  # of a batch size, if seeds vary much
ASKED_FROM_S = 3600.0


def confirm_search(sweeper: CellSweeper) -> bool:
    """Print the plan of a search, and return whether to start it; ask if it will take more than an hour.

    Raises `ConfigError` if the budget holds fewer than three runs.
    """
    assert isinstance(sweeper, TuneSweeper)
    if sweeper.prints_json:
        reserve_stdout_for_result()
    plans = print_search(grid_of(sweeper))
    expected_s = _seconds(plans, USUAL_RUNS, 1)
    if sweeper.budget is not None or not sweeper.asks or expected_s is None or expected_s < ASKED_FROM_S:
        return True
    question = f"start {counted(USUAL_RUNS * len(plans), 'run')}, about {duration(expected_s)}?"
    return confirmed(question, yes=False, agree="--yes (of train: hydra.sweeper.ask=false)")


def print_search(grid: Grid) -> list[Plan]:
    """Print the plan of a search, and return those of a run at each arm and batch size that has runs.

    A few steps give their times, and the sweeper gets them too. Raises `ConfigError` for runs that are illegal, and if
    the budget holds fewer than three.
    """
    assert isinstance(grid.sweeper, TuneSweeper)
    cells = plan_sweep(grid.drafts)
    refuse_illegal([(draft.title, cell.problems) for draft, cell in zip(grid.drafts, cells, strict=True)])
    grid.sweeper.check_search([draft.config for draft in grid.drafts if draft.config is not None])
    plans = [cell.plan for cell in cells if cell.plan is not None]
    add_times(plans)
    for draft, planned in zip(grid.drafts, plans, strict=True):
        if planned.time is not None:
            place = grid.sweeper.arm_of(draft.values), planned.run.batch.total_batch_size
            grid.sweeper.estimates[place] = planned.time.total_s
    if grid.sweeper.law:
        chosen = law_sizes({planned.run.batch.total_batch_size for planned in plans})
        plans = [planned for planned in plans if planned.run.batch.total_batch_size in chosen]
    say(*search_lines(plans, grid.sweeper, grid.at_once or 1))
    return plans


def search_lines(plans: Sequence[Plan], sweeper: TuneSweeper, at_once: int) -> list[str]:
    """The plan in words. `plans`: one for each arm and batch size that has runs."""
    budget = sweeper.budget
    usual, least, most = (factor * len(plans) for factor in (USUAL_RUNS, FEWEST_RUNS, MANY_RUNS))
    tokens = [planned.run.tokens for planned in plans]
    times = [_seconds(plans, factor, at_once) for factor in (USUAL_RUNS, FEWEST_RUNS, MANY_RUNS)]
    took = "" if times[0] is None else "about {}, {} to {}".format(*(duration(seconds or 0.0) for seconds in times))
    need: dict[str, float | None] = {"runs": FEWEST_RUNS, "tokens": FEWEST_RUNS * min(tokens), "seconds": None}
    of_all = {"runs": least, "tokens": FEWEST_RUNS * sum(tokens), "seconds": times[1]}
    if times[0] is not None:
        need["seconds"] = FEWEST_RUNS * min(planned.time.total_s for planned in plans if planned.time is not None)
    if budget is not None and (needed := need[budget.unit]) is not None and budget.amount < needed:
        three = duration(needed) if budget.unit == "seconds" else f"{needed:,} tokens"
        rule = f"a lowest point needs three runs, {three} here; give more, or shorter runs (train.max_tokens)"
        raise ConfigError(f"budget={budget}: {rule}", "budget-too-small")
    if budget is not None and budget.amount < (of_all[budget.unit] or 0.0):
        warn(f"warning: the budget of {budget} ends before each batch size has three runs")
    what = "the law of the best" if sweeper.law else "the best"
    sizes = ", ".join(dict.fromkeys(f"{planned.run.batch.total_batch_size:,}" for planned in plans))
    return titled(
        [
            ("search", f"{what} {sweeper.key} at {sizes} tokens a step, +-{sweeper.within:g} octave"),
            ("runs", f"about {usual}, {least} to {most}, of {min(tokens):,} tokens each"),
            ("time", took),
            ("at most", str(budget) if budget is not None else "no limit; --budget sets one"),
        ]
    )


def _seconds(plans: Sequence[Plan], runs: int, at_once: int) -> float | None:
    """The time of so many runs at each batch size; None if the time of a run is not known."""
    times = [planned.time.total_s for planned in plans if planned.time is not None]
    return makespan(times * runs, at_once) if len(times) == len(plans) else None
