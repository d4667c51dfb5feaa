"""`gptexp rm DIR…`: removes runs and sweeps."""

import argparse
from pathlib import Path

from gptexp.process.errors import EXIT_FAILED, UserError
from gptexp.process.terminal import confirmed, print_error, printable, run_verb, say, warn
from gptexp.process.words import counted, size_shown
from gptexp.storage.inventory import bytes_on_disk, is_sweep
from gptexp.storage.removal import check_removable, remove, starting_from


def main(argv: list[str] | None = None) -> int:
    """Remove runs and sweeps, with all their files, after a question."""
    parser = argparse.ArgumentParser(prog="gptexp rm", description=main.__doc__)
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="a run's directory, or a sweep's")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    args = parser.parse_args(argv)
    named = list(dict.fromkeys(map(_without_links_above, args.directories)))
    directories = [path for path in named if not {*path.parents} & {*named}]  # a cell is removed with its sweep
    for path in directories:
        check_removable(path)
        for run in starting_from(path):
            if not {run, *run.parents} & {*directories}:
                warn(f"warning: {run} starts from the weights in {path} and has no checkpoint of its own yet")
    sizes = {path: bytes_on_disk(path) for path in directories}
    say(*(f"{size_shown(size):>12}  {printable(str(path))}" for path, size in sizes.items()))
    sweeps = sum(map(is_sweep, directories))
    what = [counted(number, noun) for number, noun in ((sweeps, "sweep"), (len(sizes) - sweeps, "run")) if number]
    if not confirmed(f"Remove {' and '.join(what)} ({size_shown(sum(sizes.values()))})?", args.yes):
        say("nothing was removed")
        return EXIT_FAILED
    freed = 0
    for path, size in sizes.items():
        try:
            remove(path)
            freed += size
        except UserError as error:
            print_error(error)
    say(f"freed {size_shown(freed)}")
    return 0 if freed == sum(sizes.values()) else EXIT_FAILED


def _without_links_above(path: Path) -> Path:
    """The absolute path, of which only the last part may be a link."""
    path = path.absolute()
    return path.resolve() if path.name == ".." else path.parent.resolve() / path.name


if __name__ == "__main__":
    run_verb(main)
