"""The analysis of a sweep: runs grouped into arms, and each arm's optima, law, noise and critical batch size."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gptexp.config.rules import confounds_of
from gptexp.config.schema import ModelConfig
from gptexp.process.terminal import printable
from gptexp.process.words import first_keys, shown
from gptexp.reporting.listings.listing import NOT_SHAPE, model_option
from gptexp.reporting.listings.records import Run, differing_keys, has_diverged
from gptexp.reporting.statistics.critical import Critical, critical_batch_size, steps_to
from gptexp.reporting.statistics.curves import Curves, Outlier, fit_curves
from gptexp.reporting.statistics.law import Law, fit_law
from gptexp.reporting.statistics.noise import usual_spread

OPTIMIZER = "optim.name"
# Key -> the beginning of the keys that it may imply.
IMPLYING = {OPTIMIZER: "optim.", "model.parametrisation": "model.base_"}
WIDTH, HEADS = "model.n_embd", "model.n_head"
STEPS_SPREAD = 0.05  # of the logarithm of the steps to a loss, over seeds, if no seeds measure it
TEXT = "data_hash"  # key of the summary; runs that trained on different text belong to different arms


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in learning rate, batch size and seed."""

    choices: dict[str, Any]  # keys and values that distinguish it from the other arms; empty if it is the only one
    implied: set[str]  # keys that others of its `choices` imply, see `_implied`
    runs: list[Run]
    losses: dict[int, dict[float, list[float]]]  # batch size -> learning rate -> final loss of each seed
    diverged: dict[int, list[float]]  # batch size -> learning rates
    curves: Curves
    law: Law | None
    target_loss: float | None  # the loss for which `critical` counts the steps
    critical: Critical | None  # None if the schedule or the runs do not allow it
    at_an_edge: list[int]  # batch sizes whose fastest learning rate in `critical` is the smallest or largest one
    best: tuple[int, float] | None  # (batch size, learning rate) of the lowest mean loss
    ties: list[tuple[int, float]]  # other cells that are not significantly worse than the best one

    @property
    def label(self) -> str:
        """What distinguishes it, in a few words; empty if it is the only one."""
        return label_of(self.choices, self.implied, self.runs[0])

    @property
    def means(self) -> dict[tuple[int, float], float]:
        """(Batch size, learning rate) -> mean loss over seeds."""
        return self.curves.means

    @property
    def counted(self) -> list[Run]:
        """The runs that count in the curves: completed, not diverged and no outliers."""
        outliers = {run.name for run, _ in self.outliers}
        return [
            run for run in self.runs
            if run.loss in self.losses.get(run.batch, {}).get(run.lr, []) and run.name not in outliers
        ]  # fmt: skip

    @property
    def at_best_lr(self) -> dict[int, list[Run]]:
        """Batch size -> the runs that take part at its learning rate with the lowest mean loss."""
        counted = self.counted
        return {
            batch: [run for run in counted if (run.batch, run.lr) == (batch, curve.best)]
            for batch, curve in self.curves.of.items()
        }

    @property
    def averages(self) -> bool:
        """Whether its critical batch size is that of the averaged weights: if all of its runs have evaluated them."""
        return averages(self.runs)

    @property
    def outliers(self) -> list[tuple[Run, Outlier]]:
        """The runs that hardly count in the curves."""
        return [
            (run, outlier)
            for batch, curve in self.curves.of.items()
            for outlier in curve.outliers
            for run in self.runs
            if (run.batch, run.lr, run.loss) == (batch, outlier.lr, outlier.loss)
        ]

    @property
    def all_diverged(self) -> dict[int, list[float]]:
        """Batch size -> learning rates, for the batch sizes at which training diverged at each of them."""
        return {batch: lrs for batch, lrs in self.diverged.items() if batch not in self.losses}

    @property
    def is_grid(self) -> bool:
        """Whether any batch size has several learning rates."""
        return any(len(at_batch) > 1 for at_batch in self.losses.values())


def label_of(choices: Mapping[str, Any], implied: Collection[str], run: Run) -> str:
    """The `choices` of an arm with `run`, in a few words.

    The name of an option of the group `model` stands for its keys. Keys that are `implied` are left out.
    """
    choices = {key: value for key, value in choices.items() if key not in implied}
    if (name := choices.pop(OPTIMIZER, None)) is not None:
        choices = {"optim": name, **choices}
    sizes = [key for key in choices if key.startswith("model.") and key.removeprefix("model.") not in NOT_SHAPE]
    if len(sizes) > 1 and (option := model_option(_model(run))) is not None:
        choices = {"model": option, **{key: value for key, value in choices.items() if key not in sizes}}
    return first_keys([f"{key}={shown(value)}" for key, value in choices.items()])


@dataclass(frozen=True)
class Analysis:
    """The results of a sweep, from which the sentences, figures and files of a report are made."""

    name: str
    runs: list[Run]
    arms: list[Arm]
    differing: list[str]  # the config's keys in which the arms differ
    warnings: list[str]

    @property
    def named(self) -> list[str]:
        """Those of the `differing` keys that tell at least one arm from the others, and that no other key implies."""
        return [key for key in self.differing if any(key in arm.choices.keys() - arm.implied for arm in self.arms)]

    @property
    def best_arm(self) -> Arm | None:
        """The arm with the cell of the lowest mean loss."""
        return min((arm for arm in self.arms if arm.means), key=lambda arm: min(arm.means.values()), default=None)

    @property
    def best_runs(self) -> list[Run]:
        """The runs of the cell with the lowest mean loss, which count in it."""
        arm = self.best_arm
        return [run for run in arm.counted if (run.batch, run.lr) == arm.best] if arm is not None else []


def analyse(name: str, runs: Sequence[Run]) -> Analysis:
    """Group `runs` into arms and fit each arm. Runs without a readable config are in no arm."""
    readable = [run for run in runs if run.config]
    differing = differing_keys(readable)
    texts = {run.summary.get(TEXT) for run in readable} - {None}
    groups: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run in readable:
        choices = {key: run.config[key] for key in differing if key in run.config}
        if len(texts) > 1:
            choices[TEXT] = run.summary.get(TEXT)
        groups.setdefault(repr(choices), (choices, []))[1].append(run)
    implied_by = _implied(readable, differing)
    arms = []
    for choices, members in groups.values():
        implied = {key for (by, value), keys in implied_by.items() if choices.get(by) == value for key in keys}
        arms.append(_arm(choices, implied, members))
    problems = [run.problem for run in runs if run.problem]
    problems += [
        f"{run.name}: completed with a loss of {run.loss:.4g}, far above that of a uniform guess "
        f"({math.log(run.config['model.vocab_size']):.1f}); it counts as diverged"
        for run in readable
        if has_diverged(run) and run.loss is not None
    ]
    several_batches = [arm for arm in arms if len({run.batch for run in arm.runs}) > 1]
    confounds = sorted({line for arm in several_batches for line in confounds_of(arm.runs[0].config)})
    return Analysis(name, list(runs), arms, differing, [*problems, *data_warnings(readable), *confounds])


def _implied(runs: Sequence[Run], differing: Collection[str]) -> dict[tuple[str, Any], set[str]]:
    """(key, value) -> those of the `differing` keys that it implies: they are equal in all `runs` that have it.

    A width implies the number of heads if all heads have one size.
    """
    found: dict[tuple[str, Any], set[str]] = {}
    if WIDTH in differing and len({run.config[WIDTH] / run.config[HEADS] for run in runs}) == 1:
        found = {(WIDTH, run.config[WIDTH]): {HEADS} for run in runs}
    for implying, beginning in IMPLYING.items():
        if implying not in differing:
            continue
        keys = [key for key in differing if key.startswith(beginning) and key != implying]
        for value in {run.config.get(implying) for run in runs}:
            alike = [run.config for run in runs if run.config.get(implying) == value]
            found[implying, value] = {key for key in keys if len({repr(config.get(key)) for config in alike}) == 1}
    return found


def _arm(choices: dict[str, Any], implied: set[str], runs: list[Run]) -> Arm:
    losses: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    diverged: dict[int, list[float]] = defaultdict(list)
    # A cell that ran under two names counts once: its equal losses would look like two seeds without noise.
    once = {(run.batch, run.lr, run.seed): run for run in sorted(runs, key=lambda run: run.loss is not None)}
    for _, run in sorted(once.items()):
        if has_diverged(run):
            if run.lr not in diverged[run.batch]:
                diverged[run.batch].append(run.lr)
        elif run.loss is not None:
            losses[run.batch][run.lr].append(run.loss)
    # A cell with a diverged seed is left out: the mean over its other seeds would be too low.
    by_batch = {
        batch: kept
        for batch, at_batch in sorted(losses.items())
        if (kept := {lr: of_seeds for lr, of_seeds in at_batch.items() if lr not in diverged[batch]})
    }
    diverged = {batch: lrs for batch, lrs in diverged.items() if lrs}
    curves = fit_curves(by_batch, diverged, usual_spread_of(runs))
    target, critical, at_an_edge = _critical(runs)
    lowest = [(batch, curve.best) for batch, curve in curves.of.items()]
    best = min(lowest, key=lambda cell: curves.means[cell], default=None)
    ties = _ties(curves, best) if best is not None else []
    law = fit_law(curves.octaves)
    return Arm(choices, implied, runs, by_batch, diverged, curves, law, target, critical, at_an_edge, best, ties)


def _ties(curves: Curves, best: tuple[int, float]) -> list[tuple[int, float]]:
    others = [cell for cell in curves.means if cell != best]
    worse = curves.worse(others, best)
    return [cell for cell in others if cell not in worse]


def _model(run: Run) -> ModelConfig:
    return ModelConfig(**{f.name: run.config[f"model.{f.name}"] for f in fields(ModelConfig)})


def usual_spread_of(runs: Sequence[Run]) -> float:
    """The standard deviation over seeds that runs of this size and length have had, in nats."""
    sizes = [run.summary["parameters"] for run in runs if run.summary.get("parameters")]
    lengths = [run.summary["tokens"] for run in runs if run.loss is not None and run.summary.get("tokens")]
    learned = [
        math.log(run.config["model.vocab_size"]) - run.loss
        for run in runs
        if run.loss is not None and not has_diverged(run) and isinstance(run.config.get("model.vocab_size"), int)
    ]
    return usual_spread(
        statistics.median(sizes or [0]), statistics.median(lengths or [0]), statistics.median(learned or [math.inf])
    )


def _critical(runs: list[Run]) -> tuple[float | None, Critical | None, list[int]]:
    """`target_loss`, `critical` and `at_an_edge` of an arm.

    The target is the lowest loss that every batch size reaches. The fewest steps to it at a batch size are the minimum
    of a curve of their logarithm over the learning rate, by a posterior like that of the losses. Needs a constant
    learning rate: with decay, the loss in the middle of a run is not that of a shorter run. Takes the losses of the
    averaged weights if all runs have them: they come close to those after a decay (arXiv 2410.21676).
    """
    if runs[0].config["schedule.name"] != "constant":
        return None, None, []
    courses: dict[int, dict[float, list[list[tuple[int, float]]]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        evaluated = run.val_ema if averages(runs) else run.val
        course = [(point.step, point.loss) for point in evaluated if point.loss is not None]
        if run.status == "completed" and course:
            courses[run.batch][run.lr].append(course)
    if len(courses) < 2:
        return None, None, []
    target = max(
        min(max(min(loss for _, loss in course) for course in of_lr) for of_lr in of_batch.values())
        for of_batch in courses.values()
    )
    log_steps: dict[int, dict[float, list[float]]] = {}
    too_high: dict[int, list[float]] = {}
    for batch, of_batch in courses.items():
        reached = {lr: [steps_to(target, course) for course in of_lr] for lr, of_lr in of_batch.items()}
        log_steps[batch] = {lr: [math.log(s) for s in of_lr if s] for lr, of_lr in reached.items() if all(of_lr)}
        if not log_steps[batch]:  # every run reached the target before its first evaluation
            return target, None, []
        too_high[batch] = [lr for lr in reached if lr > max(log_steps[batch])]
    curves = fit_curves(log_steps, too_high, STEPS_SPREAD)
    steps = {batch: math.exp(curves.lowest(batch)) for batch in curves.of}
    at_an_edge = [
        batch
        for batch, curve in curves.of.items()
        if curve.optimum is None and curve.best in (min(courses[batch]), max(courses[batch]))
    ]
    return target, critical_batch_size(steps), at_an_edge


def averages(runs: Sequence[Run]) -> bool:
    """Whether all runs that have been evaluated have averaged their weights."""
    evaluated = [run for run in runs if run.val]
    return bool(evaluated) and all(run.val_ema for run in evaluated)


def data_warnings(runs: Sequence[Run]) -> list[str]:
    """A line for each run that read other data than most runs of its seed."""
    lines = []
    hashes: dict[str, Counter[str]] = defaultdict(Counter)  # tokenizer -> the hashes of its tokens
    for run in runs:
        if own := run.summary.get(TEXT):
            hashes[run.config["data.tokenizer"]][own] += 1
    if len(hashes) > 1:
        names = ", ".join(map(printable, sorted(hashes)))
        lines.append(f"the tokenizers differ ({names}): compare bits per byte, not losses, which are per token")
    for run in runs:
        if (own := run.summary.get(TEXT)) is None:
            continue
        [(usual, _)] = hashes[run.config["data.tokenizer"]].most_common(1)
        if own != usual:
            lines.append(f"{run.name}: trained on other text (hash {own}) than most (hash {usual}); do not compare it")
    read: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)  # (data, tokens) -> fingerprints
    data = [_data(run) for run in runs]
    for run, of_run in zip(runs, data, strict=True):
        for tokens, fingerprint in run.fingerprints.items():
            read[of_run, tokens][fingerprint] += 1
    for run, of_run in zip(runs, data, strict=True):
        for tokens, fingerprint in sorted(run.fingerprints.items()):
            [(most_had, _)] = read[of_run, tokens].most_common(1)
            if fingerprint != most_had:
                lines.append(
                    f"{run.name}: read other data in its first {tokens:,} tokens than other runs of its seed "
                    f"(fingerprint {fingerprint}, not {most_had}); do not compare them"
                )
                break
    return lines


def _data(run: Run) -> str:
    """Equal for runs that must read the same tokens in the same order."""
    keys = ("train.seed", "batch.seq_len", "model.block_size", "data.order", "data.offset", "data.max_tokens",
            "data.val_tokens", "data.val_ratio", "data.val_split")  # fmt: skip
    return repr([run.summary.get(TEXT), *(run.config.get(key) for key in keys)])
