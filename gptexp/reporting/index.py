"""The page of a directory with many runs and sweeps: `gptexp watch outputs`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptexp.config.schema import counted
from gptexp.process.terminal import printable
from gptexp.reporting.listing import STATUSES, Read, Row, list_runs, ordered
from gptexp.reporting.overview import Tile, link_to
from gptexp.storage.inventory import size_shown


@dataclass(frozen=True)
class Index:
    """The content of the page. All texts are printable."""

    title: str
    directory: str
    tiles: list[Tile]
    rows: list[dict[str, Any]]  # the fields of `Row`, a link to the run's page, and its size as text


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
    }
