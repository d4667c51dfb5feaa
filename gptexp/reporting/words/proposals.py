"""What to run next where the analysis leaves a question open: commands, with their reason and their cost."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, mode
from typing import Any

import numpy as np

from gptexp.config.budget import as_typed_budget
from gptexp.config.overrides import as_value
from gptexp.config.parts import SOURCE, TARGET
from gptexp.process.terminal import as_command
from gptexp.process.words import counted
from gptexp.reporting.listings.progress import is_unfinished
from gptexp.reporting.listings.records import AXES, lr_scaling
from gptexp.reporting.listings.search import SearchHistory
from gptexp.reporting.statistics.analysis import TEXT, Analysis, Arm
from gptexp.reporting.statistics.curves import CLOSEST, OUTSIDE, BatchFit, Curve, one_step_outside
from gptexp.reporting.statistics.forms import Array
from gptexp.reporting.statistics.posterior import NARROWEST
from gptexp.reporting.statistics.tuning import REACH, SMALLEST_GAIN, WIDEST, covariance
from gptexp.reporting.words.finding import sizes, tokens
from gptexp.reporting.words.thresholds import WITHIN
from gptexp.storage import branch
from gptexp.storage.sweep_record import SweepRecord

_, BATCH, _ = AXES
SEEDS, MOST_SEEDS = 2, 4  # new seeds of a proposal: usually, at most
LIKELIEST = 0.95  # largest probability of success that a proposal promises: no form of the curve is the true one
UNLIKELY = 0.05  # above this probability of an optimum on one side of the grid, runs there are proposed
WIDE_GAP = 1.7  # between two learning rates more than this ratio apart, one more is worth a run
SPARE = 1.5  # a larger budget of time holds runs that take so much longer than usual, and the report


@dataclass(frozen=True)
class Proposal:
    """A command that adds cells to a sweep, to answer an open question."""

    arm: str  # label
    batch: int  # tokens
    command: str
    why: str
    brings: str  # what it changes, in a few words
    runs: int
    minutes: float | None  # of all its runs, one after the other; None if no run of the sweep has ended

    @property
    def cost(self) -> str:
        runs = counted(self.runs, "run")
        if self.minutes is None:
            return runs
        return f"{runs}, {counted(max(1, round(self.minutes)), 'minute')}"


@dataclass(frozen=True)
class _Cells:
    """The cells of a proposal, at one batch size."""

    batch: int
    lrs: list[float]
    seeds: list[int]  # empty: the seed of the config
    why: str
    brings: str


def proposals(
    analysis: Analysis, sweep: SweepRecord, within: float = WITHIN, search: SearchHistory | None = None
) -> list[Proposal]:
    """Extensions of a sweep, without cells that it already has; none at a batch size where cells still run or wait.

    They are made until the interval of each batch size is at most `within` octaves wide on each side, cheapest first.
    After that, a larger batch size is proposed, which tests the law. A `search` goes on where it stopped at its budget,
    or at a wider interval: all of these proposals have the command that does so.
    """
    # Branches get none: their learning rate, batch size and seed are those of the run that they continue.
    arms = [arm for arm in analysis.arms if all(run.branch is None for run in arm.runs)]
    open_questions = [(arm, cells) for arm in arms for cells in _answering(arm, within)]
    if search is not None:
        open_questions = [(arm, cells) for arm, cells in open_questions if _goes_on(search, arm, cells.batch, within)]
    planned = {cell.total_batch_size for cell in sweep.cells.values()}
    unfinished = {batch for batch in planned if is_unfinished(sweep, analysis.runs, batch)}
    if not open_questions and not unfinished and (search is None or search.is_settled):
        open_questions = [(arm, cells) for arm in arms for cells in _beyond(arm)]
    proposed = (_proposal(arm, cells, sweep) for arm, cells in open_questions if cells.batch not in unfinished)
    found = sorted(filter(None, proposed), key=lambda proposal: (proposal.minutes or 0.0, proposal.runs))
    return found if search is None else _with_its_command(found, sweep, search, within)


def merged(found: Sequence[Proposal]) -> list[Proposal]:
    """The proposals with those of one command, which a search has, as one: with the arm and batch size of the first."""
    together = []
    for command in dict.fromkeys(one.command for one in found):
        first, *others = (one for one in found if one.command == command)
        minutes = [one.minutes for one in (first, *others) if one.minutes is not None]
        why = f"the search goes on at {sizes(sorted({one.batch for one in (first, *others)}))} tokens a step"
        runs = first.runs + sum(one.runs for one in others)
        whole = replace(first, why=why, runs=runs, minutes=sum(minutes) if minutes else None)
        together.append(whole if others else first)
    return sorted(together, key=lambda proposal: (proposal.minutes or 0.0, proposal.runs))


def _goes_on(search: SearchHistory, arm: Arm, batch: int, within: float) -> bool:
    """Whether a search goes on at a batch size with a larger budget, or with narrower intervals."""
    stopped, optimum = search.stop_of({run.name for run in arm.runs}, batch), arm.curves.optima.get(batch)
    return stopped == "budget" or (stopped == "narrow" and (optimum is None or not optimum.is_within(within)))


def _with_its_command(
    found: Sequence[Proposal], sweep: SweepRecord, search: SearchHistory, within: float
) -> list[Proposal]:
    """The proposals with the newest command of a search, and a budget that holds what is spent and all of them."""
    command = next((given for given in reversed(sweep.commands) if given[0] == "tune"), None)
    if command is None:
        return []
    options = {} if within == search.within else {"--within": f"{within:g}"}
    if search.budget is not None:
        runs, unit = sum(proposal.runs for proposal in found), search.budget.unit
        seconds = SPARE * 60 * sum(proposal.minutes or 0.0 for proposal in found)
        costs = {"runs": runs, "tokens": runs * search.tokens / max(1, len(search.decisions)), "seconds": seconds}
        options["--budget"] = as_typed_budget(unit, search.spent[unit] + costs[unit])
    planned = {batch for _, batch in search.prior}
    proposed = []
    for proposal in found:
        ours = [re.sub(r"^sweep\.name=.*", f"sweep.name={sweep.name}", text) for text in command]
        if proposal.batch not in planned:
            ours = [text for text in ours if text.partition("=")[0] not in (BATCH, "sweep.name")]
            ours = [*ours, f"sweep.name={sweep.name}", f"{BATCH}={proposal.batch}"]
        for option, value in options.items():
            ours = _with_option(ours, option, value)
        brings = " ".join(["gptexp tune …", *itertools.chain(*options.items())]) + f": {proposal.brings}"
        proposed.append(replace(proposal, command=as_command(ours), brings=brings))
    return proposed


def _with_option(command: list[str], option: str, value: str) -> list[str]:
    """A command of `gptexp tune` with another value of an option."""
    if option not in command:
        return [command[0], option, value, *command[1:]]
    place = command.index(option) + 1
    return [*command[:place], value, *command[place + 1 :]]


def _proposal(arm: Arm, cells: _Cells, sweep: SweepRecord) -> Proposal | None:
    """The command of `cells`; None if the sweep has them already."""
    batch = cells.batch

    def exists(lr: float) -> bool:
        """Whether a cell at nearly this learning rate has been run and has not failed."""
        tried = [run.lr for run in arm.runs if run.batch == batch and run.status != "failed"]
        return any(math.isclose(lr, other, rel_tol=0.02) for other in tried)

    lrs = [lr for lr in cells.lrs if cells.seeds or not exists(lr)]
    if not lrs:
        return None
    choices = {key: value for key, value in arm.choices.items() if key != TEXT}
    # These options also choose the keys of their group.
    for group in ("optim", *(key.rpartition(".")[0] for key in choices if key.endswith(f".{TARGET}"))):
        if f"{group}.name" in choices:
            choices = {group: choices.pop(f"{group}.name"), **choices}
    scaled = lr_scaling(arm.runs[0].config, batch)
    rates = ",".join(format(lr / scaled, ".6g" if exists(lr) else ".3g") for lr in lrs)
    swept = [f"batch.total_batch_size={batch}", f"optim.lr={rates}"]
    if seeds := cells.seeds or _usual_seed(arm, sweep):
        swept.append(f"train.seed={','.join(map(str, seeds))}")
    chosen = [f"{key}={as_value(value)}" for key, value in choices.items() if not key.endswith((TARGET, SOURCE))]
    own = [*chosen, f"sweep.name={sweep.name}", *swept, *_tied(arm, sweep, batch)]
    replaced = {text.partition("=")[0] for text in own} | {*AXES}
    kept = [text for text in sweep.overrides if text.partition("=")[0] not in replaced]
    if f"model.{TARGET}" not in arm.runs[0].config:  # the newest command may have been for an arm with an own model
        option = branch.choices(arm.runs[0].directory).get("model")
        kept = [f"model={option}" if option and text.startswith("model=") else text for text in kept]
    runs = len(lrs) * max(1, len(cells.seeds))
    ended = [run for run in arm.runs if run.status == "completed" and run.summary.get("wall_s")]
    wall_times = [run.summary["wall_s"] for run in [run for run in ended if run.batch == batch] or ended]
    minutes = runs * median(wall_times) / 60 if wall_times else None
    return Proposal(arm.label, batch, as_command(["train", "-m", *kept, *own]), cells.why, cells.brings, runs, minutes)


def _usual_seed(arm: Arm, sweep: SweepRecord) -> list[int]:
    """The seed of most of the arm's runs, so that new learning rates compare; none if no command gave a seed."""
    arguments = [*sweep.overrides, *itertools.chain(*sweep.commands)]
    swept = {key for cell in sweep.cells.values() for key in cell.values}
    is_given = "train.seed" in swept or any(text.partition("=")[0] == "train.seed" for text in arguments)
    return [mode(sorted(run.seed for run in arm.runs))] if is_given else []


def _tied(arm: Arm, sweep: SweepRecord, batch: int) -> list[str]:
    """Swept values without effect on a result, such as the micro-batch, from a cell at the nearest batch size.

    A grid of several mappings may tie such values to the batch size. If a command gave only a new batch size, every
    mapping would have cells at it, each with another micro-batch.
    """
    nearest = min(arm.runs, key=lambda run: abs(math.log(run.batch / batch)))
    values = sweep.cells[nearest.name].values if nearest.name in sweep.cells else {}
    return [f"{key}={value}" for key, value in values.items() if "." in key and key not in nearest.config]


def _answering(arm: Arm, within: float) -> Iterator[_Cells]:
    """The cells of each proposal that brackets or narrows an optimum."""
    seeds = [max(run.seed for run in arm.runs) + i for i in range(1, MOST_SEEDS + 1)]
    for batch, lrs in arm.all_diverged.items():
        below, _ = one_step_outside(lrs)
        why = f"at {tokens(batch)} training diverged at every learning rate that was run"
        yield _Cells(batch, [below**2 / lrs[0], below], [], why, "a lower learning rate")
    for batch, curve in arm.curves.by_batch.items():
        if curve.optimum is None:
            yield _bracketing(arm, batch, curve, seeds)
        elif not curve.optimum.is_within(within) or not curve.noise_is_known:
            yield from _narrowing(arm, batch, curve, seeds, within)


def _beyond(arm: Arm) -> Iterator[_Cells]:
    """The cells of a larger batch size, which tests the law."""
    if arm.law is not None and not arm.law.bends:
        batch = 2 * max(arm.law.sizes)
        smallest = min(arm.losses[batch // 2])
        middle = 2 ** round(math.log2(arm.law.at(batch) / smallest)) * smallest  # keeps to the grid of octaves
        why = "tests the law at twice the largest batch size"
        yield _Cells(batch, [middle * 2.0**i for i in range(-2, 3)], [], why, why)


def _bracketing(arm: Arm, batch: int, curve: Curve, seeds: list[int]) -> _Cells:
    """Cells that show where the optimum is, at a batch size where it is not bracketed."""
    where = f"at {tokens(batch)}"
    if curve.status == "jagged":
        if bad := [lr for lr in arm.diverged.get(batch, ()) if lr < curve.best]:
            why = f"{where} training diverged at this learning rate, but not at higher ones: does it again?"
            return _Cells(batch, bad[:1], seeds[:1], why, f"another seed at {bad[0]:g}")
        why = f"{where} another seed shows whether the losses really rise and fall"
        return _Cells(batch, list(arm.losses[batch]), seeds[:1], why, "another seed")
    limit = _limit(arm, batch, curve)
    lrs = [lr for lr in arm.losses[batch] if lr < limit]
    below, above = one_step_outside(lrs)
    if curve.status == "too few":
        ends = [below, above] if len(lrs) == 1 else [below if curve.best == lrs[0] else above]
        why = f"{where} a lowest point needs three learning rates"
        return _Cells(batch, [lr for lr in ends if lr < limit] or [below], [], why, "more learning rates")
    beyond: list[float] = []
    if curve.side == "higher" or curve.above > UNLIKELY:
        if above < limit:
            beyond += [above, above**2 / lrs[-1]] if curve.above > OUTSIDE else [above]
        elif limit > lrs[-1] * CLOSEST:
            beyond += [math.sqrt(lrs[-1] * limit)]
    if curve.side == "lower" or curve.below > UNLIKELY:
        beyond += [below**2 / lrs[0], below] if curve.below > OUTSIDE else [below]
    if not beyond or lrs[-1] / lrs[0] >= WIDEST:
        why = f"{where} more seeds tell these learning rates apart, if they differ"
        return _Cells(batch, sorted({lrs[0], curve.best, lrs[-1]}), seeds[:SEEDS], why, "more seeds")
    new = sorted(lr for lr in beyond if lr < limit)
    share = arm.curves.fits[batch].inside(min(new[0], lrs[0]), limit if limit < math.inf else max(new[-1], lrs[-1]))
    sides = [side for side, is_tried in (("lower", new[0] < lrs[0]), ("higher", new[-1] > lrs[-1])) if is_tried]
    likely = f"{min(share, LIKELIEST):.0%} likely"
    brings = f"{' and '.join(sides)} learning rates, {likely} to bracket it"
    return _Cells(batch, new, [], f"{where} {curve.why}; {likely} to lie inside the new grid", brings)


def _limit(arm: Arm, batch: int, curve: Curve) -> float:
    """The lowest learning rate above the best one that diverged or lies on a plateau, or infinity."""
    too_high = [*arm.diverged.get(batch, ()), *arm.curves.plateaus[batch]]
    return min((lr for lr in too_high if lr > curve.best), default=math.inf)


def _narrowing(arm: Arm, batch: int, curve: Curve, seeds: list[int], within: float) -> Iterator[_Cells]:
    """The cheapest cells from which an interval of `within` octaves on each side is expected.

    If none are enough: the cheapest that narrow it half of the way (in log width), else those that narrow it most.
    """
    optimum = curve.optimum
    assert optimum is not None
    limit = _limit(arm, batch, curve)
    lrs = [lr for lr in arm.losses[batch] if lr < limit]
    ends = [*lrs, limit] if limit < math.inf else lrs
    between = [math.sqrt(a * b) for a, b in itertools.pairwise(ends) if b / a > WIDE_GAP]
    near = [lr for lr in {*lrs, *between} if optimum.low / REACH <= lr <= optimum.high * REACH]
    rates = sorted(near) or [optimum.lr]  # if the grid is so coarse that none of its rates is near
    target, now = 2 * within, optimum.octaves
    halfway = max(target, math.sqrt(target * now))

    def cost(plan: tuple[float, tuple[int, ...], int]) -> tuple[Any, ...]:
        width, chosen, repeats = plan
        runs = len(chosen) * repeats
        return width > target, width > halfway, runs if width <= halfway else width, runs, width, chosen, repeats

    plans = list(_plans(arm.curves.fits[batch], np.log2(rates), now))
    if not curve.noise_is_known:  # without two seeds of one cell the noise stays unknown
        plans = [plan for plan in plans if any(rates[i] in lrs for i in plan[1])] or plans
    width, chosen, repeats = min(plans, key=cost)
    expected = max(width, NARROWEST)
    narrows = f"its interval is {now:.2f} octaves wide and would be about {expected:.2f}"
    if not curve.noise_is_known:
        narrowing = f"; {narrows}" if now > target else ""
        narrows = f"the noise is unknown without a second seed{narrowing}"
    if expected < SMALLEST_GAIN * now or not curve.noise_is_known:
        why, brings = f"at {tokens(batch)} {narrows}", f"from {now:.2f} to {expected:.2f} octaves"
        yield _Cells(batch, [rates[i] for i in chosen], seeds[:repeats], why, brings)


def _plans(batch_fit: BatchFit, x: Array, octaves: float) -> Iterator[tuple[float, tuple[int, ...], int]]:
    """Plans of runs at some of log2(lr) = `x`: width of the interval after them, indices in `x`, runs at each.

    `octaves`: the width now. How far runs lower the variance of the optimum follows from its posterior covariance with
    the losses, as if all were normal.
    """
    joint, noise = covariance(batch_fit, batch_fit.octaves, x)
    for size in range(1, min(3, len(x)) + 1):
        for chosen in itertools.combinations(range(len(x)), size):
            losses = [1 + i for i in chosen]
            for repeats in range(1, MOST_SEEDS + 1):
                seen = joint[np.ix_(losses, losses)] + np.diag(noise[list(chosen)] / repeats)
                gain = joint[0, losses] @ np.linalg.solve(seen, joint[losses, 0])
                yield octaves * math.sqrt(max(0.0, 1 - gain / joint[0, 0])), chosen, repeats
