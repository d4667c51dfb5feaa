"""How well methods find the best learning rate of each batch size, as a Markdown table.

    python tests/benchmark_tune.py [--steplaw PATH] [--tables steplaw library "noise 0.2"] [--methods tune bracket]
    python tests/benchmark_tune.py --law --tables steplaw          # all batch sizes of an arm from runs at three
    python tests/benchmark_tune.py --limits                        # two disjoint references against each other

`steplaw` is the table of Step Law's dense runs (arXiv 2503.04715), a CSV file with the columns parameters, tokens,
tokens_per_step, lr and loss. Its path is `--steplaw` or the environment variable STEPLAW. In "every other rate" a
method can run half of its learning rates, so that the others are a reference whatever it runs. The arms of the other
tables are in reporting/surfaces.py, the methods in reporting/searches.py.

The columns, over all batch sizes of a table:

- runs: of a batch size, in runs of full length; grid: their tokens as a share of those of the full grid.
- reference: share of the batch sizes whose best learning rate is known. That of a synthetic arm is known. That of
  `library` is a range that a reader gives. That of `steplaw` is estimated from the runs that the method did not take,
  and is unknown where these do not show it. `*`: estimated from all runs, because the method took all or by `--shared`.
  Runs near the optimum leave none to estimate it from. So if this share is low, the batch sizes that are left are those
  at which the method missed; see "every other rate", where it hardly depends on the method.
- 0.25, 0.5: share of them in which the answer is at most so many octaves away. No answer is a miss.
- coverage: share of the given 95% intervals that hold the reference, once its own error is allowed for. The answer x
  has an interval of the half-width h on the side of the reference r, whose error has the standard deviation t. If both
  errors are independent and normal, x - r lies within sqrt(h^2 + (1.96 t)^2) in 95% if the interval holds the truth in
  95%. t comes from references of disjoint half grids (`surfaces.effective_noise`). It holds no misfit that these share:
  the references move by 0.04 octaves if the skew of the fitted curve is 0.3 or 0.7 in place of 0.5.
  raw: share of the intervals that hold the reference itself, which has errors too.
- width: median width of the interval in octaves.
- regret: mean loss at the answer above the lowest one, in millinats. Of a table both come from a local parabola through
  all its runs, which is independent of the references' curve; the noise of the table itself makes it at least 0.
- bracketed: share that is said to be bracketed. false: share of these, where the reference is known, whose reference
  lies outside the learning rates that were run, or whose arm is flat.
- over: by how much the runs exceeded the budget, as a share of it, at most over the arms.
- seconds: for an arm, of the method's own time.
"""

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent / "reporting"))

import numpy as np
from searches import (
    EARLY_STOPPING,
    LAWS,
    METHODS,
    SAMPLERS,
    Answer,
    Method,
    Outcome,
    Trials,
    grid,
)
from surfaces import TABLES, Crossing, Reference, Run, Surface, Table, every_other_rate, halves, step_law

from gptexp.reporting.statistics.curves import Curves, fit_curves
from gptexp.reporting.statistics.prior import COLD, law_intervals
from gptexp.reporting.statistics.tuning import Goal, found_optima, most_useful, next_law_steps, next_steps

BUDGET = 8  # runs a batch size


# --- tune ------------------------------------------------------------------------------------------------------------


class Tuner:
    """The statistics of `gptexp tune`, from runs to the next run and from runs to the answers."""

    def __init__(self, within: float = 0.25, by_law: bool = False) -> None:
        self.within, self.by_law = within, by_law

    def wanted(self, trials: Trials, budget: int) -> Sequence[tuple[int, float]]:
        """Batch size and learning rate of the next run, the best first; the first that exists is run. Empty: stop.

        `budget`: the most runs of the arm.
        """
        surface = trials.surface
        if len(trials.runs) >= budget:
            return []
        goal = Goal(self.within, surface.seeds or 8, {batch: surface.rates(batch) or () for batch in surface.sizes})
        curves = self.curves(trials)
        prior = {batch: surface.prior(batch) for batch in surface.sizes}
        choose = next_law_steps if self.by_law else next_steps
        steps = choose(curves, [], goal, prior, COLD)
        step = most_useful(steps, dict.fromkeys(prior, 1.0), {run.batch for run in trials.runs})
        return [] if step is None else [(step.trial.batch, step.trial.lr)]

    def curves(self, trials: Trials) -> Curves:
        losses: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        diverged = {(run.batch, run.lr) for run in trials.runs if run.loss is None}
        for run in trials.runs:
            if run.loss is not None and (run.batch, run.lr) not in diverged:
                losses[run.batch][run.lr].append(run.loss)
        limits = {batch: [lr for size, lr in diverged if size == batch] for batch in trials.surface.sizes}
        return fit_curves(losses, {batch: lrs for batch, lrs in limits.items() if lrs}, trials.surface.usual_spread)

    def answers(self, trials: Trials) -> dict[int, Answer]:
        curves = self.curves(trials)
        answers = {}
        for batch, curve in curves.by_batch.items():
            optimum = curve.optimum
            if optimum is None:
                answers[batch] = Answer(curve.best, status=curve.status)
            else:
                answers[batch] = Answer(optimum.lr, optimum.low, optimum.high, True, curve.status)
        if self.by_law:
            prior = {batch: trials.surface.prior(batch) for batch in trials.surface.sizes}
            for batch, expected in law_intervals(prior, found_optima(curves)).items():
                answers.setdefault(batch, Answer(*expected))
        return answers


class Tune:
    """Runs what a tuner wants until it wants no more. It may exceed the budget, and that is scored."""

    def __init__(self, tuner: Tuner, budget: int) -> None:
        self.tuner = tuner
        self.budget = budget  # runs a batch size

    def __call__(self, surface: Surface, _: np.random.Generator) -> Outcome:
        trials = Trials(surface)
        budget = self.budget * len(surface.sizes)
        while any(trials.run(*run) for run in self.tuner.wanted(trials, budget)):
            if len(trials.runs) > 10 * budget:
                raise RuntimeError(f"{surface.name}: {len(trials.runs)} runs, with a budget of {budget}")
        return Outcome(self.tuner.answers(trials), trials.runs, budget=budget)


# --- Scores. ---------------------------------------------------------------------------------------------------------


class Score(NamedTuple):
    """Of one batch size. None: does not apply."""

    runs: float
    share_of_grid: float
    distance: float | None  # octaves from the answer to the reference; infinite without an answer
    shared: bool  # the reference is made from all runs
    raw: bool | None
    covered: bool | None
    width: float | None
    regret: float | None
    bracketed: bool
    outside: bool | None  # the reference lies outside the learning rates that were run, or the arm is flat


def score(surface: Surface, outcome: Outcome, shared: bool = False) -> list[Score]:
    cost = (len(outcome.runs) if outcome.cost is None else outcome.cost) / len(surface.sizes)
    scores = []
    for batch in surface.sizes:
        answer = outcome.answers.get(batch, Answer(None))
        taken = [run for run in outcome.runs if run.batch == batch]
        runs = float(len(taken)) if outcome.cost is None else cost
        cells = len(grid(surface, batch))
        all_taken = isinstance(surface, Table) and batch not in surface.read and not surface.means(batch, taken)
        reference = surface.reference(batch, () if shared or all_taken else taken)
        raw, covered = _holds(answer, reference)
        scores.append(
            Score(
                runs, runs / cells, _distance(answer, reference), shared or all_taken, raw, covered,
                math.log2(answer.high / answer.low) if answer.low and answer.high else None,
                surface.regret(batch, answer.lr) if answer.lr else None,
                answer.bracketed, surface.flat or _outside(taken, reference),
            )
        )  # fmt: skip
    return scores


def _distance(answer: Answer, reference: Reference | None) -> float | None:
    if reference is None:
        return None
    if answer.lr is None:
        return math.inf
    x = math.log2(answer.lr)
    return max(reference.low - x, x - reference.high, 0.0)


def _holds(answer: Answer, reference: Reference | None) -> tuple[bool | None, bool | None]:
    """Whether the interval holds the reference, as it is and once its error is allowed for."""
    if reference is None or not answer.lr or not answer.low or not answer.high:
        return None, None
    x, low, high = (math.log2(value) for value in (answer.lr, answer.low, answer.high))
    distance = _distance(answer, reference)
    half = high - x if reference.low > x else x - low
    assert distance is not None
    return low <= reference.high and reference.low <= high, distance <= math.hypot(half, 1.96 * reference.sd)


def _outside(taken: Sequence[Run], reference: Reference | None) -> bool | None:
    x = [math.log2(run.lr) for run in taken]
    return None if reference is None or not x else reference.low > max(x) or reference.high < min(x)


class Trial(NamedTuple):
    """A method on an arm."""

    scores: list[Score]
    seconds: float
    over: float | None  # runs beyond the budget, as a share of it


def play(arm: tuple[Surface, int], names: Sequence[str], budget: int, shared: bool = False) -> dict[str, Trial]:
    """The trials of these methods on an arm. Optuna's samplers have as many runs of each batch size as `tune` took."""
    surface, seed = arm
    methods: dict[str, Method] = {
        "tune": Tune(Tuner(), budget), "tune --law": Tune(Tuner(by_law=True), budget),
        **METHODS, **LAWS, **EARLY_STOPPING,
    }  # fmt: skip
    taken: Mapping[int, int] = dict.fromkeys(surface.sizes, budget)
    row: dict[str, Trial] = {}
    for name in sorted(names, key=lambda name: name != "tune"):
        if name in EARLY_STOPPING and not isinstance(surface, Crossing):
            continue
        method = partial(SAMPLERS[name], runs=taken) if name in SAMPLERS else methods[name]
        began = time.process_time()
        outcome = method(surface, np.random.default_rng([seed, *f"{name} {surface.name}".encode()]))
        seconds = time.process_time() - began
        if name == "tune":
            taken = {batch: sum(run.batch == batch for run in outcome.runs) for batch in surface.sizes}
        over = None if outcome.budget is None else max(0.0, len(outcome.runs) / outcome.budget - 1)
        row[name] = Trial(score(surface, outcome, shared), seconds, over)
    return row


# --- The table. ------------------------------------------------------------------------------------------------------

COLUMNS = (
    "table", "method", "batch sizes", "runs", "grid", "reference", "0.25", "0.5", "coverage", "raw", "width", "regret",
    "bracketed", "false", "over", "seconds",
)  # fmt: skip


def _mean(values: Sequence[float | None], form: str = "{:.0%}") -> str:
    known = [value for value in values if value is not None]
    return form.format(fmean(known)) if known else "–"


def summary(table: str, method: str, trials: Sequence[Trial]) -> list[str]:
    scores = [score for trial in trials for score in trial.scores]
    distances = [score.distance for score in scores if score.distance is not None]
    widths = [score.width for score in scores if score.width is not None]
    regrets = [None if score.regret is None else 1000 * score.regret for score in scores]
    overs = [trial.over for trial in trials if trial.over is not None]
    return [
        table, method, f"{len(scores)}",
        _mean([score.runs for score in scores], "{:.1f}"), _mean([score.share_of_grid for score in scores]),
        f"{len(distances) / len(scores):.0%}" + "*" * any(score.shared for score in scores),
        *(_mean([distance <= limit for distance in distances]) for limit in (0.25, 0.5)),
        _mean([score.covered for score in scores]), _mean([score.raw for score in scores]),
        f"{median(widths):.2f}" if widths else "–", _mean(regrets, "{:.1f}"),
        _mean([score.bracketed for score in scores]),
        _mean([score.outside for score in scores if score.bracketed]),
        f"{max(overs):.0%}" if overs else "–", _mean([trial.seconds for trial in trials], "{:.2f}"),
    ]  # fmt: skip


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def limits(tables: Sequence[Table]) -> str:
    """How two references from disjoint half grids agree, and the error that they imply."""
    sizes = [(table, batch) for table in tables for batch in table.sizes]
    pairs = [pair for table, batch in sizes if (pair := halves(table, batch))]
    d = np.array([a.optimum - b.optimum for a, b in pairs])
    errors = tables[0].noise * np.array([math.hypot(a.unit_sd, b.unit_sd) for a, b in pairs])
    sds = [found.sd for table, batch in sizes if (found := table.reference(batch, ()))]
    return (
        f"{len(sizes)} batch sizes, {len(pairs)} with two disjoint references: within 0.25 octaves "
        f"{(np.abs(d) <= 0.25).mean():.0%}, 0.5 {(np.abs(d) <= 0.5).mean():.0%}, rms {math.sqrt((d**2).mean()):.3f}, "
        f"1.96 of their standard deviation {(np.abs(d) <= 1.96 * errors).mean():.0%}; "
        f"standard deviation of one of all runs {median(sds):.3f} (median)"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How well methods find the best learning rate of each batch size.")
    names = ["tune", *METHODS, *SAMPLERS, *EARLY_STOPPING]
    parser.add_argument(
        "--steplaw", type=Path, default=os.environ.get("STEPLAW") or None, help="Step Law's table, a CSV file"
    )
    parser.add_argument("--tables", nargs="+", default=[""], help=f"parts of: steplaw, {', '.join(TABLES)}")
    parser.add_argument("--methods", nargs="+", default=[""], help=f"parts of: {', '.join([*names, *LAWS])}")
    parser.add_argument("--law", action="store_true", help="all batch sizes from runs at three")
    parser.add_argument("--shared", action="store_true", help="references from all runs of a table, also those taken")
    parser.add_argument("--limits", action="store_true", help="two disjoint references of Step Law's table")
    parser.add_argument("--budget", type=int, default=BUDGET, help="runs a batch size")
    parser.add_argument("--repeats", type=int, default=1, help="with other noise and other random choices")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.steplaw is None and args.limits:
        parser.error("--limits: give Step Law's table, --steplaw PATH")
    if args.steplaw is not None and not args.steplaw.is_file():
        parser.error(f"--steplaw={args.steplaw}: no such file; give the path of Step Law's table")
    return args


def chosen(args: argparse.Namespace) -> dict[str, list[tuple[Surface, int]]]:
    """The arms of each table that is asked for, each with the number of its repeat."""
    tables: Mapping[str, Callable[[int], Sequence[Surface]]] = TABLES
    if args.steplaw is None:
        print("Left out: steplaw. Give the path of its table: --steplaw PATH, or STEPLAW.", file=sys.stderr)
    else:
        arms = step_law(args.steplaw)
        tables = {"steplaw": lambda _: arms, "steplaw, every other rate": lambda _: every_other_rate(arms), **tables}
    smallest = 3 if args.law else 1
    return {
        name: [(arm, seed) for seed in range(args.repeats) for arm in tables[name](seed) if len(arm.sizes) >= smallest]
        for name in named(tables, args.tables)
    }


def named(names: Collection[str], parts: Sequence[str]) -> list[str]:
    """The names that contain one of the parts."""
    for part in parts:
        if not any(part in name for name in names):
            raise SystemExit(f"{part}: no such name; one of: {', '.join(names)}")
    return [name for name in names if any(part in name for part in parts)]


def main() -> None:
    args = arguments()
    if args.limits:
        print(limits(step_law(args.steplaw)))
        return
    names = named(["tune --law", *LAWS] if args.law else ["tune", *METHODS, *SAMPLERS, *EARLY_STOPPING], args.methods)
    print(line(COLUMNS), line(["---"] * len(COLUMNS)), sep="\n")
    with multiprocessing.Pool(args.processes) as pool:
        for table, arms in chosen(args).items():
            played = pool.map(partial(play, names=names, budget=args.budget, shared=args.shared), arms, chunksize=1)
            for name in names:
                if trials := [row[name] for row in played if name in row]:
                    print(line(summary(table, name, trials)), flush=True)


if __name__ == "__main__":
    main()
