"""The command line of `gptexp tune` as one of `gptexp train`."""

from collections.abc import Sequence

from gptexp.command.arguments import Parser
from gptexp.config.search_flags import FLAGS, PLAIN, PREFIX, SWEEPER, SWITCHES
from gptexp.process.errors import ConfigError

NOUNS = ("run", "runs", "token", "tokens")


def as_train(argv: Sequence[str], description: str | None = None) -> list[str]:
    """The arguments of `gptexp train` for those of `gptexp tune`. Raises `ConfigError`."""
    parser = Parser("tune", description)
    for flag, (metavar, text) in FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=metavar, help=text)
    for flag, text in SWITCHES.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and run nothing")
    args, others = parser.parse_known_args(_joined(argv))
    values = {flag: value for flag, value in vars(args).items() if value not in (None, False) and flag != "dry_run"}
    keys = {SWEEPER.partition("=")[0]: "gptexp tune", **{f"{PREFIX}{flag}": f"--{flag}" for flag in values}}
    for text in others:
        if twice := keys.get(text.lstrip("+~").partition("=")[0]):
            raise ConfigError(f"{text}: {twice} sets it too; leave one of them out", "key-given-twice")
    options = [f"{PREFIX}{flag}={_option(flag, value)}" for flag, value in values.items()]
    multirun = [] if {"-m", "--multirun"} & {*others} else ["-m"]
    return [*multirun, *others, *(["--dry-run"] if args.dry_run else []), SWEEPER, *options]


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
