"""What a run needs of this machine: its kind of device, and the packages of its tasks. No torch."""

from collections.abc import Sequence

from gptexp.config.schema import Config
from gptexp.config.transformers_json import family_of
from gptexp.distributed.ranks import Rank
from gptexp.process.errors import ConfigError, UserError
from gptexp.process.imports import permanent
from gptexp.run.harness import ask_lm_eval, tasks_of_lm_eval


def require_tasks(configs: Sequence[Config]) -> None:
    """Raise `ConfigError` if a config names a task that lm_eval does not have, or if lm_eval is not installed.

    Also if transformers, through which lm_eval reads a model, lacks its block. Takes seconds if a config names a task
    of lm_eval.
    """
    tasks = tasks_of_lm_eval([task for config in configs for task in config.train.eval_tasks])
    for config in configs:
        if tasks_of_lm_eval(config.train.eval_tasks):
            try:
                family_of(config.model)
            except ConfigError as error:
                raise ConfigError(f"train.eval_tasks: lm_eval needs the exported model; {error}", error.code) from None
    if tasks:
        try:
            ask_lm_eval(tasks, [], lambda: False)
        except UserError as error:
            raise ConfigError(str(error), error.code) from None


def require_devices(configs: Sequence[Config]) -> None:
    """Raise `ConfigError` if a config names a device that this machine does not have."""
    for config in configs:
        if config.train.device in ("cuda", "mps"):
            with permanent():
                from gptexp.machine.device import check_device  # imports torch

            size = config.world.size or 1
            check_device(config.train.device, Rank(size - 1, size, size - 1, size))
