"""The plan of `gptexp tune`, before it starts: how many runs and how much time, and whether the budget holds them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice

from gptexp.command.planning import Plan, add_times
from gptexp.command.sweep_planning import makespan, plan_sweep, share_machine
from gptexp.config.budget import FEWEST_RUNS, Budget
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import confirmed, emit, reserve_stdout_for_result, say, warn
from gptexp.process.words import counted, duration, titled
from gptexp.reporting.listings.search import search_of
from gptexp.reporting.statistics.tuning import law_sizes
from gptexp.reporting.words.finding import sizes as in_words
from gptexp.sweep.cells import refuse_illegal
from gptexp.sweep.grid import Grid, grid_of
from gptexp.sweep.sweepers import CellSweeper
from gptexp.sweep.tune import MARGIN, REPORT_S, REPORT_SHARE, USUAL_RUNS, TuneSweeper, usable

MANY_RUNS = 8  # of a batch size, if seeds vary much
ASKED_FROM_S = 3600.0


def confirm_search(sweeper: CellSweeper) -> bool:
    """Print the plan of a search, and return whether to start it; ask if it will take more than an hour.

    Raises `ConfigError` if the budget holds fewer than three runs.
    """
    assert isinstance(sweeper, TuneSweeper)
    if sweeper.prints_json:
        reserve_stdout_for_result()
    runs, expected_s = print_search(grid_of(sweeper))
    if sweeper.budget is not None or sweeper.yes or expected_s is None or expected_s < ASKED_FROM_S:
        return True
    return confirmed(f"start {counted(runs, 'run')}, about {duration(expected_s)}?", yes=False, agree="--yes")


def show_search(grid: Grid) -> None:
    """Print the plan of a search that is not started; with `json` also the runs and seconds that it expects."""
    assert isinstance(grid.sweeper, TuneSweeper)
    if grid.sweeper.prints_json:
        reserve_stdout_for_result()
    runs, seconds = print_search(grid)
    if grid.sweeper.prints_json:
        emit(json.dumps({"runs": runs, "seconds": seconds}))


def print_search(grid: Grid) -> tuple[int, float | None]:
    """Print the plan of a search. Returns how many runs it probably makes, and their seconds if these are known.

    A few steps give the times, and the sweeper gets them too. Raises `ConfigError` for runs that are illegal, and if
    the budget holds fewer than three.
    """
    sweeper = grid.sweeper
    assert isinstance(sweeper, TuneSweeper)
    share_machine(grid)
    cells = plan_sweep(grid.drafts)
    refuse_illegal([cell.draft for cell in cells])
    sweeper.check_search([draft.config for draft in grid.drafts if draft.config is not None])
    plans: dict[tuple[str, ...], dict[int, Plan]] = {}  # arm -> batch size -> a run
    for cell in cells:
        if cell.plan is not None:
            plans.setdefault(sweeper.arm_of(cell.draft.values), {})[cell.plan.run.batch.total_batch_size] = cell.plan
    if sweeper.launcher.shares_machine:  # else steps here say nothing of runs elsewhere
        add_times([planned for at in plans.values() for planned in at.values()])
    for arm, at in plans.items():
        times = {(arm, batch): planned.time.total_s for batch, planned in at.items() if planned.time is not None}
        sweeper.estimates |= times
    return _print_plan(plans, sweeper, grid.at_once or 1)


def _print_plan(
    plans: Mapping[tuple[str, ...], Mapping[int, Plan]], sweeper: TuneSweeper, at_once: int
) -> tuple[int, float | None]:
    """Print the plan in words. Returns as `print_search` does."""
    budget, history = sweeper.budget, search_of(sweeper.directory)
    sizes = sorted({batch for at in plans.values() for batch in at})
    chosen = law_sizes(sizes) if sweeper.law else sizes
    runs = [planned for at in plans.values() for batch, planned in at.items() if batch in chosen]
    tokens = sorted({planned.run.tokens for planned in runs})
    decisions = [] if history is None else history.decisions
    places = {(arm, batch) for arm, at in plans.items() for batch in at}
    done = sum(decision.place in places for decision in decisions)  # not those of other arms
    at_once = min(at_once, FEWEST_RUNS * len(runs))  # further runs wait for the results of earlier ones
    counts = [max(len(runs), factor * len(runs) - done) for factor in (USUAL_RUNS, FEWEST_RUNS, MANY_RUNS)]
    seconds = [_seconds(runs, count, at_once) for count in counts]
    if budget is not None and not decisions:
        _refuse_small(budget, runs, at_once)
        of_all = {
            "runs": counts[1],
            "tokens": FEWEST_RUNS * sum(each.run.tokens for each in runs),
            "seconds": seconds[1],
        }
        if usable(budget) < (of_all[budget.unit] or 0.0):
            warn(f"warning: the budget of {budget} ends before each batch size has three runs")
    limit = "no limit; --budget sets one" if budget is None else str(budget)
    if budget is not None and history is not None:
        limit += f", of which {replace(budget, amount=history.spent[budget.unit])} are spent"
    usual, least, most = counts
    what = f"{'the law of ' if sweeper.law else ''}the best {sweeper.key}"
    until = f"the 95% interval is at most {2 * sweeper.within:g} octaves wide"
    lengths = " to ".join(f"{count:,}" for count in dict.fromkeys((tokens[0], tokens[-1])))
    begins = [
        f"{' '.join(arm)}: " * bool(arm) + sweeper.prior_of({batch: each.config for batch, each in at.items()}).in_words
        for arm, at in plans.items()
    ]
    took = "" if seconds[0] is None else "about {}, {} to {}".format(*(duration(each or 0.0) for each in seconds))
    lines = [
        ("search", f"{what} at {in_words(chosen)} tokens a step"),
        ("until", "the difference of the arms is known" if sweeper.compares else until),
        *(("begins at" * (text is begins[0]), text) for text in begins),
        ("runs", f"about {usual}{' more' if done else ''}, {least} to {most}, of {lengths} tokens each"),
        ("time", took),
        ("at most", limit),
    ]
    say(*titled(lines))
    return usual, seconds[0]


def _refuse_small(budget: Budget, runs: Sequence[Plan], at_once: int) -> None:
    """Raise `ConfigError` if a budget does not hold three of the shortest `runs`."""
    needed = float(FEWEST_RUNS)
    if budget.unit == "tokens":
        needed *= min(planned.run.tokens for planned in runs)
    elif budget.unit == "seconds":
        times = [planned.time.total_s for planned in runs if planned.time is not None]
        needed = MARGIN * makespan([min(times, default=0.0)] * FEWEST_RUNS, at_once)
        needed += min(REPORT_S, needed * REPORT_SHARE / (1 - REPORT_SHARE))  # then `usable` is what three runs need
    if budget.amount < needed:
        three = replace(budget, amount=needed)
        rule = f"a lowest point needs three runs, {three} here; give more, or shorter runs (train.max_tokens)"
        raise ConfigError(f"budget={budget}: {rule}", "budget-too-small")


def _seconds(runs: Sequence[Plan], count: int, at_once: int) -> float | None:
    """The time of so many runs, equally many of each of `runs`; None if the time of one is not known."""
    times = [planned.time.total_s for planned in runs if planned.time is not None]
    return makespan([*islice(cycle(times), count)], at_once) if len(times) == len(runs) else None
