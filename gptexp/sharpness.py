"""`gptexp sharpness DIR`: the curvature of the loss at the weights of a checkpoint, as JSON."""

import json

from gptexp.command.arguments import Parser
from gptexp.config.parts import is_part
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb
from gptexp.reporting.statistics.best import one_checkpoint
from gptexp.storage import run_dir


def main(argv: list[str] | None = None) -> None:
    """Print the sharpness of a run's checkpoint, or of a sweep's best run, as JSON.

    That is the largest eigenvalue of the Hessian of the loss on a fixed batch of training text; the one that AdamW's
    preconditioner leaves, and the threshold above which AdamW is unstable; and SAM's sharpness.
    """
    parser = Parser("sharpness", main.__doc__)
    parser.add_checkpoint()
    parser.add_argument("--all", action="store_true", help="of all checkpoints, oldest first, a line for each")
    parser.add_argument(
        "--sequences", type=int, metavar="N", help="of the fixed batch (default: 64, or all that it has)"
    )
    args = parser.parse_args(argv)
    if args.sequences is not None and args.sequences < 1:
        raise ConfigError(f"--sequences={args.sequences}: must be 1 or above")
    directory, step = one_checkpoint(args.directory, args.checkpoint)
    if args.all and (args.checkpoint is not None or step is not None):
        raise ConfigError("--all: takes all checkpoints; leave it out, or name no checkpoint")
    if is_part(run_dir.load_config(directory).model):
        raise ConfigError(f"{directory}: sharpness is measured for gptexp's blocks, and this model is one of your own")
    checkpoints = run_dir.published(directory / run_dir.CHECKPOINTS)
    if step is not None:
        checkpoints = [path for path in checkpoints if run_dir.step_of(path) == step]
    elif not args.all:
        checkpoints = checkpoints[:1]

    with permanent():
        from gptexp.run.sharpness import measure

    for found in measure(directory, checkpoints[::-1], args.sequences):
        print(json.dumps(run_dir.finite(found)), flush=True)


if __name__ == "__main__":
    run_verb(main)
