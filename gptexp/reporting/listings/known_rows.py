"""The rows of runs that earlier calls have read, in a database in the user's cache directory.

A row is read again once anything below its run's directory has changed, because all files count in its size, and while
a process holds the run's lock. Each version of the code, of the group `model` and of the time zone has its own rows.
Without a database, every row is read.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from gptexp.config.paths import conf_dir, user_cache_dir
from gptexp.process.versions import PACKAGE
from gptexp.reporting.listings.listing import Listed, Row, read_row
from gptexp.storage import run_dir
from gptexp.storage.reader import parse_line

DATABASE = "rows.sqlite"
SETTLED_NS = 2 * 10**9  # a younger file may change once more without another time
OLD_S = 7 * 24 * 3600  # age at which rows of other code are deleted

State = tuple[int, str, int, int, int, int]  # time of the last change (ns), name, mode, bytes, blocks, inode


class KnownRows:
    """Reads rows of runs below `directory`."""

    def __init__(self, directory: Path) -> None:
        below = _key(directory)
        self._made_by = _maker()
        self._known: dict[bytes, tuple[bytes, bytes]] = {}  # key -> state of its files, row as JSON
        self._new: dict[bytes, tuple[bytes, bytes]] = {}
        self._read: set[bytes] = set()  # since the last call of `save`
        with suppress(OSError, sqlite3.Error), _database() as database:
            rows = database.execute(
                "SELECT path, state, row FROM known WHERE made_by = ? AND path BETWEEN ? AND ?",
                (self._made_by, below, below[:-1] + b"0"),
            )
            self._known = {path: (state, row) for path, state, row in rows}

    def read(self, path: Path, name: str) -> Listed:
        """What `read_row` returns."""
        key, state = _key(path), _state(path)
        self._read.add(key)
        known, row = self._known.get(key, (b"", b""))
        if state == known and (listed := _from_json(row, path, name)) is not None:
            return listed
        found = read_row(path, name)
        # A process that has taken the lock since may release it and change no file.
        if state is not None and found.row.problem is None and found.row.status != "running":
            self._known[key] = self._new[key] = state, json.dumps(asdict(found)).encode()
        return found

    def save(self) -> None:
        """Keep the new rows for later calls, and delete those of runs below the directory that nobody has read."""
        gone, self._read = self._known.keys() - self._read, set()
        if not self._new and not gone:
            return
        now = int(time.time())
        with suppress(OSError, sqlite3.Error), _database() as database:
            database.execute("DELETE FROM known WHERE made_by != ? AND written < ?", (self._made_by, now - OLD_S))
            removed = [(self._made_by, path) for path in gone]
            database.executemany("DELETE FROM known WHERE made_by = ? AND path = ?", removed)
            added = [(self._made_by, path, *row, now) for path, row in self._new.items()]
            database.executemany("INSERT OR REPLACE INTO known VALUES (?, ?, ?, ?, ?)", added)
            self._new.clear()
        for path in gone:
            del self._known[path]


def _key(path: Path) -> bytes:
    """The absolute path with a slash at its end, as keys below it begin. In their order, 0 follows the slash."""
    return os.fsencode(os.path.join(path.absolute(), ""))  # noqa: PTH118  a Path has no slash at its end


def _from_json(row: bytes, path: Path, name: str) -> Listed | None:
    """The row of a run that is now listed as `path` and `name`; None if it is malformed, as with an infinity."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        values = parse_line(row)
        return Listed(Row(**{**values.pop("row"), "path": str(path), "name": name}), **values)
    return None


def _state(path: Path) -> bytes | None:
    """What changes with anything below the run's directory.

    None if there is none, if a process uses the run, or if a file has changed a moment ago.
    """
    if run_dir.is_locked(path):
        return None
    try:
        own = os.lstat(path).st_mtime_ns  # a run without events began then
    except OSError:
        return None
    states = sorted(_states(path))
    newest = max(own, states[-1][0] if states else 0)
    return None if newest > time.time_ns() - SETTLED_NS else _digest((own, states))


def _states(directory: str | Path) -> Iterator[State]:
    """The states of all files and folders below `directory` that can be read. Links are not followed."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                yield stat.st_mtime_ns, entry.name, stat.st_mode, stat.st_size, stat.st_blocks, stat.st_ino
                if entry.is_dir(follow_symlinks=False):
                    yield from _states(entry.path)


def _maker() -> bytes:
    """What changes with the code, the group `model` and the time zone, of which rows are made."""
    code = [state for state in _states(PACKAGE) if state[1].endswith(".py")]
    return _digest((sorted(code), sorted(_states(conf_dir() / "model")), time.tzname, time.timezone))


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    """The database, in a transaction; one that is damaged is removed. Raises `OSError` or `sqlite3.Error`."""
    path = user_cache_dir() / DATABASE
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with closing(sqlite3.connect(path, timeout=1)) as database, database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS known (made_by BLOB, path BLOB, state BLOB NOT NULL, row BLOB NOT NULL, "
                "written INTEGER, PRIMARY KEY (made_by, path))"
            )
            yield database
    except sqlite3.OperationalError:  # locked by another process, or on a full disk
        raise
    except sqlite3.DatabaseError:
        path.unlink(missing_ok=True)
        raise
