"""`gptexp run FILE`: run the commands of a file in turn, or several at once; what is done is skipped."""

from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb


def main(argv: list[str] | None = None) -> int:
    """Run the commands of a file, one a line (train, tune, report, …), each as gptexp VERB … would.

    All are checked before the first starts. The same call goes on after Ctrl-C, a kill or a failure: runs continue from
    their checkpoints, and what is done is skipped.
    """
    parser = Parser("run", main.__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a command a line; # begins a comment")
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N",
        help="run up to N train and tune at once; they share the GPUs, or the cores (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.parallel < 1:
        raise ConfigError(f"--parallel={args.parallel}: must be 1 or above", "out-of-range")

    with permanent():
        from gptexp.cli import VERBS
        from gptexp.command.queued import read_commands
        from gptexp.sweep.queue import Queue

    return Queue(read_commands(args.file, VERBS), args.parallel).run()


if __name__ == "__main__":
    run_verb(main)
