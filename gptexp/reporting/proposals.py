"""What to run next where the analysis leaves a question open: commands, with their reason and their cost."""

import itertools
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gptexp.process.terminal import as_command
from gptexp.process.words import counted, shown
from gptexp.reporting.analysis import OPTIMIZER, TEXT, Analysis, Arm
from gptexp.reporting.curves import Curve, one_step_outside
from gptexp.reporting.progress import is_unfinished
from gptexp.reporting.records import AXES, lr_scaling
from gptexp.storage.sweep_record import SweepRecord

WIDE = 64.0  # largest over smallest learning rate; a flat grid this wide needs more seeds, not more learning rates
SEEDS = 2  # new seeds of a proposal


@dataclass(frozen=True)
class Proposal:
    """A command of a sweep that answers an open question."""

    command: str
    why: str
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
    seeds: list[int]  # empty: that of the config
    why: str


def proposals(analysis: Analysis, sweep: SweepRecord) -> list[Proposal]:
    """Extensions of a sweep, without cells that it already has; none at a batch size where cells still run or wait."""
    found = []
    for arm in analysis.arms:
        if any(run.branch is not None for run in arm.runs):
            continue  # a branch has the learning rate, the batch size and the seed of its run
        choices = {key: value for key, value in arm.choices.items() if key != TEXT}
        if OPTIMIZER in choices:  # the option also chooses the optimizer's keys
            choices = {"optim": choices.pop(OPTIMIZER), **choices}
        chosen = [f"{key}={_typed(value)}" for key, value in choices.items()]
        for cells in _wanted(arm):
            if is_unfinished(sweep, analysis.runs, cells.batch):
                continue
            lrs = [lr for lr in cells.lrs if cells.seeds or not _exists(arm, cells.batch, lr)]
            if not lrs:
                continue
            digits = ".6g" if cells.seeds else ".3g"  # seeds are for learning rates that exist
            scaled = lr_scaling(arm.runs[0].config, cells.batch)
            rates = ",".join(format(lr / scaled, digits) for lr in lrs)
            swept = [f"batch.total_batch_size={cells.batch}", f"optim.lr={rates}"]
            if seeds := cells.seeds or _seed_of(arm, sweep):
                swept.append(f"train.seed={','.join(map(str, seeds))}")
            own = [*chosen, f"sweep.name={sweep.name}", *swept, *_tied(arm, sweep, cells.batch)]
            replaced = {text.partition("=")[0] for text in own} | {*AXES}
            kept = [text for text in sweep.overrides if text.partition("=")[0] not in replaced]
            command = as_command(["train", "-m", *kept, *own])
            runs = len(lrs) * max(1, len(cells.seeds))
            found.append(Proposal(command, cells.why, runs, _minutes(arm, cells.batch, runs)))
    return found


def _seed_of(arm: Arm, sweep: SweepRecord) -> list[int]:
    """The seed of most of the arm's runs, so that new learning rates compare; none if the config sets it for all."""
    given = [
        *sweep.overrides,
        *itertools.chain(*sweep.commands),
        *itertools.chain(*(c.values for c in sweep.cells.values())),
    ]
    if not any(text.partition("=")[0] == "train.seed" for text in given):
        return []
    seeds = sorted(run.seed for run in arm.runs)
    return [statistics.mode(seeds)]


def _tied(arm: Arm, sweep: SweepRecord, batch: int) -> list[str]:
    """The swept values that have no effect on a result, such as the micro-batch, of a cell at the nearest batch size.

    A grid of several mappings may tie them to the batch size. With a new batch size alone, the cells of every mapping
    would have it, each with another micro-batch.
    """
    nearest = min(arm.runs, key=lambda run: abs(math.log(run.batch / batch)))
    cell = sweep.cells.get(nearest.name)
    values = cell.values if cell is not None else {}
    return [f"{key}={value}" for key, value in values.items() if "." in key and key not in nearest.config]


def _typed(value: Any) -> str:
    """A value in the syntax of Hydra's command line."""
    text = shown(value)
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text


def _exists(arm: Arm, batch: int, lr: float) -> bool:
    """Whether a cell at nearly this learning rate has been run, with whatever outcome."""
    return any(run.batch == batch and math.isclose(lr, run.lr, rel_tol=0.02) for run in arm.runs)


def _minutes(arm: Arm, batch: int, runs: int) -> float | None:
    ended = [run for run in arm.runs if run.status == "completed" and run.summary.get("wall_s")]
    alike = [run for run in ended if run.batch == batch] or ended
    return runs * statistics.median(run.summary["wall_s"] for run in alike) / 60 if alike else None


def _wanted(arm: Arm) -> list[_Cells]:
    """The cells of each proposal. Shapes come first, seeds where the shape is known, then a larger batch size."""
    seeds = [max(run.seed for run in arm.runs) + i for i in range(1, SEEDS + 1)]
    found: list[_Cells] = []
    for batch, curve in arm.curves.of.items():
        found += _for_the_shape(arm, batch, curve, seeds)
        for lr in dict.fromkeys(outlier.lr for outlier in curve.outliers):
            found.append(
                _Cells(batch, [lr], seeds[:1], f"{_at(batch)} one run there is left out, as nothing explains it")
            )
    for batch, lrs in arm.all_diverged.items():
        below, _ = one_step_outside(sorted(lrs))
        why = f"{_at(batch)} training diverged at every learning rate that was run"
        found.append(_Cells(batch, sorted([below, below**2 / min(lrs)]), [], why))
    for batch, curve in arm.curves.of.items():
        if curve.bracket is not None and (curve.noise is None or not curve.noise.is_sure):
            why = f"measures the noise {_at(batch)}, which gives its best learning rate an interval"
            found.append(_Cells(batch, _around(arm, batch, curve), seeds, why))
    if arm.law is not None and not found and not arm.law.bends:
        batch = 2 * max(arm.law.sizes)
        smallest = min(arm.losses[batch // 2])
        middle = 2 ** round(math.log2(arm.law.at(batch) / smallest)) * smallest  # keeps to the grid of octaves
        why = "tests the law at twice the largest batch size"
        found.append(_Cells(batch, [middle * 2.0**i for i in range(-2, 3)], [], why))
    return found


def _at(batch: int) -> str:
    return f"at {batch:,} tokens a step"


def _for_the_shape(arm: Arm, batch: int, curve: Curve, seeds: list[int]) -> Iterator[_Cells]:
    lrs = sorted(arm.curves.losses[batch])  # those that the curve was judged by
    limit = min(arm.diverged.get(batch, ()), default=math.inf)
    limit = min([limit, *(outlier.lr for outlier in curve.outliers if outlier.lr > lrs[-1])])
    below, above = one_step_outside(lrs)
    at = _at(batch)
    if curve.next_lr is not None and lrs[0] < curve.next_lr < lrs[-1]:
        why = f"{at} the lowest point may lie in this gap of the grid"
        yield _Cells(batch, [curve.next_lr], [], why)
    elif curve.next_lr is not None:
        edge = lrs[-1] if curve.next_lr > lrs[-1] else lrs[0]
        beyond = curve.next_lr**2 / edge  # below one that diverged, this is that one, which exists
        yield _Cells(batch, sorted([curve.next_lr, beyond]), [], f"{at} {curve.why}")
    elif curve.status == "not bracketed":
        ends = sorted({lrs[0], curve.best or lrs[0], lrs[-1]})
        yield _Cells(batch, ends, seeds, f"{at} seeds show whether the loss rises on both sides of the best one")
    elif curve.status == "jagged" and limit < (curve.best or 0.0):
        why = f"{at} training diverged at this learning rate, but not at higher ones: does it again?"
        yield _Cells(batch, [limit], seeds, why)
    elif curve.status == "jagged":
        yield _Cells(batch, lrs, seeds[:1], f"{at} a second seed shows whether the losses really rise and fall")
    elif curve.tied is not None and lrs[-1] / lrs[0] >= WIDE:
        tied = sorted({*curve.tied, curve.best or curve.tied[0]})
        yield _Cells(batch, tied, seeds, f"{at} more seeds tell these learning rates apart, if they differ")
    elif curve.tied is not None:
        outside = [below] if above >= limit else [below, above]
        yield _Cells(batch, outside, [], f"{at} the grid is too narrow to show where the loss rises")
    elif curve.status == "too few":
        ends = [below, above]
        if len(lrs) > 1:
            ends = [below if curve.best == lrs[0] else above]
        yield _Cells(batch, [lr for lr in ends if lr < limit], [], f"{at} a lowest point needs three learning rates")


def _around(arm: Arm, batch: int, curve: Curve) -> list[float]:
    """The best learning rate and its two neighbours."""
    lrs = sorted(arm.curves.losses[batch])
    best = lrs.index(curve.best) if curve.best is not None else 0
    return lrs[best - 1 : best + 2]
