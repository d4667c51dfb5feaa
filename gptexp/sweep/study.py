"""An Optuna study in a sweep's directory: which cell next, and how those before it ended."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptexp import run_dir
from gptexp.errors import ConfigError, first_line
from gptexp.sweep.space import Axis, Interval

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from gptexp.sweep.cells import Cell

STUDY = "study.db"  # SQLite; `optuna-dashboard sqlite:///…/study.db` shows it


class Study:
    """The trials of a sweep: each is a choice of values, and the cell that they name is its run."""

    def __init__(self, directory: Path, space: Sequence[Axis], seed: int) -> None:
        """Open the study of `directory`, or make it. What was cut off is asked for first, then what has failed.

        Raises `ConfigError` where Optuna is not installed, or an earlier study chose among other values.
        """
        try:
            import optuna
        except ImportError:
            raise ConfigError("hydra/sweeper=optuna: not installed; pip install 'gptexp[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.states = optuna.trial.TrialState
        self.space = space
        self.distributions = {axis.key: _distribution(axis) for axis in space if axis.swept}
        path = (directory / STUDY).absolute()
        try:
            self.study = optuna.create_study(storage=f"sqlite:///{path}", study_name="gptexp", load_if_exists=True)
            trials = self.study.get_trials()
        except Exception as error:  # SQLAlchemy's, SQLite's or Optuna's, by what is wrong with the file
            raise ConfigError(f"{path}: no study of Optuna ({first_line(error)}); remove it to begin anew") from None
        for trial in trials:
            for key in trial.distributions.keys() & self.distributions.keys():
                try:
                    optuna.distributions.check_distribution_compatibility(
                        trial.distributions[key], self.distributions[key]
                    )
                except ValueError:
                    raise ConfigError(
                        f"{key}: the study in {directory} chose from {_shown(trial.distributions[key])}, and Optuna "
                        "cannot change that; give the same, or another sweep.name"
                    ) from None
        # With the seed alone each command would draw the same first trials again.
        self.study.sampler = optuna.samplers.TPESampler(seed=seed + len(trials))
        self.completed = sum(trial.state == self.states.COMPLETE for trial in trials)
        self.cut_off = [(trial.number, trial.params) for trial in trials if trial.state == self.states.RUNNING]
        made_good = [trial.params for trial in trials if trial.state in (self.states.COMPLETE, self.states.RUNNING)]
        made_good += [trial.system_attrs["fixed_params"] for trial in trials if trial.state == self.states.WAITING]
        for trial in trials:
            if trial.state == self.states.FAIL and trial.params not in made_good:
                made_good.append(trial.params)
                self.study.enqueue_trial(trial.params)

    def ask(self) -> tuple[int, tuple[str, ...]]:
        """A trial's number, and the overrides of its cell."""
        while self.cut_off:
            number, params = self.cut_off.pop(0)
            if params.keys() == self.distributions.keys():
                return number, self._overrides(params)
            self.fail(number)  # killed in the middle of its choice
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

    def tell(self, number: int, cell: "Cell") -> None:
        """Record how a cell ended. One that diverged counts with the loss of a uniform guess, the worst that is sane.

        One that was interrupted is left as it is: it goes on with the next command.
        """
        status = run_dir.status(cell.directory)
        if status == "completed":
            self.study.tell(number, run_dir.read_json(cell.directory / run_dir.SUMMARY)["final_val_loss"])
        elif status == "diverged":
            self.study.tell(number, math.log(cell.config.model.vocab_size))
        elif status != "interrupted":
            self.fail(number)

    def fail(self, number: int) -> None:
        """Record that a cell came to nothing; a later command tries it again."""
        self.study.tell(number, state=self.states.FAIL)

    def refuse(self, number: int) -> None:
        """Record that there is no such cell: the sampler learns to keep away."""
        self.study.tell(number, state=self.states.PRUNED)


def _distribution(axis: Axis) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis.among, list):
        return CategoricalDistribution(axis.among)
    low, high = axis.among.low, axis.among.high
    if axis.among.whole:
        return IntDistribution(math.ceil(low), math.floor(high), log=axis.among.log)
    return FloatDistribution(low, high, log=axis.among.log)


def _shown(distribution: "BaseDistribution") -> str:
    choices = getattr(distribution, "choices", None)
    return ", ".join(map(str, choices)) if choices else "an interval"
