"""`gptexp resume RUN_DIR`: go on with a run where its newest checkpoint stands."""

import argparse
from pathlib import Path

from gptexp import check, run_dir
from gptexp.distributed import launcher_rank
from gptexp.errors import ConfigError
from gptexp.terminal import say, talk_as_asked
from gptexp.train import STOP, start


def main(argv: list[str] | None = None) -> int:
    """`gptexp resume RUN_DIR`: continue an unfinished run from its newest checkpoint."""
    STOP.install(ignore_sigint=False)  # as `gptexp train` does, from the first moment
    parser = argparse.ArgumentParser(prog="gptexp resume", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks (default: as before)")
    args = parser.parse_args(argv)
    if launcher_rank() is not None:
        raise ConfigError(
            f"gptexp resume {args.run_dir}: starts its own ranks; under a launcher use gptexp train with the run's "
            f"overrides and hydra.run.dir={args.run_dir}"
        )
    directory: Path = args.run_dir.absolute()
    config = run_dir.load_config(directory)
    if args.world_size is not None:
        if args.world_size < 1:
            raise ConfigError(f"--world-size={args.world_size}: must be 1 or above")
        config.world.size = args.world_size
    config.world.size = config.world.size or 1
    check.check(config, config.world.size)
    if run_dir.check_free(directory, config) == "completed":
        talk_as_asked(config.log.progress)
        say(f"gptexp: {directory} is completed; nothing to do")
        return 0

    with run_dir.held(directory):
        run_dir.save_config(directory, config)
        return start(config, directory)


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
