"""Commands that run further cells where the analysis leaves a question open."""

import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from gptexp.config.schema import shown
from gptexp.reporting.analysis import AXES, TEXT, Analysis, Arm

SEEDS = 4  # new seeds of a proposal; proposed if the noise has fewer degrees of freedom
WIDE = 64.0  # largest over smallest learning rate; a flat grid this wide needs more seeds, not more learning rates
SPACING = 2.0  # ratio of learning rates if the grid has only one


def commands(analysis: Analysis, overrides: Sequence[str], sweep_name: str) -> list[str]:
    """`gptexp train -m …` commands that extend the sweep; `overrides` are those of its own command line."""
    found = []
    for arm in analysis.arms:
        chosen = [f"{key}={_typed(value)}" for key, value in arm.choices.items() if key != TEXT]
        replaced = {text.partition("=")[0] for text in chosen} | {*AXES}
        kept = [text for text in overrides if text.partition("=")[0] not in replaced]
        fixed = [*kept, *chosen, f"sweep.name={sweep_name}"]
        for batch, lrs, seeds in _cells(arm):
            swept = [f"batch.total_batch_size={batch}", f"optim.lr={','.join(f'{lr:.6g}' for lr in lrs)}"]
            if seeds:
                swept.append(f"train.seed={','.join(map(str, seeds))}")
            found.append(shlex.join(["gptexp", "train", "-m", *fixed, *swept]))
    return found


def _typed(value: Any) -> str:
    """A value in the syntax of Hydra's command line."""
    text = shown(value)
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text


def _cells(arm: Arm) -> list[tuple[int, list[float], list[int]]]:
    """(batch size, learning rates, seeds) of each command; no seeds: those of the config."""
    new_seeds = [max(run.seed for run in arm.runs) + i for i in range(1, SEEDS + 1)]
    wanted: list[tuple[int, list[float], list[int]]] = []
    for batch, curve in arm.curves.of.items():
        lrs = sorted(arm.losses[batch])
        step = lrs[1] / lrs[0] if len(lrs) > 1 else SPACING
        if curve.status == "not bracketed" and curve.extend is not None:
            beyond = curve.extend * (step if curve.extend > lrs[-1] else 1 / step)
            diverges = curve.extend > lrs[-1] and any(lr <= beyond for lr in arm.diverged.get(batch, ()))
            wanted.append((batch, [curve.extend] if diverges else sorted([curve.extend, beyond]), []))
        elif curve.tied is not None and lrs[-1] / lrs[0] >= WIDE:
            best = min(lrs, key=lambda lr: arm.means[batch, lr])
            wanted.append((batch, sorted({*curve.tied, best}), new_seeds))
        elif curve.status in ("flat", "too few"):
            below, above = lrs[0] / step, lrs[-1] * step
            diverges = any(lr <= above for lr in arm.diverged.get(batch, ()))
            wanted.append((batch, [below] if diverges else [below, above], []))
    noise = arm.curves.noise
    if arm.best is not None and (noise is None or noise.dof < SEEDS) and len(arm.runs) > 1:
        wanted.append((arm.best[0], [arm.best[1]], new_seeds))
    if arm.law is not None and not wanted and not arm.law.bends:
        batch = 2 * max(arm.law.sizes)
        smallest = min(arm.losses[batch // 2])
        middle = 2 ** round(math.log2(arm.law.at(batch) / smallest)) * smallest  # keeps to the grid of octaves
        wanted.append((batch, [middle * 2.0**i for i in range(-2, 3)], []))
    return wanted
