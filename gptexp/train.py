"""`gptexp train [overrides]`: train a model, or with -m a sweep of them."""

import os
import sys

from gptexp.config.describe import answer_help
from gptexp.distributed.ranks import ending_rank, launcher_rank
from gptexp.process.imports import permanent
from gptexp.process.signals import StopRequest, die_with_parent
from gptexp.process.terminal import report_errors, run_verb


def main(argv: list[str] | None = None) -> None:
    """Train what the command line describes. If a launcher has started this process, train as one rank.

    With --dry-run it is `gptexp plan`.
    """
    parent = os.getppid()
    if argv is not None:
        sys.argv[1:] = argv  # Hydra reads it
    if answer_help(sys.argv[1:]):
        return
    if "--dry-run" in sys.argv[1:]:
        from gptexp import plan

        plan.main([text for text in sys.argv[1:] if text != "--dry-run"])
        return
    stop = StopRequest()
    stop.install(ignore_sigint=False)  # before any slow import, so that a signal is handled from the start
    from gptexp.command.lead import lead

    rank = launcher_rank()
    if rank is None:
        lead(stop)
    # If torchrun's agent is killed, this rank would train on and nobody would see its end. So it stops and saves.
    die_with_parent(parent)
    with ending_rank():
        with permanent():
            from gptexp.command.leader import Leader, follow  # imports torch

        if rank.is_main:
            with report_errors():
                leader = Leader(stop, rank)
            lead(stop, leader)
        follow(stop, rank)


if __name__ == "__main__":
    run_verb(main)
