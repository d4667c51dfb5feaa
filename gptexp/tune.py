"""`gptexp tune [overrides]`: find the best learning rate of each batch size, within a stated budget."""

import sys
from collections.abc import Sequence

from gptexp import train
from gptexp.command.arguments import Parser
from gptexp.config.describe import answer_help
from gptexp.process.terminal import run_verb

SWEEPER = "hydra/sweeper=tune"
# Flag -> key of conf/hydra/sweeper/tune.yaml, name of its value, help.
FLAGS = {
    "budget": ("budget", "AMOUNT", "20m, 8h, 200M tokens or 30 runs, for all commands of the search together"),
    "within": ("within", "OCTAVES", "the 95%% interval is narrow enough with so many on each side (default: 0.25)"),
    "from": ("prior", "SWEEP|FILE", "begin at the law of an earlier sweep, or of a file of optim=fitted"),
    "key": ("key", "KEY", "the number that is searched (default: optim.lr), such as optim.weight_decay"),
    "range": ("range", "LOW..HIGH", "the key lies there"),
    "seeds": ("seeds", "N", "the most of one learning rate (default: 8)"),
}
# Flag -> the override that it stands for, help.
SWITCHES = {
    "compare": ("compare=true", "spend on the difference of the arms, each at its own best value"),
    "law": ("law=true", "make runs at three of the batch sizes; the law through them answers for the others"),
    "yes": ("ask=false", "start without a question, also if it will take more than an hour"),
    "json": ("json=true", "print one JSON object at the end, and all else to stderr"),
}
NOUNS = ("run", "runs", "token", "tokens")


def main(argv: list[str] | None = None) -> None:
    """Find the best learning rate of each batch size: runs of full length, chosen one by one from the results so far.

    It is `gptexp train -m hydra/sweeper=tune`, and takes the same overrides, such as batch.total_batch_size=1k,4k,16k
    and arms such as optim=adamw,muon.
    """
    given = sys.argv[1:] if argv is None else argv
    if answer_help(given):
        return
    parser = Parser("tune", main.__doc__)
    for flag, (_, metavar, text) in FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=metavar, help=text)
    for flag, (_, text) in SWITCHES.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and run nothing")
    args, others = parser.parse_known_args(_joined(given))
    values = vars(args)
    keys = [f"{key}={values[flag].replace(' ', '')}" for flag, (key, _, _) in FLAGS.items() if values[flag]]
    keys += [override for flag, (override, _) in SWITCHES.items() if values[flag]]
    others += ["--dry-run"] if args.dry_run else []
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
