"""`gptexp rm`: removes runs and sweeps, or only their unneeded checkpoints."""

from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.config.paths import OUTPUTS
from gptexp.process.errors import EXIT_FAILED, ConfigError, UserError
from gptexp.process.imports import permanent
from gptexp.process.terminal import confirmed, print_error, run_verb, say, terminal_width, warn
from gptexp.process.words import size_shown
from gptexp.reporting.listings.terminal_table import Column, print_table, texts_of
from gptexp.storage import run_dir
from gptexp.storage.inventory import is_not_there_yet
from gptexp.storage.removal import Removal, starting_from, whole_removals

COLUMNS = (
    Column[Removal]("directory", "directory", lambda removal: str(removal.place)),
    Column[Removal]("status", "status", lambda removal: removal.status),
    Column[Removal]("checkpoints", "checkpoints removed", lambda removal: removal.checkpoints),
    Column[Removal]("stay", "stay", lambda removal: removal.stay),
    Column[Removal]("size", "frees", lambda removal: removal.size, words=lambda removal: size_shown(removal.size)),
)


def main(argv: list[str] | None = None) -> int:
    """Remove runs and sweeps with all their files, after a question.

    With --unneeded-checkpoints, remove only checkpoints that no command reads: of a completed or diverged run all but
    the newest intact one, those that a changed train.keep_… key keeps, and the best one of a diverged run. And what
    saves and removals that were killed have left.
    """
    parser = Parser("rm", main.__doc__)
    parser.add_argument("directories", type=Path, nargs="*", metavar="DIR", help="a run, or a sweep")
    parser.add_argument(
        "--unneeded-checkpoints", action="store_true",
        help=f"keep the runs in DIR and below it, and remove checkpoints that no command reads; default: {OUTPUTS}",
    )  # fmt: skip
    parser.add_argument("--newest-only", action="store_true", help="and keep only the newest checkpoint of a done run")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    args = parser.parse_args(argv)
    if args.unneeded_checkpoints:
        removals = _unneeded_checkpoints(args.directories or [OUTPUTS], args.newest_only)
    elif args.newest_only or not args.directories:
        raise ConfigError("rm: give a run's or a sweep's directory, or --unneeded-checkpoints")
    else:
        removals = _runs_and_sweeps(args.directories)
    if not removals:
        say("nothing to remove")
        return 0

    size = sum(removal.size for removal in removals)
    print_table(texts_of(COLUMNS, removals), ["directory"], ["status"], ["status", "stay"], terminal_width())
    if args.dry_run:
        say(f"would free {size_shown(size)}")
        return 0
    if not confirmed(f"Remove them ({size_shown(size)})?", args.yes):
        say("nothing was removed")
        return EXIT_FAILED
    freed = sum(map(_freed, removals))
    say(f"freed {size_shown(freed)}")
    return 0 if freed == size else EXIT_FAILED


def _runs_and_sweeps(directories: list[Path]) -> list[Removal]:
    removals = whole_removals(directories)
    removed = {removal.place for removal in removals}
    for place in removed:
        for run in starting_from(place):
            if not {run, *run.parents} & removed:
                warn(f"warning: {run} starts from the weights in {place} and has no checkpoint of its own yet")
    return removals


def _unneeded_checkpoints(directories: list[Path], newest_only: bool) -> list[Removal]:
    there = [path for path in directories if not is_not_there_yet(path)]
    for path in there:
        run_dir.require_directory(path, "a directory with runs")

    with permanent():
        from gptexp.storage.unneeded import unneeded_checkpoints  # imports torch

    return [removal for path in there for removal in unneeded_checkpoints(path, newest_only)]


def _freed(removal: Removal) -> int:
    """Remove, and return the bytes that this freed. If it fails, prints the error and returns 0."""
    try:
        return removal.remove()
    except UserError as error:
        print_error(error)
    return 0


if __name__ == "__main__":
    run_verb(main)
