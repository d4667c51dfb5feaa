"""`gptexp export RUN_DIR OUT`: a run as a directory that Hugging Face's transformers loads."""

from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.signals import ended_in_order
from gptexp.process.terminal import run_verb, say
from gptexp.reporting.statistics.best import one_checkpoint
from gptexp.storage import hub, run_dir


def main(argv: list[str] | None = None) -> None:
    """Write a checkpoint of a run, or of a sweep's best run, as a directory that transformers loads."""
    parser = Parser("export", main.__doc__)
    parser.add_checkpoint(required=True)
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write; it must be new or empty")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload it to this model of the Hugging Face hub")
    parser.add_argument("--private", action="store_true", help="if --push makes a new model, make it private")
    parser.add_argument("--ema", action="store_true", help="take the averaged weights (train.ema_half_life_tokens)")
    args = parser.parse_args(argv)
    if args.private and args.push is None:
        raise ConfigError("--private: says how --push makes a model; add --push OWNER/NAME, or leave it out")
    if args.push is not None:
        hub.check_name(args.push)
    _check_out(args.out)
    directory, step = one_checkpoint(args.directory, args.checkpoint, args.ema)

    with permanent():
        from gptexp.run.export import export  # imports torch

    with ended_in_order():
        export(directory, args.out, args.push or args.out.resolve().name, args.ema, step)
    say(f"{args.out}: AutoModelForCausalLM.from_pretrained({str(args.out)!r}) loads it; README.md is its model card")
    if args.push is not None:
        say(hub.upload_model(args.out, args.push, args.private))


def _check_out(out: Path) -> None:
    """Raise `ConfigError` unless `out` is new or an empty directory, and outside of all runs."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty directory; give another, or remove it")
    if inside := next((folder for folder in out.resolve().parents if run_dir.is_run(folder)), None):
        raise ConfigError(f"{out}: lies in the run {inside}, which keeps its own files alone; give another place")


if __name__ == "__main__":
    run_verb(main)
