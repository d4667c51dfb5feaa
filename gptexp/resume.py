"""`gptexp resume RUN_DIR`: continue a run from its newest checkpoint."""

import argparse
from pathlib import Path

from gptexp.process.signals import StopRequest
from gptexp.process.terminal import run_verb


def main(argv: list[str] | None = None) -> int:
    """Continue an unfinished run from its newest checkpoint."""
    stop = StopRequest()
    stop.install(ignore_sigint=False)  # before any slow import, as in `gptexp train`
    parser = argparse.ArgumentParser(prog="gptexp resume", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: as before)")
    parser.add_argument(
        "--sharding", choices=("none", "optimizer", "full"), help="what each rank has a part of (default: as before)"
    )
    args = parser.parse_args(argv)

    from gptexp.command.start import resume

    return resume(args.run_dir, args.world_size, args.sharding, stop)


if __name__ == "__main__":
    run_verb(main)
