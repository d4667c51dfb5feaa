"""`gptexp gc [DIR]`: removes checkpoints that no command reads."""

import argparse
from pathlib import Path

from gptexp.process.errors import EXIT_FAILED, ConfigError, first_line
from gptexp.process.terminal import confirmed, printable, run_verb, say, terminal_width, warn
from gptexp.reporting.terminal_table import print_table
from gptexp.storage.inventory import OUTPUTS, size_shown


def main(argv: list[str] | None = None) -> int:
    """Remove checkpoints that no command reads, after a question.

    Of a completed or diverged run all but the newest intact one, unless another run starts from its weights
    (init_from); and the rests of saves and removals that were killed.
    """
    parser = argparse.ArgumentParser(prog="gptexp gc", description=main.__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=OUTPUTS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    args = parser.parse_args(argv)
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory}: no such directory; give a directory with runs")

    from gptexp.storage.garbage import find_garbage, remove_garbage  # imports torch

    found = find_garbage(args.directory)
    if not found:
        say(f"{args.directory}: nothing to remove")
        return 0
    sizes = [garbage.size for garbage in found]
    columns = [
        ("in", [printable(str(garbage.place)) for garbage in found]),
        ("status", [garbage.why for garbage in found]),
        ("remove", [str(len(garbage.directories)) for garbage in found]),
        ("frees", list(map(size_shown, sizes))),
    ]
    print_table(columns, "in", ["status"], ["status"], terminal_width())
    if args.dry_run:
        say(f"would free {size_shown(sum(sizes))}")
        return 0
    if not confirmed(f"Remove these, {size_shown(sum(sizes))}?", args.yes):
        say("nothing was removed")
        return EXIT_FAILED
    freed = 0
    for garbage, size in zip(found, sizes, strict=True):
        try:
            remove_garbage(garbage)
            freed += size
        except (OSError, ConfigError) as error:
            warn(f"{garbage.place}: {first_line(error)}")
    say(f"freed {size_shown(freed)}")
    return 0 if freed == sum(sizes) else EXIT_FAILED


if __name__ == "__main__":
    run_verb(main)
