"""`gptexp tune [overrides]`: find the best learning rate of each batch size, within a stated budget."""

import sys
from collections.abc import Sequence

from gptexp.command.arguments import Parser
from gptexp.config.describe import answer_help
from gptexp.config.search_flags import FLAGS, PLAIN, PREFIX, SWEEPER, SWITCHES
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import run_verb
from gptexp.train import main as train

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
    for flag, (metavar, text) in FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=metavar, help=text)
    for flag, text in SWITCHES.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and run nothing")
    args, others = parser.parse_known_args(_joined(given))
    values = {flag: value for flag, value in vars(args).items() if value not in (None, False) and flag != "dry_run"}
    keys = {SWEEPER.partition("=")[0]: "gptexp tune", **{f"{PREFIX}{flag}": f"--{flag}" for flag in values}}
    for text in others:
        if twice := keys.get(text.lstrip("+~").partition("=")[0]):
            raise ConfigError(f"{text}: {twice} sets it too; leave one of them out", "key-given-twice")
    options = [f"{PREFIX}{flag}={_option(flag, value)}" for flag, value in values.items()]
    multirun = [] if {"-m", "--multirun"} & {*others} else ["-m"]
    train([*multirun, *others, *(["--dry-run"] if args.dry_run else []), SWEEPER, *options])


def _option(flag: str, text: str | bool) -> str:
    """The value of a flag as Hydra reads it."""
    from gptexp.config.overrides import quoted  # imports Hydra

    if isinstance(text, bool):
        return "true"
    return quoted(text) if flag == "from" and not PLAIN.fullmatch(text) else text.replace(" ", "")


def _joined(argv: Sequence[str]) -> list[str]:
    """The arguments, with `--budget 30 runs` and `--budget=30 runs` as `--budget 30runs` and `--budget=30runs`."""
    joined: list[str] = []
    for text in argv:
        if text in NOUNS and (joined[-2:-1] == ["--budget"] or (joined[-1:] and joined[-1].startswith("--budget="))):
            joined[-1] += text
        else:
            joined.append(text)
    return joined


if __name__ == "__main__":
    run_verb(main)
