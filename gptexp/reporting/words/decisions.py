"""The decisions of a search of `gptexp tune` as a table."""

from gptexp.reporting.listings.records import LR
from gptexp.reporting.listings.search import SearchHistory
from gptexp.reporting.listings.terminal_table import Columns


def table_of_decisions(search: SearchHistory) -> Columns:
    """A row for each run, in the order in which they were chosen; columns without any text are left out."""

    def width(value: float | None) -> str:
        return "" if value is None else f"{value:.2g}"

    rows = search.decisions
    name = "learning rate" if search.key == LR else search.key
    unit = f" ({rows[0].unit})" if len({row.unit for row in rows}) == 1 else ""
    columns = [
        ("run", [f"{row.number}" for row in rows]),
        ("tokens a step", [f"{row.place[1]:,}" for row in rows]),
        ("arm", [" ".join(row.place[0]) for row in rows]),
        (name, [f"{row.lr:.3g}" for row in rows]),
        ("seed", [f"{row.seed}" for row in rows]),
        ("why", [row.why for row in rows]),
        (f"interval before{unit}", [width(row.before) for row in rows]),
        ("expected", [width(row.expected) for row in rows]),
        ("after", [width(row.after) for row in rows]),
    ]
    return [column for column in columns if any(column[1])]
