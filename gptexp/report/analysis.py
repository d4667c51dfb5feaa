"""From runs to answers: which runs belong together, their optima, the law of the learning rate, the noise."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptexp.check import in_steps
from gptexp.report.critical import Critical, critical_batch_size, steps_to
from gptexp.report.curves import Curves, fit_curves
from gptexp.report.law import Law, fit_law
from gptexp.report.records import Run

TEXT = "data_hash"  # sets runs apart too, where several texts were swept
AXES = ("optim.lr", "batch.total_batch_size", "train.seed")  # all else that differs sets runs apart


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but learning rate, batch size and seed."""

    choices: dict[str, Any]  # the keys and values that set it apart from the other arms; empty where it is the only one
    runs: list[Run]
    losses: dict[int, dict[float, list[float]]]  # batch size -> learning rate -> final loss of each seed
    means: dict[tuple[int, float], float]  # batch size and learning rate -> mean of `losses`
    diverged: dict[int, list[float]]  # batch size -> learning rates
    curves: Curves
    law: Law | None
    target_loss: float | None  # of `critical`
    critical: Critical | None  # None where the schedule or the runs do not allow it
    at_an_edge: list[int]  # batch sizes whose steps in `critical` are those of the smallest or largest learning rate
    best: tuple[int, float] | None  # batch size and learning rate of the lowest mean loss
    ties: list[tuple[int, float]]  # cells that cannot be told from it, itself not among them

    @property
    def is_grid(self) -> bool:
        """Whether some batch size has several learning rates."""
        return any(len(at_batch) > 1 for at_batch in self.losses.values())

    @property
    def schedule(self) -> str:
        return str(self.runs[0].config["schedule.name"])


@dataclass(frozen=True)
class Analysis:
    """All that a report says, but for the words and the pictures."""

    name: str
    runs: list[Run]
    arms: list[Arm]
    apart: list[str]  # the keys of the config by which the arms differ
    warnings: list[str]


def analyse(name: str, runs: Sequence[Run]) -> Analysis:
    """Group `runs` into arms and fit each. Runs that are not completed count only as what they are."""
    readable = [run for run in runs if run.config]
    differing = {key for run in readable for key in run.config if run.config[key] != readable[0].config.get(key)}
    apart = sorted(differing - set(AXES))
    texts = {run.summary.get(TEXT) for run in readable} - {None}
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in readable:
        text = run.summary.get(TEXT) if len(texts) > 1 else None
        groups[repr([text, *(run.config.get(key) for key in apart)])].append(run)
    arms = []
    for members in groups.values():
        choices = {key: members[0].config.get(key) for key in apart}
        if len(texts) > 1:
            choices[TEXT] = members[0].summary.get(TEXT)
        arms.append(_arm(choices, members))
    return Analysis(name, list(runs), arms, apart, [*_problems(runs), *_data_warnings(readable), *_confounds(arms)])


def _arm(choices: dict[str, Any], runs: list[Run]) -> Arm:
    losses: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    diverged: dict[int, list[float]] = defaultdict(list)
    # A cell that was run under two names is one run: its equal losses would pass for seeds without noise.
    once = {(run.batch, run.lr, run.seed): run for run in sorted(runs, key=lambda run: run.loss is not None)}
    for run in sorted(once.values(), key=lambda run: (run.batch, run.lr, run.seed)):
        if run.loss is not None:
            losses[run.batch][run.lr].append(run.loss)
        elif run.status == "diverged" and run.lr not in diverged[run.batch]:
            diverged[run.batch].append(run.lr)
    # Where one seed diverged the others are survivors: their mean would flatter the cell.
    by_batch = {
        batch: kept
        for batch, at_batch in sorted(losses.items())
        if (kept := {lr: of for lr, of in at_batch.items() if lr not in diverged[batch]})
    }
    diverged = {batch: lrs for batch, lrs in diverged.items() if lrs}
    curves = fit_curves(by_batch, diverged)
    target, critical, at_an_edge = _critical(runs)
    cells = {(b, lr): of for b, at_batch in by_batch.items() for lr, of in at_batch.items()}
    mean = {cell: math.fsum(of) / len(of) for cell, of in cells.items()}
    best = min(mean, key=lambda cell: mean[cell], default=None)
    ties = []
    if best is not None and curves.noise is not None:
        ties = [
            cell
            for cell in cells
            if cell != best and curves.noise.ties(mean[cell] - mean[best], len(cells[cell]), len(cells[best]))
        ]
    law = fit_law(curves)
    return Arm(choices, runs, by_batch, mean, diverged, curves, law, target, critical, at_an_edge, best, ties)


def _critical(runs: list[Run]) -> tuple[float | None, Critical | None, list[int]]:
    """At the lowest loss that every batch size came to, the fewest steps over its learning rates.

    Only at a constant learning rate: the loss in the middle of a run that decays is not that of a shorter run.
    """
    if runs[0].config["schedule.name"] != "constant":
        return None, None, []
    courses: dict[int, dict[float, list[list[tuple[int, float]]]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        course = [(point.step, point.loss) for point in run.val if point.loss is not None]
        if run.status == "completed" and course:
            courses[run.batch][run.lr].append(course)
    if len(courses) < 2:
        return None, None, []
    # Seeds are averaged, and only then the best learning rate is taken: more seeds must not look like fewer steps.
    lowest = [
        min(max(min(loss for _, loss in course) for course in of_lr) for of_lr in of_batch.values())
        for of_batch in courses.values()
    ]
    target = max(lowest)
    steps: dict[int, float] = {}
    at_an_edge = []
    for batch, of_batch in courses.items():
        means = {}
        for lr, of_lr in of_batch.items():
            reached = [steps_to(target, course) for course in of_lr]
            if all(reached):
                means[lr] = math.fsum(filter(None, reached)) / len(reached)
        if not means:  # reached before anything was evaluated
            return target, None, []
        fastest = min(means, key=lambda lr: means[lr])
        steps[batch] = means[fastest]
        if fastest in (min(of_batch), max(of_batch)):
            at_an_edge.append(batch)
    return target, critical_batch_size(steps), sorted(at_an_edge)


def _problems(runs: Sequence[Run]) -> list[str]:
    return [run.problem for run in runs if run.problem]


def _data_warnings(runs: list[Run]) -> list[str]:
    """A line for each run that did not read what the others of its seed did."""
    lines = []
    hashes = Counter(run.summary.get(TEXT) for run in runs if run.summary.get(TEXT))
    usual = hashes.most_common(1)[0][0] if hashes else None
    for run in runs:
        if (own := run.summary.get(TEXT)) not in (None, usual):
            lines.append(f"{run.name}: trained on other text ({own}) than most runs here ({usual}); do not compare it")
    read: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)  # stream and tokens -> fingerprints
    for run in runs:
        for tokens, fingerprint in run.fingerprints.items():
            read[_stream(run), tokens][fingerprint] += 1
    for run in runs:
        for tokens, fingerprint in sorted(run.fingerprints.items()):
            [(most_had, _)] = read[_stream(run), tokens].most_common(1)
            if fingerprint != most_had:
                lines.append(
                    f"{run.name}: had read other data after {tokens:,} tokens than other runs of its seed (fingerprint "
                    f"{fingerprint}, not {most_had}); do not compare them"
                )
                break
    return lines


def _stream(run: Run) -> str:
    """Equal for runs that must read the same tokens in the same order."""
    keys = ("train.seed", "batch.seq_len", "model.block_size", "data.order", "data.max_tokens", "data.val_tokens")
    return repr([run.summary.get(TEXT), *(run.config.get(key) for key in keys)])


def _confounds(arms: list[Arm]) -> list[str]:
    """What changes with the batch size beside it."""
    several = [arm for arm in arms if len({run.batch for run in arm.runs}) > 1]
    return sorted({line for arm in several for line in in_steps(arm.runs[0].config)})
