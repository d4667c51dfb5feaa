"""The analysis of a sweep: runs grouped into arms, and each arm's optima, law, noise and critical batch size."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import median
from typing import Any

from gptexp.config.metrics import Metric
from gptexp.config.parts import SOURCE, TARGET
from gptexp.config.rules import confounds_of
from gptexp.config.schema import ModelConfig
from gptexp.process.terminal import printable
from gptexp.process.words import first_keys, shown
from gptexp.reporting.listings.listing import NOT_SHAPE, nearest_model
from gptexp.reporting.listings.records import Run, differing_keys, has_diverged, tokenizers
from gptexp.reporting.statistics.critical import Critical, critical_batch_size, steps_to
from gptexp.reporting.statistics.curves import Cell, Curves, Outlier, fit_curves
from gptexp.reporting.statistics.law import Law, fit_law
from gptexp.reporting.statistics.noise import usual_spread

OPTIMIZER = "optim.name"
# Key -> prefix of the keys whose values it may imply.
IMPLYING = {OPTIMIZER: "optim.", "model.parametrisation": "model.base_"}
WIDTH, HEADS = "model.n_embd", "model.n_head"
STEPS_SPREAD = 0.05  # standard deviation over seeds of log(steps to a loss), if no seeds measure it
TEXTS = "validation_hashes"  # key of the summary; hashes of the texts of data.validation, by the names of their losses
TEXT = "data_hash"  # key of the summary; runs that trained on different text belong to different arms


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in learning rate, batch size and seed."""

    choices: dict[str, Any]  # keys and values that tell the arm from the others; empty if it is the only one
    implied: set[str]  # keys that follow from others of its `choices`, see `_implied`
    runs: list[Run]

    @property
    def label(self) -> str:
        """What tells the arm from the others, in a few words; empty if it is the only one."""
        return label_of(self.choices, self.implied, self.runs[0])

    @cached_property
    def curves(self) -> Curves:
        return fit_curves(*_outcomes(self.runs), usual_spread_of(self.runs))

    @property
    def losses(self) -> dict[int, dict[float, list[float]]]:
        """Batch size -> learning rate -> final loss of each seed."""
        return self.curves.losses

    @property
    def diverged(self) -> dict[int, list[float]]:
        """Batch size -> learning rates."""
        return self.curves.diverged

    @property
    def means(self) -> dict[Cell, float]:
        """Mean loss of each cell over seeds."""
        return self.curves.means

    @cached_property
    def law(self) -> Law | None:
        return fit_law(self.curves.octaves)

    @cached_property
    def best(self) -> Cell | None:
        """The cell with the lowest mean loss."""
        lowest = [(batch, curve.best) for batch, curve in self.curves.by_batch.items()]
        return min(lowest, key=lambda cell: self.means[cell], default=None)

    @cached_property
    def ties(self) -> list[Cell]:
        """Other cells that are not significantly worse than the best one."""
        others = [cell for cell in self.means if cell != self.best]
        worse = self.curves.worse(others, self.best) if self.best is not None else set()
        return [cell for cell in others if cell not in worse]

    @property
    def averages(self) -> bool:
        """Whether `critical` is that of the averaged weights, which needs their evaluations in all runs."""
        evaluated = [run for run in self.runs if run.val]
        return bool(evaluated) and all(run.val_ema for run in evaluated)

    @cached_property
    def _critical(self) -> tuple[float | None, Critical | None, list[int]]:
        return _critical(self.runs, self.averages)

    @property
    def target_loss(self) -> float | None:
        """The loss for which `critical` counts the steps."""
        return self._critical[0]

    @property
    def critical(self) -> Critical | None:
        """The critical batch size; None if the schedule or the runs do not allow it."""
        return self._critical[1]

    @property
    def at_an_edge(self) -> list[int]:
        """The batch sizes whose fastest learning rate in `critical` is the smallest or largest one."""
        return self._critical[2]

    @property
    def outliers(self) -> list[tuple[Run, Outlier]]:
        """The runs that hardly count in the curves."""
        outliers = {(b, o.lr, o.loss): o for b, curve in self.curves.by_batch.items() for o in curve.outliers}
        places = [(run, (run.batch, run.lr, run.loss)) for run in self.runs]
        return [(run, outliers[place]) for run, place in places if place in outliers]

    @property
    def counted(self) -> list[Run]:
        """The runs that count in the curves: completed, not diverged and no outliers."""
        outliers = {run.name for run, _ in self.outliers}
        completed = [run for run in self.runs if run.loss in self.losses.get(run.batch, {}).get(run.lr, [])]
        return [run for run in completed if run.name not in outliers]

    @property
    def at_best_lr(self) -> dict[int, list[Run]]:
        """Batch size -> the runs that count at its learning rate with the lowest mean loss."""
        best = {batch: curve.best for batch, curve in self.curves.by_batch.items()}
        return {batch: [run for run in self.counted if (run.batch, run.lr) == (batch, best[batch])] for batch in best}

    @property
    def all_diverged(self) -> dict[int, list[float]]:
        """Batch size -> learning rates, for the batch sizes at which training diverged at every learning rate."""
        return {batch: lrs for batch, lrs in self.diverged.items() if batch not in self.losses}

    @property
    def is_grid(self) -> bool:
        """Whether any batch size has several learning rates."""
        return bool(self.curves.fits)


def label_of(choices: Mapping[str, Any], implied: Collection[str], run: Run) -> str:
    """The `choices` of an arm, one of whose runs is `run`, in a few words.

    Keys of the model's shape are replaced by the nearest option of the group `model`, if the name and what differs from
    it are fewer words. `implied` keys are left out.
    """
    choices = {key: value for key, value in choices.items() if key not in implied}
    if (name := choices.pop(OPTIMIZER, None)) is not None:
        choices = {"optim": name, **choices}
    sizes = [key for key in choices if key.startswith("model.") and key.removeprefix("model.") not in NOT_SHAPE]
    known = {f.name: run.config.get(f"model.{f.name}", f.default) for f in fields(ModelConfig)}
    option, changed = nearest_model(ModelConfig(**known)) if len(sizes) > 1 else (None, [])
    if f"model.{TARGET}" in run.config:
        own = {key.removeprefix("model.") for key in run.config if key.startswith("model.")} - known.keys()
        option, changed = run.config["model.name"], [*(own - {"name", TARGET, SOURCE})]
    replaced = [key for key in sizes if key.removeprefix("model.") not in changed]
    if option is not None and len(replaced) > 1:
        choices = {"model": option, **{key: value for key, value in choices.items() if key not in replaced}}
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
    def objective(self) -> str:
        """The validation loss of `runs`; see `records.toward`."""
        return next((run.objective for run in self.runs), Metric.VAL_LOSS)

    @property
    def named(self) -> list[str]:
        """The `differing` keys that tell at least one arm from the others, and that no other key implies."""
        return [key for key in self.differing if any(key in arm.choices.keys() - arm.implied for arm in self.arms)]

    @property
    def best_arm(self) -> Arm | None:
        """The arm with the cell of the lowest mean loss."""
        return min((arm for arm in self.arms if arm.means), key=lambda arm: min(arm.means.values()), default=None)

    @property
    def best_runs(self) -> list[Run]:
        """The runs that count in the cell with the lowest mean loss."""
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
        arms.append(Arm(choices, implied, members))
    problems = [run.problem for run in runs if run.problem]
    problems += [
        f"{run.name}: completed with a loss of {run.loss:.4g}, far above that of a uniform guess "
        f"({math.log(run.config['model.vocab_size']):.1f}); it counts as diverged"
        for run in readable
        if has_diverged(run) and run.loss is not None
    ]
    missing = [run for run in readable if run.status == "completed" and run.loss is None and run.curves]
    problems += [f"{run.name}: has not logged {run.objective}; start it anew to have it" for run in missing]
    several_batches = [arm for arm in arms if len({run.batch for run in arm.runs}) > 1]
    confounds = sorted({line for arm in several_batches for line in confounds_of(arm.runs[0].config)})
    return Analysis(name, list(runs), arms, differing, [*problems, *data_warnings(readable), *confounds])


def _implied(runs: Sequence[Run], differing: Collection[str]) -> dict[tuple[str, Any], set[str]]:
    """(key, value) -> the `differing` keys that it implies: all `runs` with that value agree in these keys.

    A width implies the number of heads if all heads have one size.
    """
    implied: dict[tuple[str, Any], set[str]] = {}
    has_heads = all(WIDTH in run.config and HEADS in run.config for run in runs)
    if WIDTH in differing and has_heads and len({run.config[WIDTH] / run.config[HEADS] for run in runs}) == 1:
        implied = {(WIDTH, run.config[WIDTH]): {HEADS} for run in runs}
    for implying, beginning in IMPLYING.items():
        if implying not in differing:
            continue
        keys = [key for key in differing if key.startswith(beginning) and key != implying]
        for value in {run.config.get(implying) for run in runs}:
            alike = [run.config for run in runs if run.config.get(implying) == value]
            implied[implying, value] = {key for key in keys if len({repr(config.get(key)) for config in alike}) == 1}
    return implied


def _outcomes(runs: Sequence[Run]) -> tuple[dict[int, dict[float, list[float]]], dict[int, list[float]]]:
    """`losses` and `diverged` of the curves of an arm."""
    losses: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    diverged: dict[int, set[float]] = defaultdict(set)
    # A cell that ran under two names counts once: its equal losses would look like two seeds without noise.
    once = {(run.batch, run.lr, run.seed): run for run in sorted(runs, key=lambda run: run.loss is not None)}
    for _, run in sorted(once.items()):
        if has_diverged(run):
            diverged[run.batch].add(run.lr)
        elif run.loss is not None:
            losses[run.batch][run.lr].append(run.loss)
    # A cell with a diverged seed is left out: the mean over its other seeds would be too low.
    complete = {batch: {lr: seeds for lr, seeds in at_batch.items() if lr not in diverged.get(batch, ())}
                for batch, at_batch in losses.items()}  # fmt: skip
    return {b: at for b, at in complete.items() if at}, {batch: sorted(lrs) for batch, lrs in diverged.items()}


def usual_spread_of(runs: Sequence[Run]) -> float:
    """The standard deviation over seeds that runs of this size and length have had, in nats."""
    sizes = [run.summary["parameters"] for run in runs if run.summary.get("parameters")]
    ended = [(run, run.loss) for run in runs if run.loss is not None]
    lengths = [run.summary["tokens"] for run, _ in ended if run.summary.get("tokens")]
    learned = [
        math.log(run.config["model.vocab_size"]) - loss
        for run, loss in ended
        if not has_diverged(run) and isinstance(run.config.get("model.vocab_size"), int)
    ]
    return usual_spread(median(sizes or [0]), median(lengths or [0]), median(learned or [math.inf]))


def _critical(runs: list[Run], averages: bool) -> tuple[float | None, Critical | None, list[int]]:
    """`target_loss`, `critical` and `at_an_edge` of an arm.

    The target is the lowest loss that every batch size reaches. At each batch size, a curve of log(steps to the target)
    over the learning rate is fitted like a curve of losses; its minimum gives the fewest steps. This needs a constant
    learning rate: with decay, the loss in the middle of a run is not that of a shorter run. If all runs have losses of
    averaged weights, these are taken: they come close to the losses after a decay (arXiv 2410.21676).
    """
    if runs[0].config["schedule.name"] != "constant":
        return None, None, []
    courses: dict[int, dict[float, list[list[tuple[int, float]]]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        evaluations = run.val_ema if averages else run.val
        course = [(point.step, point.loss) for point in evaluations if point.loss is not None]
        if run.status == "completed" and course:
            courses[run.batch][run.lr].append(course)
    if len(courses) < 2:
        return None, None, []
    target = max(
        min(max(min(loss for _, loss in course) for course in seeds) for seeds in at_batch.values())
        for at_batch in courses.values()
    )
    log_steps: dict[int, dict[float, list[float]]] = {}
    too_high: dict[int, list[float]] = {}
    for batch, at_batch in courses.items():
        reached = {lr: [steps_to(target, course) for course in seeds] for lr, seeds in at_batch.items()}
        log_steps[batch] = {lr: [math.log(s) for s in steps if s] for lr, steps in reached.items() if all(steps)}
        if not log_steps[batch]:  # every run reached the target before its first evaluation
            return target, None, []
        too_high[batch] = [lr for lr in reached if lr > max(log_steps[batch])]
    curves = fit_curves(log_steps, too_high, STEPS_SPREAD)
    steps = {batch: math.exp(curves.lowest(batch)) for batch in curves.by_batch}
    ends = {batch: (min(at_batch), max(at_batch)) for batch, at_batch in courses.items()}
    at_an_edge = [b for b, curve in curves.by_batch.items() if curve.optimum is None and curve.best in ends[b]]
    return target, critical_batch_size(steps), at_an_edge


def data_warnings(runs: Sequence[Run]) -> list[str]:
    """A line for each run that read other data than most runs of its seed."""
    texts = [(run, run.config["data.tokenizer"], run.summary[TEXT]) for run in runs if run.summary.get(TEXT)]
    lines = []
    if len(differing := tokenizers([run for run, _, _ in texts])) > 1:
        names = ", ".join(map(printable, sorted(differing)))
        lines.append(f"the tokenizers differ ({names}): compare bits per byte, not losses, which are per token")
    for run, _, text, usual in _unlike_most(texts):
        lines.append(f"{run.name}: trained on other text (hash {text}) than most (hash {usual}); do not compare it")
    validated = [(run, run.objective, run.summary.get(TEXTS, {}).get(run.objective)) for run in runs]
    known = [(run, loss, printable(str(text))) for run, loss, text in validated if text is not None]
    for run, loss, text, usual in _unlike_most(known):
        lines.append(
            f"{run.name}: its {loss} is of other text (hash {text}) than most (hash {usual}); do not compare it"
        )
    reads = [
        (run, (data, tokens), read)
        for run in runs
        for data in [_data(run)]
        for tokens, read in sorted(run.fingerprints.items())
    ]
    named = set()  # one difference for each run is enough
    for run, (_, tokens), read, usual in _unlike_most(reads):
        if run.name not in named:
            named.add(run.name)
            lines.append(
                f"{run.name}: read other data in its first {tokens:,} tokens than other runs of its seed "
                f"(fingerprint {printable(read)}, not {printable(usual)}); do not compare them"
            )
    return lines


def _unlike_most(values: Sequence[tuple[Run, Any, str]]) -> Iterator[tuple[Run, Any, str, str]]:
    """Each (run, group, value) whose value is not the most frequent one of its group, with that frequent value."""
    first: dict[Any, str] = {}
    differing = {group for _, group, value in values if first.setdefault(group, value) != value}
    counts: dict[Any, Counter[str]] = {group: Counter() for group in differing}
    for _, group, value in values:
        if group in differing:
            counts[group][value] += 1
    for run, group, value in values:
        if group in differing and value != (usual := counts[group].most_common(1)[0][0]):
            yield run, group, value, usual


def _data(run: Run) -> str:
    """A text that is equal for runs that must read the same tokens in the same order."""
    keys = ("train.seed", "batch.seq_len", "model.block_size", "data.order", "data.offset", "data.max_tokens",
            "data.val_tokens", "data.val_ratio", "data.val_split")  # fmt: skip
    return repr([run.summary.get(TEXT), *(run.config.get(key) for key in keys)])
