"""`gptexp evaluate DIR`: the validation loss of the newest checkpoint of a run, or of a sweep's best run, as JSON.

With --tasks: scores on other tasks, also for a model that transformers saved or that is on the hub.
"""

import argparse
import json
from pathlib import Path

from gptexp.config.batch import count_val_windows
from gptexp.config.paths import absolute, is_file, matching_files
from gptexp.config.schema import HELLASWAG
from gptexp.config.transformers_json import CONFIG_JSON
from gptexp.process.errors import ConfigError, DataError
from gptexp.process.terminal import run_verb
from gptexp.process.words import shown
from gptexp.reporting.statistics.best import one_run
from gptexp.storage import run_dir
from gptexp.storage.init_from import find


def main(argv: list[str] | None = None) -> None:
    """Print validation loss and perplexity of the newest checkpoint of a run, or of a sweep's best run, as JSON.

    With --tasks, print the scores on other tasks, also of a model that transformers saved or that is on the hub.
    """
    args = _parser().parse_args(argv)
    if args.tasks is None:
        _print_loss(args)
    else:
        _print_tasks(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gptexp evaluate", description=main.__doc__)
    what = "a run's directory, or a sweep's; with --tasks also one that transformers saved, gpt2, or OWNER/NAME"
    parser.add_argument("directory", metavar="DIR", help=what)
    parser.add_argument("--data", metavar="PATH", help="file or glob to use instead of the run's validation text")
    parser.add_argument("--val-tokens", type=int, metavar="N", help="validation tokens (default: as in the run)")
    parser.add_argument(
        "--tasks",
        metavar="T,T",
        help="hellaswag, scored as in llm.c; tasks of lm_eval (pip install 'gptexp[eval]')",
    )
    parser.add_argument(
        "--hellaswag", type=Path, metavar="FILE", help="jsonl in place of the published validation part"
    )
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="with tasks of your own for lm_eval")
    parser.add_argument("--limit", type=int, metavar="N", help="take only the first N examples of each task")
    parser.add_argument("--ema", action="store_true", help="take the averaged weights (train.ema_half_life_tokens)")
    return parser


def _print_loss(args: argparse.Namespace) -> None:
    for flag in ("hellaswag", "include", "limit"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag}={getattr(args, flag)}: only --tasks reads it; leave it out")
    directory = one_run(Path(args.directory))
    config = run_dir.require_checkpoint(directory, args.ema)
    data, held_out_tokens = config.data, None
    if args.data is not None:
        data.name, data.path, data.max_tokens = "text", [absolute(args.data)], None
        data.val_path = data.path
        if is_file(directory / run_dir.TOKENIZER):
            data.tokenizer = str(directory / run_dir.TOKENIZER)
        if not matching_files(absolute(args.data)):
            raise DataError(f"--data {shown(args.data)}: no such file; give a file or a glob")
        if data.val_ratio is not None and args.val_tokens is None:
            raise ConfigError(
                f"--data {shown(args.data)}: the run holds out data.val_ratio={data.val_ratio:g} of its own text, and "
                "no number of tokens; give --val-tokens N"
            )
        data.val_ratio = None
    elif not data.validates:
        raise ConfigError(f"{directory}: data.val_tokens=0: the run has no validation tokens; give --data FILE")
    if args.val_tokens is not None and data.val_path is None:
        held_out_tokens = args.val_tokens  # the run was trained on the rest of the text
    elif args.val_tokens is not None:
        data.val_tokens = args.val_tokens
    asked = data.val_tokens if args.val_tokens is None else args.val_tokens
    takes_a_share = data.val_ratio is not None and args.val_tokens is None
    if not takes_a_share and count_val_windows(asked, config.seq_len) < 1:
        raise ConfigError(
            f"--val-tokens={asked}: rounds to zero windows of {config.seq_len} tokens; use at least {config.seq_len}"
        )

    from gptexp.run.load import evaluate_checkpoint

    found = evaluate_checkpoint(directory, config, args.data is None, held_out_tokens, args.ema)
    print(json.dumps({"directory": str(directory), **found}))


def _print_tasks(args: argparse.Namespace) -> None:
    for flag in ("data", "val_tokens"):
        if (value := getattr(args, flag)) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')}={value}: only the validation loss reads it; leave it out")
    tasks = list(dict.fromkeys(filter(None, map(str.strip, args.tasks.split(",")))))
    if not tasks:
        raise ConfigError("--tasks: names no task; give hellaswag, or tasks of lm_eval, separated by commas")
    if args.hellaswag is not None and HELLASWAG not in tasks:
        raise ConfigError(f"--hellaswag={args.hellaswag}: only --tasks {HELLASWAG} reads it; leave it out")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit={args.limit}: must be 1 or above")
    if args.include is not None and not args.include.is_dir():
        raise ConfigError(f"--include={args.include}: no such folder; give one with task files of lm_eval")
    given = args.directory
    here = Path(given).absolute()  # a directory goes before a model of that name on the hub
    if here.is_dir() and not (here / CONFIG_JSON).is_file():
        given = str(one_run(Path(given)))
        here = Path(given).absolute()
        run_dir.require_checkpoint(here, args.ema)
    elif args.ema:
        raise ConfigError(f"--ema: {given} is no run of gptexp; leave out --ema")
    source = find(str(here) if here.exists() else given, given, weights=True)

    from gptexp.run.evaluations import evaluate_tasks

    scores, problems = evaluate_tasks(source, tasks, args.hellaswag, args.include, args.limit, args.ema)
    print(json.dumps({"directory": given, **scores}), flush=True)
    if problems:
        raise DataError(problems)


if __name__ == "__main__":
    run_verb(main)
