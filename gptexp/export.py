"""`gptexp export RUN_DIR OUT`: a run as a directory that Hugging Face's transformers loads."""

import argparse
from pathlib import Path

from gptexp.process.errors import ConfigError
from gptexp.process.terminal import run_verb, say
from gptexp.reporting.best import one_run
from gptexp.storage import hub, run_dir


def main(argv: list[str] | None = None) -> None:
    """Write the newest checkpoint of a run, or of a sweep's best run, as a directory that transformers loads."""
    parser = argparse.ArgumentParser(prog="gptexp export", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's directory, or a sweep's")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write; it must be new or empty")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload it to this model of the Hugging Face hub")
    parser.add_argument("--private", action="store_true", help="if --push makes a new model, make it private")
    args = parser.parse_args(argv)
    if args.private and not args.push:
        raise ConfigError("--private: says how --push makes a model; add --push OWNER/NAME, or leave it out")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ConfigError(f"{args.out}: exists and is not an empty directory; give another, or remove it")
    if args.push:
        hub.require(f"--push {args.push}")
    directory = one_run(args.directory)
    run_dir.require_checkpoint(directory)

    from gptexp.run.export import export  # imports torch

    export(directory, args.out, args.push or args.out.resolve().name)
    say(f"{args.out}: AutoModelForCausalLM.from_pretrained({str(args.out)!r}) loads it; README.md is its model card")
    if args.push:
        say(hub.upload_model(args.out, args.push, args.private))


if __name__ == "__main__":
    run_verb(main)
