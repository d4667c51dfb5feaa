"""`gptexp ls [DIR]`: the runs and sweeps below a directory, or the cells of a sweep."""

from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.config.paths import OUTPUTS
from gptexp.config.schema import in_digits
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import emit, emit_path, run_verb, say, terminal_width, warn
from gptexp.reporting.listings.known_rows import KnownRows
from gptexp.reporting.listings.listing import SORTS, STATUSES, Filter, as_json, list_runs, ordered, print_rows
from gptexp.storage.inventory import is_not_there_yet


def main(argv: list[str] | None = None) -> None:
    """List the runs and sweeps below a directory, or the cells of a sweep, the newest first."""
    parser = Parser("ls", main.__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=OUTPUTS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--status", action="append", default=[], choices=STATUSES, help="only these; may be repeated")
    parser.add_argument("--tag", action="append", default=[], metavar="T", help="only with all these tags")
    parser.add_argument(
        "--where", action="append", default=[], metavar="KEY=VALUE",
        help="only with this value in the config, such as optim.lr=0.03; of a sweep, in one cell; may be repeated",
    )  # fmt: skip
    parser.add_argument("--sort", choices=SORTS, default="date", help="default: %(default)s")
    parser.add_argument("-r", "--reverse", action="store_true", help="reverse the order")
    parser.add_argument("-n", "--limit", type=int, metavar="N", help="only the first N rows")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("-q", "--quiet", action="store_true", help="print only the directories, one a line")
    what.add_argument("--json", action="store_true", help="print JSON, for scripts")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit={args.limit}: must be 1 or above")
    pairs = [text.partition("=") for text in args.where]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise ConfigError(f"--where {wrong[0]}: must be key=value")

    which = Filter(args.status, args.tag, [(key, in_digits(key, value)) for key, _, value in pairs])
    known = KnownRows(args.directory)
    listed = [] if is_not_there_yet(args.directory) else list_runs(args.directory, known.read)
    known.save()
    rows = ordered([found.row for found in listed if which.shows(found)], args.sort, args.reverse)[: args.limit]
    if args.json:
        emit(as_json(rows))
    elif args.quiet:
        for row in rows:
            emit_path(row.path)
    elif rows:
        print_rows(rows, terminal_width())
        for row in rows:
            if row.problem:
                warn(row.problem)
    else:
        say(f"{args.directory}: no runs {'that match' if args.status or args.tag or args.where else 'yet'}")


if __name__ == "__main__":
    run_verb(main)
