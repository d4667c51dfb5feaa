"""`gptexp resume RUN_DIR`: continue a run from its newest checkpoint."""

import os
import sys
from pathlib import Path

from gptexp.command.arguments import NEWEST, Parser
from gptexp.config.schema import SHARDINGS
from gptexp.distributed.ranks import ending_rank, launcher_rank
from gptexp.process.imports import permanent
from gptexp.process.signals import StopRequest, die_with_parent
from gptexp.process.terminal import report_errors, run_verb


def main(argv: list[str] | None = None) -> int | None:
    """Continue an unfinished run from its newest checkpoint."""
    parent = os.getppid()
    stop = StopRequest()
    stop.install(ignore_sigint=False)  # before any slow import, as in `gptexp train`
    parser = Parser("resume", main.__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="default: the newest", **NEWEST)
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: as before)")
    parser.add_argument("--sharding", choices=SHARDINGS, help="what each rank has a part of (default: as before)")
    args = parser.parse_args(argv)

    from gptexp.command.start import resume

    rank = launcher_rank()
    if rank is None:
        return resume(args.run_dir, args.world_size, args.sharding, stop)
    die_with_parent(parent)  # as in `gptexp train`
    with ending_rank():
        with permanent():
            from gptexp.command.leader import Leader, follow  # imports torch

        if rank.is_main:
            with report_errors():
                leader = Leader(stop, rank)
                try:
                    sys.exit(resume(args.run_dir, args.world_size, args.sharding, stop, leader))
                finally:
                    leader.finish()
        follow(stop, rank)
    return None


if __name__ == "__main__":
    run_verb(main)
