"""`gptexp status DIR`: the progress of a sweep's cells, and when they will be done."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

from gptexp.command.arguments import NEWEST, Parser
from gptexp.process.terminal import run_verb, say
from gptexp.reporting.listings.progress import in_all, is_going_on, lines_of, ready_in, survey
from gptexp.reporting.listings.records import read_end
from gptexp.reporting.listings.search_progress import search_progress
from gptexp.storage.run_dir import require_directory


def main(argv: list[str] | None = None) -> None:
    """Show the progress of a sweep's cells: status, tokens, validation loss, and the time until all are done.

    It reads the end of each log. gptexp report reads the whole, and names lines that are missing or damaged. Of a
    search (gptexp tune) also how far the best learning rate of each batch size is known.
    """
    parser = Parser("status", main.__doc__)
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="a sweep's directory, or a run's; default: the newest", **NEWEST
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    args = parser.parse_args(argv)
    require_directory(args.directory, "a sweep or a run")
    read = cache(read_end)
    cells, search = survey(args.directory, read), search_progress(args.directory, read)
    if args.json:
        of_search = {"search": search.as_json()} if search is not None else {}
        values = {"cells": [asdict(cell) for cell in cells], "ready_in_s": ready_in(cells), **of_search}
        print(json.dumps(values, indent=1))
        return
    of_search_in_words = search.lines() if search is not None else []
    say(*lines_of(cells), *of_search_in_words, in_all(cells, is_going_on(args.directory, cells)))


if __name__ == "__main__":
    run_verb(main)
