"""Which cells are worth running next, as commands."""

import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from gptexp.config import shown
from gptexp.report.analysis import AXES, TEXT, Analysis, Arm

SEEDS = 4  # degrees of freedom of the noise below which more seeds are asked for
WIDE = 64.0  # from the smallest to the largest learning rate of a grid that need not be wider to show a curve
SPACING = 2.0  # between learning rates where a grid does not tell


def commands(analysis: Analysis, overrides: Sequence[str], sweep_name: str) -> list[str]:
    """`gptexp train -m …` that widen the sweep where its answers are open; empty where nothing is.

    `overrides`: those that all cells of the sweep were started with.
    """
    found = []
    for arm in analysis.arms:
        chosen = [f"{key}={_typed(value)}" for key, value in arm.choices.items() if key != TEXT]
        own = {text.partition("=")[0] for text in chosen} | {*AXES}
        kept = [text for text in overrides if text.partition("=")[0] not in own]
        fixed = [*kept, *chosen, f"sweep.name={sweep_name}"]
        for batch, lrs, seeds in _cells(arm):
            swept = [f"batch.total_batch_size={batch}", f"optim.lr={','.join(f'{lr:.6g}' for lr in lrs)}"]
            if seeds:
                swept.append(f"train.seed={','.join(map(str, seeds))}")
            found.append(shlex.join(["gptexp", "train", "-m", *fixed, *swept]))
    return found


def _typed(value: Any) -> str:
    """A value as Hydra's command line takes it."""
    text = shown(value)
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text


def _cells(arm: Arm) -> list[tuple[int, list[float], list[int]]]:
    """(batch size, learning rates, seeds or none) of each command."""
    wanted: list[tuple[int, list[float], list[int]]] = []
    for batch, curve in arm.curves.of.items():
        lrs = sorted(arm.losses[batch])
        step = lrs[1] / lrs[0] if len(lrs) > 1 else SPACING
        if curve.status == "not bracketed" and curve.extend is not None:
            beyond = curve.extend * (step if curve.extend > lrs[-1] else 1 / step)
            diverges = any(lr <= beyond for lr in arm.diverged.get(batch, ()) if curve.extend > lrs[-1])
            wanted.append((batch, [curve.extend] if diverges else sorted([curve.extend, beyond]), []))
        elif curve.tied is not None and lrs[-1] / lrs[0] >= WIDE:  # more runs then, not others
            best = min(lrs, key=lambda lr: arm.means[batch, lr])
            wanted.append((batch, sorted({*curve.tied, best}), _new_seeds(arm)))
        elif curve.status in ("flat", "too few"):
            above = [lr for lr in (lrs[-1] * step,) if not any(gone <= lr for gone in arm.diverged.get(batch, ()))]
            wanted.append((batch, [lrs[0] / step, *above], []))
    noise = arm.curves.noise
    if arm.best is not None and (noise is None or noise.dof < SEEDS) and len(arm.runs) > 1:
        wanted.append((arm.best[0], [arm.best[1]], _new_seeds(arm)))
    if arm.law is not None and not wanted and not arm.law.bends:
        batch = 2 * max(arm.law.sizes)
        middle = 2 ** round(math.log2(arm.law.at(batch) / min(arm.losses[batch // 2]))) * min(arm.losses[batch // 2])
        wanted.append((batch, [middle * 2.0**i for i in range(-2, 3)], []))
    return wanted


def _new_seeds(arm: Arm) -> list[int]:
    taken = max(run.seed for run in arm.runs)
    return [taken + i for i in range(1, SEEDS + 1)]
