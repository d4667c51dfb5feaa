"""The page of a directory with many runs and sweeps: `gptexp watch outputs`."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptexp.process.errors import ConfigError
from gptexp.process.terminal import printable
from gptexp.process.words import counted, size_shown
from gptexp.reporting.listings.listing import STATUSES, Read, Row, list_runs, ordered
from gptexp.reporting.page.overview import Tile, link_to
from gptexp.storage import run_dir
from gptexp.storage.inventory import cells
from gptexp.storage.reader import open_text

END_BYTES = 1 << 16  # of metrics.jsonl: the last logged step is in them
TOKENS = re.compile(rb'"tokens": (\d{1,18})[,}]')


@dataclass(frozen=True)
class Index:
    """The content of the page. All texts are printable."""

    title: str
    directory: str
    tiles: list[Tile]
    rows: list[dict[str, Any]]  # the fields of `Row`, and what only the page shows


def build_index(directory: Path, read: Read | None = None) -> Index:
    """The runs and sweeps below `directory`, newest first. Raises `ConfigError` if it cannot be read."""
    rows = ordered([listed.row for listed in list_runs(directory, read)], "date", reverse=False)
    kinds = Counter(row.kind for row in rows)
    return Index(
        title=" and ".join(counted(kinds[kind], kind) for kind in ("sweep", "run") if kinds[kind]) or "No runs yet",
        directory=printable(str(directory)),
        tiles=_tiles(rows),
        rows=[_fields(row) for row in rows],
    )


def _tiles(rows: Sequence[Row]) -> list[Tile]:
    statuses = Counter(row.status for row in rows)
    tiles = [Tile(status.capitalize(), f"{statuses[status]}") for status in STATUSES if statuses[status]]
    return [*tiles, Tile("On disk", size_shown(sum(row.size_bytes for row in rows)))]


def _fields(row: Row) -> dict[str, Any]:
    """The fields of a row, with printable texts, and what only the page shows."""
    texts = {key: printable(value) if isinstance(value, str) else value for key, value in asdict(row).items()}
    return texts | {
        "tags": list(map(printable, row.tags)),
        "link": link_to(row.name),
        "size": size_shown(row.size_bytes),
        "share": _share(row),
        "found_by": printable(" ".join(filter(None, [row.name, row.model, row.status, *row.tags]))).lower(),
    }


def _share(row: Row) -> float | None:
    """What is done of a running row: of a sweep, the cells, and of those that run the tokens."""
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
        _, of_tokens = run_dir.load_config(directory).run_length
        return min(1.0, _newest_tokens(directory / run_dir.METRICS) / of_tokens)
    return None


def _newest_tokens(metrics: Path) -> int:
    """The tokens of the last logged event; 0 if there is none."""
    with suppress(OSError), open_text(metrics) as text:
        file = text.buffer
        file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
        if logged := TOKENS.findall(file.read()):
            return int(logged[-1])
    return 0
