"""The page of a directory with many runs and sweeps: `gptexp watch outputs`."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from gptexp.config.branching import first_tokens
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import printable
from gptexp.process.words import counted, size_shown
from gptexp.reporting.listings.listing import COLUMNS, STATUSES, Read, Row, list_runs, ordered
from gptexp.reporting.listings.terminal_table import Column
from gptexp.reporting.page.overview import Tile, link_to
from gptexp.storage import run_dir
from gptexp.storage.inventory import cells
from gptexp.storage.metrics_file import newest

TOKENS = re.compile(rb'"tokens": (\d{1,18})[,}]')
KEYS = ("name", "started", "model", "lr", "total_batch_size", "val_loss", "status", "cells", "size_bytes", "tags")
COLUMNS_OF_INDEX = [column for key in KEYS for column in COLUMNS if column.key == key]
MINOR = ("started", "model", "total_batch_size", "cells", "size_bytes", "tags")  # left out on a phone
LEFT = ("name", "tags")  # columns whose texts begin at the left


@dataclass(frozen=True)
class Entry:
    """A row of the page. All texts but those of `row` are printable."""

    row: Row
    share: float | None  # done so far; None if the row is not running
    link: str
    searched: str  # what a filter searches, in lower case


@dataclass(frozen=True)
class Index:
    """The content of the page. All texts are printable."""

    title: str
    directory: str
    tiles: list[Tile]
    entries: list[Entry]
    columns: list[Column[Row]]
    minor: tuple[str, ...] = MINOR
    left: tuple[str, ...] = LEFT

    def styled_columns(self) -> list[tuple[Column[Row], str, Markup]]:
        """Each column with its key, and with the HTML attribute of its cells. Call this once for all rows."""
        return [(column, column.key, self._attribute(column.key)) for column in self.columns]

    def _attribute(self, key: str) -> Markup:
        classes = " ".join(name for name, keys in (("minor", self.minor), ("text", self.left)) if key in keys)
        return Markup(' class="{}"').format(classes) if classes else Markup()


def build_index(directory: Path, read: Read | None = None) -> Index:
    """The runs and sweeps below `directory`, newest first. Raises `ConfigError` if it cannot be read."""
    rows = ordered([listed.row for listed in list_runs(directory, read)], "date", reverse=False)
    kinds = Counter(row.kind for row in rows)
    return Index(
        title=" and ".join(counted(kinds[kind], kind) for kind in ("sweep", "run") if kinds[kind]) or "No runs yet",
        directory=printable(str(directory)),
        tiles=_tiles(rows),
        entries=[Entry(row, _share(row), link_to(row.name), _searched(row)) for row in rows],
        columns=COLUMNS_OF_INDEX,
    )


def _tiles(rows: Sequence[Row]) -> list[Tile]:
    statuses = Counter(row.status for row in rows)
    tiles = [Tile(status.capitalize(), f"{statuses[status]}") for status in STATUSES if statuses[status]]
    return [*tiles, Tile("On disk", size_shown(sum(row.size_bytes for row in rows)))]


def _searched(row: Row) -> str:
    return printable(" ".join(filter(None, [row.name, row.model, row.status, *row.tags]))).lower()


def _share(row: Row) -> float | None:
    """The share that is done of a running row. For a sweep: its done cells, and the shares of those that run."""
    if row.status != "running":
        return None
    if not row.cells:
        return _share_of_run(Path(row.path))
    running: list[Path] = []
    with suppress(ConfigError):
        running = [cell for cell in cells(Path(row.path)) if run_dir.is_locked(cell)]
    return ((row.cells_done or 0) + sum(_share_of_run(cell) or 0.0 for cell in running)) / row.cells


def _share_of_run(directory: Path) -> float | None:
    with suppress(ConfigError):
        config = run_dir.load_config(directory)
        first, (_, of_tokens) = first_tokens(config), config.run_length
        last = newest(directory / run_dir.METRICS, TOKENS)
        return min(1.0, (int(last[1]) - first) / (of_tokens - first)) if last is not None else 0.0
    return None
