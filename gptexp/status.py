"""`gptexp status DIR`: the progress of a sweep's cells, and when they will be done."""

import json
from dataclasses import asdict
from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.process.terminal import run_verb, say
from gptexp.reporting.listings.progress import in_all, is_going_on, line_of, ready_in, survey
from gptexp.storage.run_dir import require_directory


def main(argv: list[str] | None = None) -> None:
    """Show the progress of a sweep's cells: status, tokens, validation loss, and the time until all are done."""
    parser = Parser("status", main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a sweep's directory, or a run's")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    args = parser.parse_args(argv)
    require_directory(args.directory, "a sweep or a run")
    cells = survey(args.directory)
    if args.json:
        print(json.dumps({"cells": [asdict(cell) for cell in cells], "ready_in_s": ready_in(cells)}, indent=1))
    else:
        say(*map(line_of, cells), in_all(cells, is_going_on(args.directory, cells)))


if __name__ == "__main__":
    run_verb(main)
