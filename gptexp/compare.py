"""`gptexp compare A B …`: what differs between runs, and whether their losses differ by more than seeds cause."""

import json
import shutil
import sys
from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb, say
from gptexp.reporting.page.own_file import check_own
from gptexp.reporting.statistics.best import runs_to_compare
from gptexp.storage.run_dir import finite


def main(argv: list[str] | None = None) -> None:
    """Compare runs: their configs, their losses against the noise of seeds, and a page with their curves."""
    parser = Parser("compare", main.__doc__)
    what = "a run's directory, or a sweep's, for the runs of its best cell"
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR", help=what)
    to = parser.add_mutually_exclusive_group()
    to.add_argument("--output", type=Path, default=Path("compare.html"), metavar="FILE", help="default: %(default)s")
    to.add_argument("--json", action="store_true", help="print JSON, for scripts, and write no page")
    parser.add_argument("--objective", metavar="METRIC", help="a validation loss, such as val/NAME/loss")
    args = parser.parse_args(argv)

    directories = runs_to_compare(args.directories)
    if not args.json:
        check_own("--output", args.output, "gptexp compare")
        if not args.output.parent.is_dir():
            raise ConfigError(f"--output {args.output}: {args.output.parent} is no directory; create it first")

    with permanent():
        from gptexp.reporting.page.comparison import compare, numbers, show, write_page  # imports scipy

    comparison = compare(directories, args.objective)
    if args.json:
        print(json.dumps(finite(numbers(comparison)), indent=1))
        return
    show(comparison, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    write_page(args.output, comparison)
    say(f"\nthe page: {args.output}")


if __name__ == "__main__":
    run_verb(main)
