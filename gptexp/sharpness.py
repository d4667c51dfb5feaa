"""`gptexp sharpness DIR`: the curvature of the loss at the weights of a checkpoint, as JSON."""

import argparse
import json
from pathlib import Path

from gptexp.process.errors import CheckpointError, ConfigError
from gptexp.process.terminal import run_verb
from gptexp.reporting.statistics.best import one_run
from gptexp.storage import run_dir


def main(argv: list[str] | None = None) -> None:
    """Print the sharpness of a run's newest checkpoint, or of a sweep's best run, as JSON.

    That is the largest eigenvalue of the Hessian of the loss on a fixed batch of training text; the one that AdamW's
    preconditioner leaves, and the threshold above which AdamW is unstable; and SAM's sharpness.
    """
    parser = argparse.ArgumentParser(prog="gptexp sharpness", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's directory, or a sweep's")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=int, metavar="STEP", help="of this step, in place of the newest")
    which.add_argument("--all", action="store_true", help="of all checkpoints, oldest first, a line for each")
    parser.add_argument(
        "--sequences", type=int, metavar="N", help="of the fixed batch (default: 64, or all that it has)"
    )
    args = parser.parse_args(argv)
    if args.sequences is not None and args.sequences < 1:
        raise ConfigError(f"--sequences={args.sequences}: must be 1 or above")
    directory = one_run(args.directory)
    run_dir.require_checkpoint(directory)
    checkpoints = run_dir.published(directory / run_dir.CHECKPOINTS)
    if args.checkpoint is not None:
        steps = [run_dir.step_of(path) for path in reversed(checkpoints)]
        if args.checkpoint not in steps:
            raise CheckpointError(
                f"--checkpoint={args.checkpoint}: {directory} has no checkpoint of that step; it has "
                f"{', '.join(map(str, steps))}"
            )
        checkpoints = [path for path in checkpoints if run_dir.step_of(path) == args.checkpoint]
    elif not args.all:
        checkpoints = checkpoints[:1]

    from gptexp.run.sharpness import measure

    for found in measure(directory, checkpoints[::-1], args.sequences):
        print(json.dumps(run_dir.finite(found)), flush=True)


if __name__ == "__main__":
    run_verb(main)
