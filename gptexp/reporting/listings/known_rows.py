"""The rows of runs that earlier calls have read, in a database in the user's cache directory.

A row is read again once a file or the lock of its run has changed. Without a database, every row is read.
"""

import json
import sqlite3
import time
import zlib
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

from gptexp.config.paths import conf_dir, user_cache_dir
from gptexp.process.versions import VERSION
from gptexp.reporting.listings import listing
from gptexp.reporting.listings.listing import Listed, Row, read_row
from gptexp.storage import run_dir
from gptexp.storage.reader import parse_line

DATABASE = "rows.sqlite"
FILES = (run_dir.CONFIG, run_dir.SUMMARY, run_dir.METRICS, run_dir.CHECKPOINTS)
SETTLED_NS = 2 * 10**9  # a younger file may change once more without another time


class KnownRows:
    """Reads rows of runs below `directory`."""

    def __init__(self, directory: Path) -> None:
        below = str(directory.absolute())
        self._known: dict[str, tuple[str, str]] = {}  # path -> state of its files, row as JSON
        self._new: dict[str, tuple[str, str]] = {}
        with suppress(OSError, sqlite3.Error, UnicodeError), closing(_database()) as database:
            rows = database.execute("SELECT * FROM rows WHERE path BETWEEN ? AND ?", (below, f"{below}/\U0010ffff"))
            self._known = {path: (state, row) for path, state, row in rows}

    def read(self, path: Path, name: str) -> Listed:
        """What `read_row` returns."""
        key, state = str(path.absolute()), _state(path)
        known, row = self._known.get(key, ("", ""))
        if state == known:
            values = parse_line(row.encode())
            return Listed(Row(**{**values.pop("row"), "path": str(path), "name": name}), **values)
        found = read_row(path, name)
        if state is not None and found.row.problem is None:
            self._known[key] = self._new[key] = state, json.dumps(asdict(found))
        return found

    def save(self) -> None:
        """Keep the new rows for later calls."""
        if not self._new:
            return
        with suppress(OSError, sqlite3.Error, UnicodeError), closing(_database()) as database, database:
            rows = [(path, *row) for path, row in self._new.items()]
            database.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", rows)
            self._new.clear()


def _state(path: Path) -> str | None:
    """What changes with the run's files; None if a process uses the run, or has changed a file a moment ago."""
    if run_dir.is_locked(path):
        return None
    states = run_dir.states_of(path, FILES)
    changed = path.stat().st_mtime_ns  # a file was made or removed
    newest = max(changed, *(of_file for of_file, *_ in states.values()))
    return None if newest > time.time_ns() - SETTLED_NS else repr([changed, *sorted(states.items())])


def _database() -> sqlite3.Connection:
    """The database; emptied if other code, or other files of the group `model`, have made its rows."""
    folder = user_cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(folder / DATABASE, timeout=1)
    makers = [Path(listing.__file__), *sorted((conf_dir() / "model").glob("*.yaml"))]
    made_by = zlib.crc32(repr([VERSION, *((str(file), file.stat().st_mtime_ns) for file in makers)]).encode()) >> 1
    with database:
        if database.execute("PRAGMA user_version").fetchone() != (made_by,):
            database.execute("DROP TABLE IF EXISTS rows")
            database.execute(f"PRAGMA user_version = {made_by}")
        database.execute("CREATE TABLE IF NOT EXISTS rows (path TEXT PRIMARY KEY, state TEXT, row TEXT)")
    return database
