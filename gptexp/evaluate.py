"""`gptexp evaluate DIR`: the validation loss of a checkpoint of a run, or of a sweep's best run, as JSON.

With --tasks: scores on other tasks, also for a model that transformers saved or that is on the hub.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.config.batch import count_val_windows
from gptexp.config.paths import absolute, is_file, matching_files, no_files
from gptexp.config.schema import HELLASWAG, Config
from gptexp.config.transformers_json import CONFIG_JSON
from gptexp.process.errors import ConfigError, DataError
from gptexp.process.fields import OF_CODECS, is_encoding
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb
from gptexp.process.words import shown
from gptexp.reporting.statistics.best import one_checkpoint
from gptexp.storage import run_dir
from gptexp.storage.init_from import Source, find


def main(argv: list[str] | None = None) -> None:
    """Print validation loss and perplexity of a checkpoint of a run, or of a sweep's best run, as JSON.

    With --tasks, print the scores on other tasks, also of a model that transformers saved or that is on the hub.
    """
    args = _parser().parse_args(argv)
    if args.tasks is None:
        _print_loss(args)
    else:
        _print_tasks(args)


def _parser() -> Parser:
    parser = Parser("evaluate", main.__doc__)
    what = "a run's directory, or a sweep's; with --tasks also one that transformers saved, gpt2, or OWNER/NAME"
    parser.add_checkpoint(what)
    what = "file or glob to use instead of the run's validation text; may be repeated; a line for each file"
    parser.add_argument("--data", action="append", metavar="PATH", help=what)
    parser.add_argument("--encoding", metavar="NAME", help="of these files (default: the run's data.encoding)")
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
    directory, step = one_checkpoint(args.directory, args.checkpoint, args.ema)
    config, texts = run_dir.load_config(directory), _files(args.data or [])
    data, tokens = config.data, args.val_tokens
    if args.encoding is not None:
        if not texts or not is_encoding(args.encoding):
            raise ConfigError(f"--encoding={shown(args.encoding)}: {OF_CODECS if texts else 'only --data reads it'}")
        data.encoding = args.encoding
    if texts and data.val_ratio is not None and tokens is None:
        raise ConfigError(
            f"--data {shown(texts[0])}: the run holds out data.val_ratio={data.val_ratio:g} of its own text, and no "
            "number of tokens; give --val-tokens N"
        )
    if not texts and not data.validates:
        raise ConfigError(f"{directory}: data.val_tokens=0: the run has no validation tokens; give --data FILE")
    asked = data.val_tokens if tokens is None else tokens
    takes_a_share = data.val_ratio is not None and tokens is None
    if not takes_a_share and count_val_windows(asked, config.seq_len) < 1:
        raise ConfigError(
            f"--val-tokens={asked}: rounds to zero windows of {config.seq_len} tokens; use at least {config.seq_len}"
        )

    with permanent():
        from gptexp.run.load import evaluate_checkpoint, load_checkpointed

    loaded = load_checkpointed(directory, args.ema, step)
    if not texts:
        held_out = tokens if data.val_path is None else None  # the run was trained on the rest of the text
        data.val_tokens = data.val_tokens if data.val_path is None else asked
        found = evaluate_checkpoint(loaded, directory, config, True, held_out)
        print(json.dumps({"directory": str(directory), **found}))
    problems: list[str] = []
    for text in texts:
        try:
            found = evaluate_checkpoint(loaded, directory, _of_text(config, directory, text, asked), False)
        except DataError as error:  # names a directory of the cache; the other files are scored
            problems += (f"--data {shown(text)}: {problem}" for problem in error.problems)
        else:
            print(json.dumps({"directory": str(directory), "data": text, **found}), flush=True)
    if problems:
        raise DataError(problems)


def _files(patterns: list[str]) -> list[str]:
    """The files that the values of --data name, each once. Raises `DataError` if one names none."""
    files: dict[str, None] = {}
    for pattern in patterns:
        matching = matching_files(str(Path(pattern).expanduser()))
        if not matching:
            raise DataError(f"--data {shown(pattern)}: {no_files(pattern)}")
        files.update(dict.fromkeys(map(str, matching)))
    return list(files)


def _of_text(config: Config, directory: Path, text: str, tokens: int) -> Config:
    """The config of a run whose validation text is the file `text`, of which it takes `tokens` tokens."""
    data = replace(config.data, name="text", path=[absolute(text)], val_path=[absolute(text)], validation={})
    data.max_tokens, data.val_ratio, data.val_tokens = None, None, tokens
    if is_file(directory / run_dir.TOKENIZER):
        data.tokenizer = str(directory / run_dir.TOKENIZER)
    return replace(config, data=data)


def _print_tasks(args: argparse.Namespace) -> None:
    for flag in ("--data", "--encoding", "--val-tokens"):
        if (value := getattr(args, flag[2:].replace("-", "_"))) is not None:
            first = value[0] if isinstance(value, list) else value
            raise ConfigError(f"{flag}={shown(first)}: only the validation loss reads it; leave it out")
    tasks = list(dict.fromkeys(filter(None, map(str.strip, args.tasks.split(",")))))
    if not tasks:
        raise ConfigError("--tasks: names no task; give hellaswag, or tasks of lm_eval, separated by commas")
    if args.hellaswag is not None and HELLASWAG not in tasks:
        raise ConfigError(f"--hellaswag={args.hellaswag}: only --tasks {HELLASWAG} reads it; leave it out")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit={args.limit}: must be 1 or above")
    if args.include is not None and not args.include.is_dir():
        raise ConfigError(f"--include={args.include}: no such folder; give one with task files of lm_eval")
    given, here = args.directory, Path(run_dir.run_and_checkpoint(args.directory)[0]).absolute()
    if here.is_dir() and not (here / CONFIG_JSON).is_file():  # it goes before a model of that name on the hub
        directory, step = one_checkpoint(given, args.checkpoint, args.ema)
        given = str(directory)
        source = Source(given, "run", directory.absolute(), step)
    else:
        for flag in ("ema", "checkpoint"):
            if getattr(args, flag):
                raise ConfigError(f"--{flag}: {given} is no run of gptexp; leave out --{flag}")
        source = find(str(here) if here.exists() else given, given, weights=True)

    with permanent():
        from gptexp.run.evaluations import evaluate_tasks

    scores, problems = evaluate_tasks(source, tasks, args.hellaswag, args.include, args.limit, args.ema)
    print(json.dumps({"directory": given, **scores}), flush=True)
    if problems:
        raise DataError(problems)


if __name__ == "__main__":
    run_verb(main)
