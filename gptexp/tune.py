"""`gptexp tune [overrides]`: find the best learning rate of each batch size, within a stated budget."""

import sys
from collections.abc import Sequence

from gptexp import train
from gptexp.command.arguments import Parser
from gptexp.config.describe import answer_help
from gptexp.process.terminal import run_verb

SWEEPER = "hydra/sweeper=tune"
# Flag -> metavar and help; each is the key `hydra.sweeper.NAME` of the sweeper.
FLAGS = {
    "budget": ("TIME|TOKENS|RUNS", "20m, 8h, 200M tokens or 30 runs, for all commands of the search together"),
    "within": ("OCTAVES", "the 95%% interval is narrow enough with so many on each side (default: 0.25)"),
    "seeds": ("N", "the most of one learning rate (default: 8)"),
}
SWITCHES = {
    "yes": ("ask=false", "start without a question, also if it will take more than an hour"),
    "json": ("json=true", "print one JSON object at the end, and all else to stderr"),
}
NOUNS = ("run", "runs", "token", "tokens")


def main(argv: list[str] | None = None) -> None:
    """Find the best learning rate of each batch size: runs of full length, chosen one by one from the results so far.

    It is `gptexp train -m hydra/sweeper=tune`, and takes the same overrides, such as batch.total_batch_size=1k,4k,16k
    and arms such as optim=adamw,muon; and --dry-run, which prints the plan.
    """
    given = sys.argv[1:] if argv is None else argv
    if answer_help(given):
        return
    parser = Parser("tune", main.__doc__)
    for name, (metavar, text) in FLAGS.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    for name, (_, text) in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    args, others = parser.parse_known_args(_joined(given))
    keys = [f"{name}={getattr(args, name).replace(' ', '')}" for name in FLAGS if getattr(args, name) is not None]
    keys += [key for name, (key, _) in SWITCHES.items() if getattr(args, name)]
    multirun = [] if {"-m", "--multirun"} & {*others} else ["-m"]
    train.main([*multirun, *others, SWEEPER, *(f"hydra.sweeper.{key}" for key in keys)])


def _joined(argv: Sequence[str]) -> list[str]:
    """The arguments, with `--budget 30 runs` as `--budget 30runs`."""
    joined: list[str] = []
    for text in argv:
        if text in NOUNS and joined[-2:-1] == ["--budget"]:
            joined[-1] += text
        else:
            joined.append(text)
    return joined


if __name__ == "__main__":
    run_verb(main)
