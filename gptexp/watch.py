"""`gptexp watch DIR`: the report of a run or a sweep as a live page, from this machine to this machine.

It reads files and writes none. The page asks for `state.json` every second and gets what has changed since.
"""

import argparse
import hashlib
import json
import threading
from collections.abc import Callable
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from gptexp import run_dir
from gptexp.errors import ConfigError, first_line
from gptexp.terminal import say

if TYPE_CHECKING:
    from gptexp.report.records import Run
    from gptexp.status import Progress

HOST = "127.0.0.1"
PORT = 8642
FILES = (run_dir.METRICS, run_dir.SUMMARY, run_dir.CONFIG)


class Watched:
    """What there is to say of a directory, worked out anew only where a file has changed. Safe between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.resolve().name
        self._lock = threading.Lock()
        self._runs: dict[Path, tuple[Any, Run]] = {}  # with the state of the files that they were read from
        self._seen: dict[Path, Any] = {}
        self._version, self._state = "", b""

    def state(self, have: str) -> bytes | None:
        """JSON of `version`, `sections` of the page and `pictures`; None while `have` is the newest version."""
        with self._lock:
            state = self._newest()
            self._version = hashlib.sha256(state).hexdigest()[:16]
            return None if have == self._version else b'{"version": "%b", %b' % (self._version.encode(), state[1:])

    def _newest(self) -> bytes:
        seen = self._look()
        if seen != self._seen or not self._state:
            self._seen = seen
            try:
                shown = self._shown()
            except Exception as error:  # a directory that goes away, or comes to be, while it is read
                shown = _nothing(str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")
            self._state = json.dumps(run_dir.finite(shown)).encode()
        return self._state

    def _look(self) -> dict[Path, Any]:
        """Equal as long as no file that counts has changed."""
        try:
            directories = sorted(path.parent for path in self.directory.glob(f"*/{run_dir.CONFIG}"))
        except OSError:
            directories = []
        seen = {directory: signature(directory) for directory in (self.directory, *directories)}
        self._runs = {directory: run for directory, run in self._runs.items() if directory in seen}
        return seen

    def _read(self, directory: Path) -> "Run":
        from gptexp.report.records import read_run

        now = self._seen.get(directory)  # from before it is read: what changes meanwhile is seen the next time
        before, run = self._runs.get(directory, (None, None))
        if run is None or before != now:
            run = read_run(directory)
            self._runs[directory] = now, run
        return run

    def _shown(self) -> dict[str, Any]:
        from gptexp.report.analysis import analyse
        from gptexp.report.figures import figures
        from gptexp.report.page import sections, specifications
        from gptexp.report.records import find_runs, printable
        from gptexp.report.verdict import verdict
        from gptexp.status import survey

        cells = survey(self.directory, self._read)
        runs = find_runs(self.directory, self._read)
        analysis = analyse(printable(self.name), runs)
        pictures = figures(analysis)
        lines = [printable(line) for line in verdict(analysis)]
        parts = sections(analysis, lines, pictures, [], _cells(cells))
        return {"sections": parts, "pictures": specifications(pictures)}


def signature(directory: Path) -> tuple[Any, ...]:
    """Of a run's files: times and sizes, and whether a process holds the directory."""
    marks: list[Any] = []
    for name in (*FILES, run_dir.SWEEP):
        try:
            stat = (directory / name).stat()
            marks.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            marks.append(None)
    return (*marks, run_dir.is_locked(directory))


def _nothing(why: str) -> dict[str, Any]:
    from gptexp.report.page import SECTIONS

    return {"sections": {**dict.fromkeys(SECTIONS, ""), "verdict": f"<p>{escape(why)}</p>"}, "pictures": []}


def _cells(cells: "list[Progress]") -> str:
    """How far each cell is, as a table; what is being done first."""
    from gptexp.status import in_all, seconds_shown

    rows = "".join(
        f"<tr><td>{escape(cell.name)}</td><td>{cell.status}</td>"
        f'<td><progress max="{cell.of_tokens or 1}" value="{cell.tokens}" aria-label="{escape(cell.name)}"></progress>'
        f" {cell.share:.0%}</td><td>{'' if cell.loss is None else format(cell.loss, '.4f')}</td>"
        f"<td>{seconds_shown(cell.seconds_left) if cell.seconds_left else ''}</td></tr>"
        for cell in cells
    )
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("run", "status", "progress", "val loss", "left"))
    return (
        f"<h2>Progress</h2><p>{escape(in_all(cells))}</p>"
        '<div class="scroll low" tabindex="0" role="region" aria-label="Progress of each run">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def build_server(watched: Watched, port: int) -> ThreadingHTTPServer:
    """A server for this machine only, on `port` (0: any that is free). Raises `OSError` where that is taken."""
    from gptexp.report.page import live_page
    from gptexp.report.pictures import bundle
    from gptexp.report.records import printable

    page = live_page(printable(watched.name), bundle()).encode()
    answers: dict[str, tuple[str, Callable[[str], bytes | None]]] = {
        "/": ("text/html; charset=utf-8", lambda have: page),
        "/state.json": ("application/json", watched.state),
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            # A page from elsewhere that has its own name resolve to this machine must not read along.
            if urlsplit(f"//{self.headers.get('Host')}").hostname not in (HOST, "localhost"):
                return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"only for this machine\n")
            url = urlsplit(self.path)
            if url.path not in answers:
                return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /state.json\n")
            kind, answer = answers[url.path]
            body = answer(parse_qs(url.query).get("have", [""])[0])
            if body is None:
                return self._send(HTTPStatus.NO_CONTENT, kind, b"")
            return self._send(HTTPStatus.OK, kind, body)

        do_HEAD = do_GET

        def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            if status != HTTPStatus.NO_CONTENT:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """The terminal is for the address."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that leaves in the middle of an answer is no news."""

    return Server((HOST, port), Handler)


def main(argv: list[str] | None = None) -> None:
    """Show a run or a sweep as a live page on this machine: curves, progress, samples, warnings. Ctrl-C ends it."""
    parser = argparse.ArgumentParser(prog="gptexp watch", description=main.__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run's directory, or a sweep's")
    parser.add_argument("--port", type=int, metavar="N", help=f"default: {PORT}, or any that is free")
    args = parser.parse_args(argv)
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory}: no such directory; give a run or a sweep")
    watched = Watched(args.directory)
    try:
        server = build_server(watched, PORT if args.port is None else args.port)
    except (OSError, OverflowError) as error:
        if args.port is not None:
            raise ConfigError(f"--port={args.port}: cannot be used ({first_line(error)}); name another") from None
        server = build_server(watched, 0)
    say(f"watching {args.directory}: http://{HOST}:{server.server_port}/  (Ctrl-C to end)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say()
    finally:
        server.server_close()


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
