"""`gptexp watch DIR`: the page of a run, of a sweep or of a directory with many, live and for this machine only.

It writes no files. A page polls its `state.json` every second and says which version it has. It gets the parts that
differ from that version: sections, rows of a table, figures. The pages of the runs and sweeps below DIR are at their
paths below it.
"""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote_to_bytes, urlsplit

from gptexp.process.errors import ConfigError
from gptexp.process.terminal import printable
from gptexp.reporting.charts.pictures import bundle
from gptexp.reporting.listings.listing import Listed, read_row
from gptexp.reporting.listings.records import Run, read_run
from gptexp.reporting.page.index import build_index
from gptexp.reporting.page.page import SECTIONS, index_sections, live_page, sections, specifications, title
from gptexp.reporting.page.report import build_report
from gptexp.storage import run_dir
from gptexp.storage.inventory import cells, find, is_sweep

HOST = "127.0.0.1"
SHARE = 10  # no content is computed for this many times as long as the last one took
FILES = (run_dir.METRICS, run_dir.SUMMARY, run_dir.CONFIG, run_dir.SWEEP)
VERSIONS = 8  # of a page's content whose digests are kept; a page that has an older one gets all parts
ROW = re.compile(r'<tbody id="([^"]*)".*?</tbody>', re.DOTALL)  # names and texts are escaped, so none can look like it
T = TypeVar("T")


@dataclass(frozen=True)
class Content:
    """What a page shows."""

    title: str
    sections: dict[str, str]  # name -> HTML
    figures: dict[str, str]  # key -> JSON, in the order of the page
    changed: float | None  # Unix time of the newest change of a file, in s

    @cached_property
    def version(self) -> str:
        return _digest(repr((self.title, self.changed, self.digests)))

    @cached_property
    def digests(self) -> dict[tuple[str, str], str]:
        """A hash of each part: of sections, of rows of tables, of figures."""
        rows = {row[1]: row[0] for html in self.sections.values() for row in ROW.finditer(html)}
        kinds = {"section": self.sections, "row": rows, "figure": self.figures}
        return {(kind, name): _digest(text) for kind, parts in kinds.items() for name, text in parts.items()}

    def beyond(self, known: Mapping[tuple[str, str], str]) -> bytes:
        """JSON of the parts whose digests are not `known`, for a page that has the others.

        A section that has not changed is missing, a row that has not changed is empty, a figure has only its key.
        """

        def is_known(kind: str, name: str) -> bool:
            return known.get((kind, name)) == self.digests[kind, name]

        def row(found: re.Match[str]) -> str:
            return f'<tbody id="{found[1]}" data-unchanged></tbody>' if is_known("row", found[1]) else found[0]

        html = {name: ROW.sub(row, text) for name, text in self.sections.items() if not is_known("section", name)}
        head = {"version": self.version, "title": self.title, "changed": self.changed, "sections": html}
        figures = [json.dumps({"key": k}) if is_known("figure", k) else text for k, text in self.figures.items()]
        return f'{json.dumps(head)[:-1]}, "figures": [{", ".join(figures)}]}}'.encode()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


class Watched:
    """The content of a directory's page, computed again only if a file has changed. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = printable(directory.resolve().name)
        self._lock = threading.Lock()
        self._signatures: dict[Path, Any] = {}  # of each directory at the last poll
        self._known: dict[tuple[str, Path], tuple[Any, Any]] = {}  # what was read of a directory, with its signature
        self._content: Content | None = None
        self._digests: dict[str, dict[tuple[str, str], str]] = {}  # of each of the newest versions
        self._pause_until = 0.0  # s of the monotonic clock: no new content before

    def state(self, have: str) -> bytes | None:
        """JSON of what a page needs that has the version `have`; None if that is the current one.

        It holds `version`, `title`, `changed`, and those of `sections` and `figures` that differ (see
        `Content.beyond`); for an unknown version, as of a page that has nothing, all of them.
        """
        with self._lock:
            self._update()
            content, known = self._content, self._digests.get(have, {})
        return None if content is None or content.version == have else content.beyond(known)

    def _update(self) -> None:
        if (started := time.monotonic()) < self._pause_until:
            return
        signatures = {directory: _signature(directory) for directory in _watched(self.directory)}
        if signatures == self._signatures:
            return
        self._signatures = signatures
        self._known = {key: known for key, known in self._known.items() if key[1] in signatures}
        try:
            name, html, figures = self._read()
        except Exception as error:  # the directory may vanish, or appear, while it is read
            why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            message = f'<p class="problem">{escape(printable(why))}</p>'
            name, html, figures = f"{self.name} · gptexp", {**dict.fromkeys(SECTIONS, ""), "verdict": message}, []
        texts = {figure["key"]: json.dumps(run_dir.finite(figure)) for figure in figures}
        self._content = content = Content(name, html, texts, _newest(signatures))
        self._digests = dict([*self._digests.items(), (content.version, content.digests)][-VERSIONS:])
        # A large sweep must not take a core from the training on this machine.
        self._pause_until = time.monotonic() + SHARE * (time.monotonic() - started)

    def _read(self) -> tuple[str, dict[str, str], list[dict[str, Any]]]:
        """Title, sections and figures."""
        if not self.directory.is_dir():
            raise ConfigError(f"{self.directory}: does not exist yet; this page shows it as soon as it does")
        if _has_a_report(self.directory):
            report = build_report(self.directory, self._run)
            return title(report), sections(report, is_live=True), specifications(report.figures)
        index = build_index(self.directory, self._row)
        return f"{index.title} · gptexp", index_sections(index), []

    def _run(self, directory: Path) -> Run:
        return self._kept("run", directory, lambda: read_run(directory))

    def _row(self, directory: Path, name: str) -> Listed:
        return self._kept("row", directory, lambda: read_row(directory, name))

    def _kept(self, kind: str, directory: Path, read: Callable[[], T]) -> T:
        """What `read` has returned for a directory, until a file in it changes."""
        # The signature was taken before the files are read, so that a change in between shows at the next poll.
        now = self._signatures.get(directory)
        before, value = self._known.get((kind, directory), (None, None))
        if value is None or before != now:
            value = read()
            self._known[kind, directory] = now, value
        found: T = value
        return found


def _has_a_report(directory: Path) -> bool:
    return run_dir.is_run(directory) or is_sweep(directory)


def _watched(directory: Path) -> list[Path]:
    """The directories whose files the page of `directory` depends on."""
    try:
        if _has_a_report(directory):
            return [directory, *run_dir.subdirectories(directory)]
        found = find(directory)
        return [directory, *found, *(cell for path in found if is_sweep(path) for cell in cells(path))]
    except (ConfigError, OSError):
        return [directory]


def _newest(signatures: Mapping[Path, tuple[Any, ...]]) -> float | None:
    """Unix time of the newest change of a file, in s."""
    times = [part[0] for signature in signatures.values() for part in signature if isinstance(part, tuple)]
    return max(times) / 1e9 if times else None


def _signature(directory: Path) -> tuple[Any, ...]:
    """Equal as long as a run's files do not change and its lock is held, or not held, as before."""
    files: list[Any] = [directory.is_dir()]
    for name in FILES:
        try:
            stat = (directory / name).stat()
            files.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            files.append(None)
    return (*files, run_dir.is_locked(directory))


class Site:
    """The pages of a directory and of all runs and sweeps below it. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root, self.script = root, bundle()
        self._lock = threading.Lock()
        self._pages: dict[Path, Watched] = {}

    def find(self, parts: list[str]) -> Watched | None:
        """The page at a path below the root; None if there is no run and no sweep."""
        directory = self.root.joinpath(*parts)
        hidden = any(part.startswith(".") or "/" in part or "\0" in part for part in parts)
        if hidden or (parts and not _has_a_report(directory)):
            return None
        with self._lock:
            return self._pages.setdefault(directory, Watched(directory))

    def html(self, watched: Watched, parts: list[str]) -> bytes:
        """A page without its content, with a link to the page that it was opened from."""
        up = next((n for n in range(1, len(parts)) if is_sweep(self.root.joinpath(*parts[:-n]))), len(parts))
        return live_page(watched.name, self.script, "../" * up).encode()


def build_server(directory: Path, port: int) -> ThreadingHTTPServer:
    """A server for this machine only, on `port` (0: any free port). Raises `OSError` if the port is taken."""
    site = Site(directory)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            *folders, name = [os.fsdecode(unquote_to_bytes(part)) for part in url.path.split("/")[1:]] or [""]
            # Guards against DNS rebinding: another site whose name resolves to this machine must not read the page.
            if urlsplit(f"//{self.headers.get('Host')}").hostname not in (HOST, "localhost"):
                self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for this machine only\n")
            elif name not in ("", "state.json") or (watched := site.find(folders)) is None:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not found; the paths of runs and sweeps end with /\n")
            elif name == "":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", site.html(watched, folders))
            else:
                state = watched.state(parse_qs(url.query).get("have", [""])[0])
                self._send(HTTPStatus.OK if state else HTTPStatus.NO_CONTENT, "application/json", state or b"")

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
