"""`gptexp watch DIR`: a run, a sweep or a directory with many as a live page."""

from pathlib import Path

from gptexp.command.arguments import NEWEST, Parser
from gptexp.process.errors import ConfigError, first_line
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb, say

PORT = 8642


def main(argv: list[str] | None = None) -> None:
    """Serve a live page on this machine: of a run, of a sweep, or of all runs and sweeps below a directory.

    A directory that does not exist yet is shown as soon as it does. Ctrl-C ends the page.
    """
    parser = Parser("watch", main.__doc__)
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="of a run, of a sweep, or of many (outputs); default: the newest",
        **NEWEST,
    )
    parser.add_argument("--port", type=int, metavar="N", help=f"default: {PORT}, or a free port if it is taken")
    args = parser.parse_args(argv)
    if args.directory.exists() and not args.directory.is_dir():
        raise ConfigError(f"{args.directory}: not a directory; give that of a run, of a sweep, or of many")

    with permanent():
        from gptexp.reporting.page.live import build_server  # imports scipy

    try:
        server = build_server(args.directory, PORT if args.port is None else args.port)
    except (OSError, OverflowError) as error:
        if args.port is not None:
            raise ConfigError(f"--port={args.port}: cannot be used ({first_line(error)}); give another") from None
        server = build_server(args.directory, 0)
    if not args.directory.exists():
        say(f"{args.directory}: does not exist yet; the page waits for it")
    say(f"watching {args.directory}: http://{server.server_address[0]!s}:{server.server_port}/  (Ctrl-C to end)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say()
    finally:
        server.server_close()


if __name__ == "__main__":
    run_verb(main)
