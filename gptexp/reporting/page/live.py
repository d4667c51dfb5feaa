"""`gptexp watch DIR`: the page of a run, of a sweep or of a directory with many, live and for this machine only.

It writes no files. Every second a page requests its own address, and takes over what differs if the ETag is new. The
page of a run or sweep below DIR is at its path relative to DIR.
"""

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from gptexp.process.errors import ConfigError
from gptexp.process.terminal import printable
from gptexp.reporting.charts.pictures import bundle
from gptexp.reporting.listings.known_rows import KnownRows
from gptexp.reporting.listings.records import Run, read_run
from gptexp.reporting.page.page import Live, index_page, message_page, report_page
from gptexp.reporting.page.report import build_report
from gptexp.storage import run_dir
from gptexp.storage.inventory import cells, find, is_sweep

HOST = "127.0.0.1"
SHARE = 10  # pause after a look at the files, as a multiple of the time that it took
FILES = (run_dir.METRICS, run_dir.SUMMARY, run_dir.CONFIG, run_dir.CHECKPOINTS, run_dir.SWEEP)
Signature = tuple[bool, bool, dict[str, tuple[int, int, int]]]  # whether it exists, whether it is locked, its files


class Watched:
    """The page of a directory, computed again only if a file has changed. Thread-safe.

    `up`: relative address of the page that lists this one; empty if there is none.
    """

    def __init__(self, directory: Path, script: str, up: str = "") -> None:
        self.directory, self.script, self.up = directory, script, up
        self._lock = threading.Lock()
        self._signatures: dict[Path, Signature] = {}  # of each directory at the last request
        self._runs: dict[Path, tuple[Signature, Run]] = {}  # the signature, and what was read
        self._rows: KnownRows | None = None  # if it lists runs
        self._html, self._version = b"", ""
        self._pause_until = 0.0  # no new page before this time, in s of the monotonic clock

    def html(self) -> tuple[bytes, str]:
        """The page, and its version."""
        with self._lock:
            self._update()
            return self._html, self._version

    def _update(self) -> None:
        if (started := time.monotonic()) < self._pause_until:
            return
        signatures = {directory: _signature(directory) for directory in _watched(self.directory)}
        if signatures != self._signatures:
            self._signatures = signatures
            self._runs = {directory: known for directory, known in self._runs.items() if directory in signatures}
            self._show(Live(_newest(signatures), self.up))
        # A thousand runs must not take a core from the training on this machine.
        self._pause_until = time.monotonic() + SHARE * (time.monotonic() - started)

    def _show(self, live: Live) -> None:
        try:
            html = self._read(live)
        except Exception as error:  # the directory may vanish, or appear, while it is read
            why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            html = message_page(printable(self.directory.resolve().name), escape(printable(why)), self.script, live)
        self._html = html.encode(errors="surrogatepass")
        self._version = f'"{hashlib.sha256(self._html).hexdigest()[:16]}"'

    def _read(self, live: Live) -> str:
        if not self.directory.is_dir():
            raise ConfigError(f"{self.directory}: does not exist yet; this page shows it as soon as it does")
        if _has_a_report(self.directory):
            return report_page(build_report(self.directory, self._run), self.script, live)
        self._rows = self._rows or KnownRows(self.directory)
        page = index_page(self.directory, self._rows.read, self.script, live)
        self._rows.save()
        return page

    def _run(self, directory: Path) -> Run:
        """A run as it was read when a file in its directory last changed."""
        # The signature was taken before the files are read, so a change in between is noticed at the next request.
        signature = self._signatures.get(directory, (False, False, {}))
        if directory not in self._runs or self._runs[directory][0] != signature:
            self._runs[directory] = signature, read_run(directory)
        return self._runs[directory][1]


def _has_a_report(directory: Path) -> bool:
    return run_dir.is_run(directory) or is_sweep(directory)


def _watched(directory: Path) -> list[Path]:
    """The directories whose files the page of `directory` depends on."""
    try:
        if _has_a_report(directory):
            return [directory, *run_dir.subdirectories(directory)]
        paths = find(directory)
        return [directory, *paths, *(cell for path in paths if is_sweep(path) for cell in cells(path))]
    except (ConfigError, OSError):
        return [directory]


def _newest(signatures: Mapping[Path, Signature]) -> float | None:
    """Unix time of the newest change of a file, in s."""
    times = [changed for _, _, states in signatures.values() for changed, *_ in states.values()]
    return max(times) / 1e9 if times else None


def _signature(directory: Path) -> Signature:
    """A value that changes when a run's files change, or when its lock is taken or released."""
    return directory.is_dir(), run_dir.is_locked(directory), run_dir.states_of(directory, FILES)


class Site:
    """The pages of a directory and of all runs and sweeps below it. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root, self.script = root, bundle()
        self._lock = threading.Lock()
        self._pages: dict[Path, Watched] = {}

    def find(self, parts: list[str]) -> Watched | None:
        """The page at a path below the root; None if no run or sweep is there. A cell's link up leads to its sweep."""
        directory = self.root.joinpath(*parts)
        hidden = any(part.startswith(".") or "/" in part or "\0" in part for part in parts)
        try:
            if hidden or (parts and not _has_a_report(directory)):
                return None
        except OSError:  # the path is too long for the system
            return None
        up = next((n for n in range(1, len(parts)) if is_sweep(self.root.joinpath(*parts[:-n]))), len(parts))
        with self._lock:
            return self._pages.setdefault(directory, Watched(directory, self.script, "../" * up))


def build_server(directory: Path, port: int) -> ThreadingHTTPServer:
    """A server for this machine only, on `port` (0: any free port). Raises `OSError` if the port is taken."""
    site = Site(directory)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                path, host = urlsplit(self.path).path, urlsplit(f"//{self.headers.get('Host')}").hostname
            except ValueError:
                self._send(HTTPStatus.BAD_REQUEST, b"not an address\n")
                return
            *folders, name = [os.fsdecode(unquote_to_bytes(part)) for part in path.split("/")[1:]] or [""]
            # Guards against DNS rebinding: another site whose name resolves to this machine must not read the page.
            if host not in (HOST, "localhost"):
                self._send(HTTPStatus.FORBIDDEN, b"this page is for this machine only\n")
            elif name or (watched := site.find(folders)) is None:
                self._send(HTTPStatus.NOT_FOUND, b"not found; the paths of runs and sweeps end with /\n")
            else:
                html, version = watched.html()
                known = self.headers.get("If-None-Match") == version
                self._send(HTTPStatus.NOT_MODIFIED if known else HTTPStatus.OK, html, "text/html", version)

        do_HEAD = do_GET

        def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain", version: str = "") -> None:
            self.send_response(status)
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if version:
                self.send_header("ETag", version)
            if status != HTTPStatus.NOT_MODIFIED:
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD" and status != HTTPStatus.NOT_MODIFIED:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: the terminal shows only the address."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing: a browser may close a connection at any time."""

    return Server((HOST, port), Handler)
