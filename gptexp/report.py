"""`gptexp report DIR`: reports the results of a sweep or of a run."""

import math
import shlex
from pathlib import Path

from gptexp.command.arguments import NEWEST, Parser
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb, say, terminal_width, warn
from gptexp.reporting.page.fitted import check_target, points_above_cells, settings_given, write_optim
from gptexp.reporting.words.thresholds import BEHIND_NATS, NARROWEST_WITHIN, WITHIN
from gptexp.storage.run_dir import require_directory


def main(argv: list[str] | None = None) -> None:
    """Report the results of a sweep or a run: an HTML page, pictures, a table, JSON, and a verdict in sentences."""
    parser = Parser("report", main.__doc__)
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="a sweep's directory, or a run's; default: the newest", **NEWEST
    )
    parser.add_argument("--write-optim", type=Path, metavar="FILE", help="write the fitted law as optim/NAME.yaml")
    parser.add_argument(
        "--behind", type=float, default=BEHIND_NATS, metavar="NATS",
        help="of several arms, report the batch size at which each falls this far behind (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--within", type=float, metavar="OCTAVES",
        help="propose runs until each best learning rate is known within this many octaves on each side "
        f"(default: that of gptexp tune, or {WITHIN})",
    )  # fmt: skip
    parser.add_argument(
        "--objective", metavar="METRIC", help="the validation loss that it is about, such as val/NAME/loss"
    )
    parser.add_argument("--verbose", action="store_true", help="print every sentence and the table of runs")
    args = parser.parse_args(argv)

    require_directory(args.directory, "a run or a sweep")
    if not 0 < args.behind < math.inf:
        raise ConfigError(f"--behind={args.behind}: must be finite and above 0")
    if args.within is not None and not NARROWEST_WITHIN <= args.within < math.inf:
        raise ConfigError(f"--within={args.within}: must be finite and at least {NARROWEST_WITHIN:g}")
    if args.write_optim is not None:
        check_target(args.write_optim)

    with permanent():
        from gptexp.reporting.charts.pictures import Drawing

        with Drawing() as drawing:  # its processes start while other modules are imported
            from gptexp.reporting.page.write import PAGE, show, write_report

            report, _ = write_report(args.directory, args.behind, args.within, args.objective, drawing)
    show(report, terminal_width(), args.verbose)
    say(f"\nthe page: {args.directory / PAGE}")
    if args.write_optim is not None:
        law = write_optim(args.write_optim, report.analysis)
        for line in points_above_cells(report.analysis):
            warn(f"warning: --write-optim {args.write_optim}: {line}")
        command = shlex.join([*settings_given(report.sweep), f"optim={args.write_optim.stem}"])
        exponent = f"exponent {law.exponent:.2f} ({law.low:.2f} to {law.high:.2f})"
        say(f"the law: {args.write_optim}, {exponent}; use it with {command}")


if __name__ == "__main__":
    run_verb(main)
