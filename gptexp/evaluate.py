"""`gptexp evaluate DIR`: the validation loss of the newest checkpoint of a run, or of a sweep's best run, as JSON."""

import argparse
import json
from pathlib import Path

from gptexp.config.batch import count_val_windows
from gptexp.config.paths import absolute, is_file, matching_files
from gptexp.process.errors import ConfigError, DataError
from gptexp.process.terminal import run_verb
from gptexp.process.words import shown
from gptexp.reporting.best import one_run
from gptexp.storage import run_dir


def main(argv: list[str] | None = None) -> None:
    """Print validation loss and perplexity of the newest checkpoint of a run, or of a sweep's best run, as JSON."""
    parser = argparse.ArgumentParser(prog="gptexp evaluate", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's directory, or a sweep's")
    parser.add_argument("--data", metavar="PATH", help="file or glob to use instead of the run's validation text")
    parser.add_argument("--val-tokens", type=int, metavar="N", help="validation tokens (default: as in the run)")
    args = parser.parse_args(argv)

    directory = one_run(args.directory)
    config = run_dir.require_checkpoint(directory)
    data, of_held_out = config.data, None
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
        of_held_out = args.val_tokens  # the run was trained on the rest of the text
    elif args.val_tokens is not None:
        data.val_tokens = args.val_tokens
    asked = data.val_tokens if args.val_tokens is None else args.val_tokens
    takes_a_share = data.val_ratio is not None and args.val_tokens is None
    if not takes_a_share and count_val_windows(asked, config.seq_len) < 1:
        raise ConfigError(
            f"--val-tokens={asked}: rounds to zero windows of {config.seq_len} tokens; use at least {config.seq_len}"
        )

    from gptexp.run.load import evaluate_checkpoint

    found = evaluate_checkpoint(directory, config, args.data is None, of_held_out)
    print(json.dumps({"directory": str(directory), **found}))


if __name__ == "__main__":
    run_verb(main)
