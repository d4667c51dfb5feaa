"""`gptexp watch DIR`: the report of a run or a sweep as a live page, served to this machine only.

It writes no files. The page polls `state.json` every second and gets a new state only if something has changed.
"""

import hashlib
import json
import threading
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gptexp.process.errors import ConfigError
from gptexp.process.terminal import printable
from gptexp.reporting.page import SECTIONS, live_page, sections, specifications, title
from gptexp.reporting.pictures import bundle
from gptexp.reporting.records import Run, read_run
from gptexp.reporting.report import build_report
from gptexp.storage import run_dir

HOST = "127.0.0.1"
FILES = (run_dir.METRICS, run_dir.SUMMARY, run_dir.CONFIG, run_dir.SWEEP)


class Watched:
    """The content of a directory's page, computed again only if a file has changed. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = printable(directory.resolve().name)
        self._lock = threading.Lock()
        self._signatures: dict[Path, Any] = {}  # of each directory at the last poll
        self._runs: dict[Path, tuple[Any, Run]] = {}  # directory -> (signature, run)
        self._state = b""

    def state(self, have: str) -> bytes | None:
        """JSON with `version`, `title`, `sections` and `figures` of the page; None if `have` is the current version."""
        with self._lock:
            self._update()
            version = hashlib.sha256(self._state).hexdigest()[:16]
            return None if have == version else b'{"version": "%b", %b' % (version.encode(), self._state[1:])

    def _update(self) -> None:
        try:
            directories = sorted(path for path in self.directory.iterdir() if path.is_dir())
        except OSError:
            directories = []
        signatures = {directory: _signature(directory) for directory in (self.directory, *directories)}
        if signatures == self._signatures:
            return
        self._signatures = signatures
        self._runs = {directory: run for directory, run in self._runs.items() if directory in signatures}
        try:
            content = self._content()
        except Exception as error:  # the directory may vanish, or appear, while it is read
            why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            message = {**dict.fromkeys(SECTIONS, ""), "verdict": f'<p class="problem">{escape(why)}</p>'}
            content = {"title": f"{self.name} · gptexp", "sections": message, "figures": []}
        self._state = json.dumps(run_dir.finite(content)).encode()

    def _content(self) -> dict[str, Any]:
        report = build_report(self.directory, self._read)
        return {"title": title(report), "sections": sections(report), "figures": specifications(report.figures)}

    def _read(self, directory: Path) -> Run:
        # The signature was taken before the files are read, so that a change in between shows at the next poll.
        now = self._signatures.get(directory)
        before, run = self._runs.get(directory, (None, None))
        if run is None or before != now:
            run = read_run(directory)
            self._runs[directory] = now, run
        return run


def _signature(directory: Path) -> tuple[Any, ...]:
    """Equal as long as a run's files do not change and its lock is held, or not held, as before."""
    files: list[Any] = []
    for name in FILES:
        try:
            stat = (directory / name).stat()
            files.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            files.append(None)
    return (*files, run_dir.is_locked(directory))


def build_server(directory: Path, port: int) -> ThreadingHTTPServer:
    """A server for this machine only, on `port` (0: any free port). Raises `OSError` if the port is taken."""
    watched = Watched(directory)
    page = live_page(watched.name, bundle()).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            # Guards against DNS rebinding: another site whose name resolves to this machine must not read the page.
            if urlsplit(f"//{self.headers.get('Host')}").hostname not in (HOST, "localhost"):
                self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for this machine only\n")
            elif url.path == "/":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", page)
            elif url.path == "/state.json":
                state = watched.state(parse_qs(url.query).get("have", [""])[0])
                self._send(HTTPStatus.OK if state else HTTPStatus.NO_CONTENT, "application/json", state or b"")
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found; use / or /state.json\n")

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
            """Print nothing: the terminal shows only the address."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing: a browser may close a connection at any time."""

    return Server((HOST, port), Handler)
