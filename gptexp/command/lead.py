"""From a composed config to the ranks that train it.

Training starts in one of three ways; each rank runs gptexp.run.rank:
  - one rank, one run: in this process, so that a debugger works;
  - several ranks, or a cell of a sweep: in new processes under torch's elastic agent;
  - this process is already a rank (torchrun, srun): rank 0 composes, and the other ranks receive each job from it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import DictConfig

from gptexp.command.hydra_main import hydra_main
from gptexp.command.start import start
from gptexp.config.branching import first_step
from gptexp.config.compose import keys_set_by
from gptexp.config.describe import SWEPT
from gptexp.config.paths import CONFIG_NAME
from gptexp.config.scaling import lr_in_words, scaled_optim
from gptexp.config.schema import Config, TrainConfig
from gptexp.distributed.ranks import launcher_world_size
from gptexp.optim.adamw import AdamWConfig
from gptexp.process.signals import StopRequest
from gptexp.process.terminal import report_errors, say
from gptexp.storage import run_dir
from gptexp.storage.continuation import check_same
from gptexp.storage.inventory import link_in_outputs

if TYPE_CHECKING:
    from gptexp.command.leader import Leader  # imports torch


def lead(stop: StopRequest, leader: "Leader | None" = None) -> NoReturn:
    """Compose the command line, train its run or sweep, and exit. Under a launcher, `leader` trains with all ranks."""

    def train(config: Config, cfg: DictConfig) -> int:
        with prepared(config, cfg) as directory:
            return leader.run(config, directory) if leader is not None else start(config, directory, stop)

    def begin_cell(config: Config, cfg: DictConfig) -> int:
        with prepared(config, cfg) as directory:
            return leader.run(config, directory) if leader is not None else 0  # the sweep starts its processes

    with report_errors():
        try:
            code = hydra_main(train, begin_cell, launcher_world_size())
        finally:
            if leader is not None:
                leader.finish()
    sys.exit(code)


@contextmanager
def prepared(config: Config, cfg: DictConfig) -> Iterator[Path]:
    """Hold the lock of the run's directory, save the config in it, and yield the directory."""
    directory = Path(cfg.hydra.runtime.output_dir)
    with run_dir.held(directory):
        freeze(config, cfg, directory)
        yield directory


def freeze(config: Config, cfg: DictConfig, directory: Path) -> None:
    """Save the config in the run directory, and print the source of the learning rate unless a search chose it."""
    if config.log.wandb.name is None:
        at = f"-from{first_step(config.branch_from)}" if config.branch_from else ""
        config.log.wandb.name = readable_name(cfg.hydra.runtime.choices["model"], config) + at
    check_same(directory, config)
    run_dir.save_config(directory, config)
    link_in_outputs(directory, config.paths.outputs)
    if config.log.progress not in ("off", "json") and cfg.hydra.sweeper.get("key") != "optim.lr":
        source = lr_source(cfg.hydra) if config.branch_from is None else _lr_of_branch(config)
        say(f"learning rate   {lr_in_words(config.optim.lr, scaled_optim(config).lr)}, from {source}")


def _lr_of_branch(config: Config) -> str:
    parent = run_dir.load_config(Path(run_dir.run_and_checkpoint(config.branch_from or "")[0]))
    if not config.schedule.begin_tokens:
        return f"branch_from={config.branch_from}"
    peak = config.optim.lr * config.schedule.peak_ratio / (parent.optim.lr * parent.schedule.peak_ratio)
    return f"continue_from={config.branch_from}; its peak is {peak:.3g} of that run's"


def readable_name(model: str, config: Config) -> str:
    """Return the name of a run on wandb: `gpt2-lr6e-4-b524288`; with a ramp `…-b32768-524288`.

    It contains optimizer, parametrisation, scaling rules and seed where they are not the default.
    """
    chosen = [] if config.optim.name == AdamWConfig.name else [config.optim.name]
    if config.model.parametrisation != "standard":
        chosen.append(config.model.parametrisation)
    chosen += [f"{key}_{rule}" for key, rule in config.scaling.rules.items()]
    how = "".join(f"-{choice}" for choice in chosen)
    sizes = config.batch.step_sizes
    batch = f"{sizes.start}-{sizes.total}" if sizes.ramp_tokens else sizes.total
    name = f"{model}{how}-lr{Decimal(repr(config.optim.lr)).normalize():e}-b{batch}"
    return name if config.train.seed == TrainConfig.seed else f"{name}-seed{config.train.seed}"


def lr_source(hydra: Any) -> str:
    """Return the file or override that sets the learning rate, in Hydra's order of precedence."""

    # Not the composed overrides: those of a cell contain the values of a named grid.
    if any(text.lstrip("+").startswith("optim.lr=") for text in sys.argv):
        return "the command line"

    def option_with(key: str, *groups: str) -> str | None:
        options = ((group, hydra.runtime.choices.get(group)) for group in groups)
        setting = (f"{group}={name}" for group, name in options if name and key in keys_set_by(hydra, group, name))
        return next(setting, None)

    own = hydra.job.config_name
    is_own = own != CONFIG_NAME and "optim.lr" in keys_set_by(hydra, "", own)
    return (
        option_with(f"{SWEPT}optim.lr", "experiment", "sweep")
        or (f"{own}.yaml" if is_own else None)
        or option_with("optim.lr", "experiment", "optim", "model")
        or "the default"
    )
