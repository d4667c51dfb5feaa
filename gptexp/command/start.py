"""Starts or resumes a run with a frozen config: one rank in this process, several in new ones.

Under a launcher the ranks exist already.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gptexp.config import rules
from gptexp.config.schema import Config, with_parts
from gptexp.distributed.ranks import launcher_world_size
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.signals import StopRequest
from gptexp.process.terminal import reserve_stdout, say
from gptexp.process.words import counted
from gptexp.run.requirements import require_devices, require_tasks
from gptexp.storage import run_dir
from gptexp.storage.continuation import check_free

if TYPE_CHECKING:
    from gptexp.command.leader import Leader  # imports torch


def start(config: Config, directory: Path, stop: StopRequest) -> int:
    """Train `config` in `directory` on this machine. Returns the exit code."""
    assert config.world.size is not None
    stop.directory = directory
    stop.record = partial(run_dir.mark_interrupted, directory)
    if config.world.size > 1 or config.world.max_restarts:
        with permanent():
            from gptexp.run.launch import launch

        return launch(directory, config.world.size, config.world.max_restarts, config.train.max_minutes)

    with permanent():
        from gptexp.run.rank import run_alone

    return run_alone(config, directory, stop)


def resume(
    directory: Path, world_size: int | None, sharding: str | None, stop: StopRequest, leader: "Leader | None" = None
) -> int:
    """Resume the run in `directory`, on `world_size` ranks and with `sharding` if given. Returns the exit code.

    Under a launcher, `leader` trains with all of its ranks.
    """
    run, chosen = run_dir.run_and_checkpoint(str(directory))
    if chosen is not None:
        raise ConfigError(
            f"{directory}: a run is resumed from its newest checkpoint; give {run}, or start another run from that "
            f"checkpoint with gptexp train branch_from={directory}"
        )
    directory = directory.absolute()
    config = with_parts(run_dir.load_config(directory))
    if world_size is not None:
        if world_size < 1:
            raise ConfigError(f"--world-size={world_size}: must be 1 or above", "out-of-range")
        config.world.size = world_size
    config.world.size = config.world.size or 1
    config.world.sharding = sharding or config.world.sharding
    if (started := launcher_world_size()) not in (None, config.world.size):
        raise ConfigError(
            f"world.size={config.world.size}: the launcher started {counted(started, 'rank')}; start "
            f"{config.world.size}, or add --world-size {started}",
            "other-world-size",
        )
    rules.check(config, config.world.size)
    if check_free(directory, config) == "completed":
        reserve_stdout(config.log.progress)
        say(f"gptexp: {directory}: this run is completed; nothing to do")
        return 0
    require_tasks([config])
    if leader is None:  # under a launcher, other nodes may have the devices
        require_devices([config])
    with run_dir.held(directory):
        run_dir.save_config(directory, config)
        return leader.run(config, directory) if leader is not None else start(config, directory, stop)
