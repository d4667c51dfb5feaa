"""`gptexp gc [DIR]`: removes checkpoints that no command reads."""

import argparse
from pathlib import Path

from gptexp.process.errors import EXIT_FAILED, UserError, first_line
from gptexp.process.terminal import confirmed, printable, run_verb, say, terminal_width, warn
from gptexp.process.words import counted, size_shown
from gptexp.reporting.listings.terminal_table import print_table
from gptexp.storage import run_dir
from gptexp.storage.inventory import OUTPUTS, is_not_there_yet


def main(argv: list[str] | None = None) -> int:
    """Remove checkpoints that no command reads, after a question.

    Of a completed or diverged run all but the newest intact one, those that a changed train.keep_… key keeps, and the
    best one of a diverged run; and the leftovers of saves and removals that were killed.
    """
    parser = argparse.ArgumentParser(prog="gptexp gc", description=main.__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=OUTPUTS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="of each run that is done, keep only the newest checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    args = parser.parse_args(argv)
    if is_not_there_yet(args.directory):
        say(f"{args.directory}: no runs yet")
        return 0
    run_dir.require_directory(args.directory, "a directory with runs")

    from gptexp.storage.garbage import find_garbage, remove_garbage  # imports torch

    found = find_garbage(args.directory, args.all)
    if not found:
        say(f"{args.directory}: nothing to remove")
        return 0
    sizes = [garbage.size for garbage in found]
    columns = [
        ("run", [printable(str(garbage.place)) for garbage in found]),
        ("status", [garbage.why for garbage in found]),
        ("checkpoints removed", [_shown(garbage.directories) for garbage in found]),
        ("stay", [_shown(garbage.stay) for garbage in found]),
        ("frees", list(map(size_shown, sizes))),
    ]
    print_table(columns, ["run"], ["status"], ["status", "stay"], terminal_width())
    if args.dry_run:
        say(f"would free {size_shown(sum(sizes))}")
        return 0
    if not confirmed(f"Remove them ({size_shown(sum(sizes))})?", args.yes):
        say("nothing was removed")
        return EXIT_FAILED
    freed = 0
    for garbage in found:
        try:
            freed += remove_garbage(garbage)
        except (OSError, UserError) as error:
            warn(f"{garbage.place}: {first_line(error)}")
    say(f"freed {size_shown(freed)}")
    return 0 if freed == sum(sizes) else EXIT_FAILED


def _shown(checkpoints: list[Path]) -> str:
    """The steps of the checkpoints, such as "2, 4, … 40", and the number of other directories."""
    steps = sorted(run_dir.step_of(path) for path in checkpoints if run_dir.STEP_NAME.fullmatch(path.name))
    texts = [f"{step:,}" for step in steps]
    parts = [", ".join(texts)] if len(texts) <= 4 else [f"{texts[0]}, {texts[1]}, … {texts[-1]} ({len(texts)})"]
    if others := len(checkpoints) - len(steps):
        parts.append(counted(others, "leftover"))
    return " + ".join(filter(None, parts))


if __name__ == "__main__":
    run_verb(main)
