"""The sweep by Optuna: its study chooses the next cell from the results of the earlier ones."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptexp.config.metrics import Metric
from gptexp.process.errors import EXIT_FAILED, ConfigError, first_line
from gptexp.process.terminal import say, warn
from gptexp.process.words import counted
from gptexp.reporting.listings.records import read_run, toward
from gptexp.storage import locks, run_dir
from gptexp.storage.sweep_record import MOST_CELLS
from gptexp.sweep.cells import PLUGINS, Cell, draft_cells, settle
from gptexp.sweep.space import Axis, Interval
from gptexp.sweep.sweepers import CellSweeper, one_space, whole_number

LOCK = ".lock-study"
MOST_SEED = 2**31  # numpy's seeds lie below 2^32, and each trial adds one
OBJECTIVE = "objective"  # attribute of the study: the loss that it minimises
STUDY = "study.db"  # SQLite; `optuna-dashboard sqlite:///…/study.db` shows it


class OptunaSweeper(CellSweeper):
    """`n_trials` cells chosen one by one by Optuna's TPE sampler, from the losses of the cells that have ended.

    The study is saved in the sweep's directory, and the next command continues it. No cell is stopped early because of
    its loss: rankings change while the learning rate decays (arXiv 2509.02046).
    """

    __module__ = PLUGINS
    learns = True

    def __init__(self, params: Any, n_trials: Any, seed: Any) -> None:
        super().__init__(params)
        self.n_trials = whole_number("hydra.sweeper.n_trials", n_trials, 1, MOST_CELLS)
        self.seed = whole_number("hydra.sweeper.seed", seed, 0, MOST_SEED)

    def setup(self, **given: Any) -> None:
        super().setup(**given)
        if self.config.data.val_tokens == 0 and self.config.data.val_ratio is None:
            rule = "Optuna needs a validation loss; set data.val_tokens above 0"
            raise ConfigError(f"data.val_tokens=0: {rule}", "validation-missing")

    def combinations(self, spaces: Sequence[Sequence[Axis]]) -> list[list[str]]:
        """Return examples to check, not to run. Together they contain every value, and both ends of an interval."""
        space = one_space(spaces)
        texts = [
            axis.among if isinstance(axis.among, list) else [*map(axis.among.text, (axis.among.low, axis.among.high))]
            for axis in space
        ]
        return [
            [axis.override(values[min(number, len(values) - 1)]) for axis, values in zip(space, texts, strict=True)]
            for number in range(max(map(len, texts), default=0))
        ]

    def count(self, combinations: Sequence[Sequence[str]]) -> int:
        return self.n_trials

    def queue(self, cells: list[Cell], spaces: Sequence[Sequence[Axis]]) -> None:
        """Open the study. The `cells` are examples, and only those that the study chooses are run."""
        self.study = Study(self.directory, one_space(spaces), self.seed, self.config.sweep.objective)
        self.total, self.asked, self.illegal = max(0, self.n_trials - self.study.completed), 0, 0
        if not self.study.wants(self.n_trials):
            say(f"--- {counted(self.study.completed, 'trial')} of {self.n_trials} completed; nothing is left to run")
        self.trials: dict[Path, list[int]] = {}  # directory of a cell that runs -> the numbers of its trials

    def choose(self) -> Cell | None:
        while self.asked < self.total and self.study.wants(self.n_trials):
            self.asked += 1
            number, overrides = self.study.ask()
            [draft] = draft_cells(self.compositions, [overrides], self.n_trials, len(self.cells))
            if draft.problems:  # each value is legal, their combination is not
                warn(f"{draft.title}: {draft.problems[0]}")
                self.study.refuse(number)
                self.illegal += 1
                continue
            [cell] = settle([draft], self.directory)
            if cell.directory in self.trials:  # with few choices Optuna repeats some
                self.trials[cell.directory].append(number)
                continue
            if cell.name not in [known.name for known in self.cells]:
                self.cells.append(cell)
            self.record()
            if self.skips(cell):
                self.study.tell(number, cell)
                continue
            self.trials[cell.directory] = [number]
            return cell
        return None

    def to_choose(self) -> int:
        return self.total - self.asked

    def learn(self, cell: Cell) -> None:
        for number in self.trials.pop(cell.directory, ()):
            self.study.tell(number, cell)

    def sweep(self, arguments: list[str]) -> int:
        code = super().sweep(arguments)
        if self.illegal and self.illegal == self.asked:
            warn("all combinations that Optuna chose are illegal; sweep values that fit together")
            return EXIT_FAILED
        return code


class Study:
    """The trials of a sweep, kept in its directory. A trial chooses values; the cell with these values is its run."""

    def __init__(self, directory: Path, space: Sequence[Axis], seed: int, objective: str = Metric.VAL_LOSS) -> None:
        """Open the study in `directory`, or create it. `ask` returns interrupted trials first, then failed ones.

        Raises `ConfigError` if Optuna is not installed, or if the stored study chose from other values or minimised
        another loss than `objective`.
        """
        self.objective = objective
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                "hydra/sweeper=optuna: not installed; pip install 'gptexp[optuna]'", "package-missing"
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.states = optuna.trial.TrialState
        self.space = space
        self.distributions = {axis.key: _distribution(axis) for axis in space if axis.swept}
        path = (directory / STUDY).absolute()
        try:
            with locks.take(directory / LOCK):  # Optuna fails if another command creates the tables just then
                self.study = optuna.create_study(storage=f"sqlite:///{path}", study_name="gptexp", load_if_exists=True)
            trials, minimised = self.study.get_trials(), self.study.user_attrs.get(OBJECTIVE, Metric.VAL_LOSS)
            self.study.set_user_attr(OBJECTIVE, minimised if trials else objective)
        except Exception as error:  # SQLAlchemy's, SQLite's or Optuna's, by what is wrong with the file
            raise ConfigError(f"{path}: not a study of Optuna ({first_line(error)}); delete it to start anew") from None
        if trials and minimised != objective:
            rule = f"the study in {directory} minimises {minimised}; give the same, or set another sweep.name"
            raise ConfigError(f"sweep.objective={objective}: {rule}", "another-objective")
        for trial in trials:
            for key in trial.distributions.keys() & self.distributions.keys():
                stored = trial.distributions[key]
                try:
                    optuna.distributions.check_distribution_compatibility(stored, self.distributions[key])
                except ValueError:
                    raise ConfigError(
                        f"{key}: the study in {directory} was created with {_shown(stored)}, and Optuna cannot change "
                        "that; give the same, or set another sweep.name"
                    ) from None
        # With `seed` alone each command would draw the same trials as the one before.
        self.study.sampler = optuna.samplers.TPESampler(seed=seed + len(trials))
        self.completed = sum(trial.state == self.states.COMPLETE for trial in trials)
        self.interrupted = [(trial.number, trial.params) for trial in trials if trial.state == self.states.RUNNING]
        # Retry each failed choice once, unless another trial has it already.
        covered = [trial.params for trial in trials if trial.state in (self.states.COMPLETE, self.states.RUNNING)]
        covered += [trial.system_attrs["fixed_params"] for trial in trials if trial.state == self.states.WAITING]
        for trial in trials:
            if trial.state == self.states.FAIL and trial.params not in covered:
                covered.append(trial.params)
                self.study.enqueue_trial(trial.params)

    def wants(self, trials: int) -> bool:
        """Whether a study of `trials` trials needs one more than those that are complete or that any command runs."""
        counted = (self.states.COMPLETE, self.states.RUNNING)
        return bool(self.interrupted) or len(self.study.get_trials(deepcopy=False, states=counted)) < trials

    def ask(self) -> tuple[int, tuple[str, ...]]:
        """Return the next trial's number, and the overrides of its cell."""
        while self.interrupted:
            number, params = self.interrupted.pop(0)
            if params.keys() == self.distributions.keys():
                return number, self._overrides(params)
            self.fail(number)  # the process was killed before all values were chosen
        trial = self.study.ask(self.distributions)
        return trial.number, self._overrides(trial.params)

    def _overrides(self, params: dict[str, Any]) -> tuple[str, ...]:
        texts = []
        for axis in self.space:
            if isinstance(axis.among, Interval):
                texts.append(axis.override(axis.among.text(params[axis.key])))
            else:
                texts.append(axis.override(params[axis.key] if axis.swept else axis.among[0]))
        return tuple(texts)

    def tell(self, number: int, cell: Cell) -> None:
        """Record the result of a cell.

        A diverged cell gets the loss of a uniform guess over the vocabulary: no useful model has a higher one. An
        interrupted trial stays open, so that the next command continues it.
        """
        summary = run_dir.read_summary(cell.directory)
        status = summary.get("status")
        # Another command that ran the same trial may have told its result.
        loss = toward(read_run(cell.directory), self.objective).loss if status == "completed" else None
        if loss is not None:
            self.study.tell(number, loss, skip_if_finished=True)
        elif status == "diverged":
            vocabulary = run_dir.load_resolved(cell.directory).model
            self.study.tell(number, math.log(vocabulary.resolved_vocab_size), skip_if_finished=True)
        elif status != "interrupted":
            self.fail(number)

    def fail(self, number: int) -> None:
        """Record that a cell failed; a later command tries it again."""
        self.study.tell(number, state=self.states.FAIL, skip_if_finished=True)

    def refuse(self, number: int) -> None:
        """Record that a combination is illegal, so that the sampler avoids similar ones."""
        self.study.tell(number, state=self.states.PRUNED)


def _distribution(axis: Axis) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis.among, list):
        return CategoricalDistribution(axis.among)
    low, high = axis.among.low, axis.among.high
    if axis.among.whole:
        return IntDistribution(math.ceil(low), math.floor(high), log=axis.among.log)
    return FloatDistribution(low, high, log=axis.among.log)


def _shown(distribution: Any) -> str:
    choices = getattr(distribution, "choices", None)
    return ", ".join(map(str, choices)) if choices else "an interval"
