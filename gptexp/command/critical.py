"""`gptexp plan --critical`: compares the batch of a plan with the critical size that a run or sweep has measured."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptexp.config.batch import BatchPlan
from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError
from gptexp.process.words import counted
from gptexp.storage import run_dir

DATA_KEYS = ("name", "path", "tokenizer")
IN_WORDS = {"below": "is below", "within": "is within the interval of", "above": "passes"}


@dataclass(frozen=True)
class CriticalSize:
    """A measured size in tokens, with its 95% interval."""

    what: str  # gradient noise scale or critical batch size
    tokens: float
    low: float
    high: float | None  # None: unbounded
    directory: Path  # of a run for which this size holds

    def judge(self, total_batch_size: int) -> str:
        """Whether a batch is below, within or above the interval."""
        if total_batch_size < self.low:
            return "below"
        return "above" if self.high is not None and total_batch_size > self.high else "within"


@dataclass(frozen=True)
class Verdict:
    """The batch of a plan, compared with a critical size."""

    size: CriticalSize
    source: Path  # the run or the sweep that has measured it
    verdict: str  # the result of `CriticalSize.judge`
    ranks: int  # with one micro-batch each, so many ranks have a batch of the critical size
    other_keys: list[str]  # keys of model and data whose values differ between the plan and that run

    def in_words(self) -> str:
        size = self.size
        interval = f"{size.low:,.0f} to {size.high:,.0f}" if size.high else f"{size.low:,.0f} or more"
        return (
            f"the batch {IN_WORDS[self.verdict]} the measured {size.what} of {size.tokens:,.0f} tokens (95% interval "
            f"{interval}), which a micro-batch for each rank reaches at {counted(self.ranks, 'rank')}"
        )

    def to_dict(self) -> dict[str, Any]:
        values = {**asdict(self.size), **asdict(self), "from": str(self.source)}
        return {key: value for key, value in values.items() if key not in ("size", "source", "directory")}


def judge_batch(cfg: Config, batch: BatchPlan, directory: Path | None) -> Verdict | None:
    """Compare a batch with the size measured by `directory`; None: by the run of `branch_from`, if it measured one.

    The vocabulary of `cfg` must be a number. Raises `ConfigError` if a given directory has measured nothing.
    """
    if directory is None and cfg.branch_from is None:
        return None
    source = directory or Path(run_dir.run_and_checkpoint(cfg.branch_from or "")[0])
    size = _noise_scale_of(source) if directory is None or run_dir.is_run(source) else _size_of_sweep(source)
    if size is None:
        if directory is None:
            return None
        raise ConfigError(f"--critical {source}: this run has no gradient noise scale; train for longer")
    measured = run_dir.load_resolved(size.directory)
    other_keys = [
        *(f"model.{key}" for key, value in asdict(measured.model).items() if getattr(cfg.model, key) != value),
        *(f"data.{key}" for key in DATA_KEYS if getattr(cfg.data, key) != getattr(measured.data, key)),
    ]
    ranks = max(1, int(size.tokens // (batch.micro_batch_size * batch.seq_len)))
    return Verdict(size, source, size.judge(batch.total_batch_size), ranks, other_keys)


def _noise_scale_of(directory: Path) -> CriticalSize | None:
    from gptexp.reporting.listings.records import read_run
    from gptexp.reporting.statistics.noise_scale import at_the_end  # imports scipy, which nothing else here needs

    scale = at_the_end(read_run(directory))
    return None if scale is None else CriticalSize("gradient noise scale", **asdict(scale), directory=directory)


def _size_of_sweep(directory: Path) -> CriticalSize:
    run_dir.require_directory(directory, "a run or a sweep", "--critical")
    from gptexp.reporting.listings.records import find_runs
    from gptexp.reporting.statistics.analysis import analyse
    from gptexp.reporting.statistics.noise_scale import lowest_measured

    runs = find_runs(directory)
    arms = analyse(directory.name, runs).arms
    fits = [(arm, arm.critical.hyperbola) for arm in arms if arm.critical is not None and arm.critical.hyperbola]
    if len(fits) > 1:
        raise ConfigError(f"--critical {directory}: {counted(len(fits), 'arm')} with a critical batch size; give a run")
    for arm, fit in fits:
        return CriticalSize("critical batch size", fit.tokens, fit.low, fit.high, arm.runs[0].directory)
    measured = lowest_measured(runs)
    if measured is not None and (scale := _noise_scale_of(measured.directory)) is not None:
        return scale
    raise ConfigError(
        f"--critical {directory}: no run there has measured a noise scale, and its runs show no critical batch size; "
        "give another run or sweep"
    )
