"""`gptexp sample DIR`: text from the newest checkpoint of a run, or of a sweep's best run."""

import argparse
import sys
from pathlib import Path

from gptexp.config.schema import LIMIT
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import emit, run_verb, say
from gptexp.reporting.best import one_run
from gptexp.storage import run_dir


def main(argv: list[str] | None = None) -> None:
    """Generate text with the newest checkpoint of a run, or of a sweep's best run, and print it."""
    parser = argparse.ArgumentParser(prog="gptexp sample", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's directory, or a sweep's")
    parser.add_argument("--prompt", default="", help="text to continue (default: none, so that a new document starts)")
    parser.add_argument("--num-samples", type=int, default=3, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N")
    parser.add_argument("--top-k", type=int, default=50, metavar="K", help="draw from the K most likely tokens; 0: all")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: always the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name, lowest in (("num_samples", 1), ("max_new_tokens", 1), ("top_k", 0), ("temperature", 0)):
        value = getattr(args, name)
        if not lowest <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')}={value}: must be {lowest} or above")
    if 0 < args.temperature < 1e-6:
        raise ConfigError(f"--temperature={args.temperature}: must be 0 or at least 0.000001")
    if not 0 <= args.seed < LIMIT:
        raise ConfigError(f"--seed={args.seed}: must lie in [0, 2^63)")
    directory = one_run(args.directory)
    run_dir.require_checkpoint(directory)

    from gptexp.model.generate import Sampling, complete
    from gptexp.run.load import load_run

    model, tokenizer, _ = load_run(directory)
    how = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.seed)
    text = "\n---\n".join(complete(model, tokenizer, args.prompt, args.num_samples, how))
    (say if sys.stdout.isatty() else emit)(text)  # a file gets the text as it is


if __name__ == "__main__":
    run_verb(main)
