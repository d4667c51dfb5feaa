"""A table for the terminal. On a narrow one it has fewer columns, and names take several lines; no number is cut."""

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

NARROWEST_NAME = 24  # characters
PIPE_WIDTH = 10_000  # characters of a line in a file or a pipe, where nothing is wrapped

Columns = Sequence[tuple[str, Sequence[str]]]  # the title of each column, with its texts


def print_table(
    columns: Columns,
    name: str,
    to_the_left: Collection[str],
    least_needed: Sequence[str],
    width: int | None,
    narrowest_name: int = NARROWEST_NAME,
) -> None:
    """Print `columns` on lines of `width` characters, or on lines of any length if it is None.

    `name` is the title of the column that may be wrapped. `least_needed` are the titles of columns that are left out
    first, in this order, until that column has `narrowest_name` characters, or fewer if it needs fewer.
    """
    for title in least_needed:
        if width is not None and sum(_width(column, name, narrowest_name) for column in columns) > width:
            columns = [column for column in columns if column[0] != title]
    table = Table(box=None, pad_edge=False)
    for title, _ in columns:
        left = title == name or title in to_the_left
        table.add_column(title, justify="left" if left else "right", no_wrap=title != name, overflow="fold")
    for row in zip(*(texts for _, texts in columns), strict=True):
        table.add_row(*map(Text, row))
    Console(width=width or PIPE_WIDTH).print(table)


def print_in_blocks(
    names: tuple[str, Sequence[str]], columns: Columns, to_the_left: Collection[str], width: int | None
) -> None:
    """Print `columns` beside the names of the rows, in as many tables as it takes for lines of `width` characters."""

    def fits(count: int) -> bool:
        return width is None or sum(_width(column, names[0]) for column in (names, *columns[:count])) <= width

    while columns:
        count = max([1, *filter(fits, range(1, len(columns) + 1))])
        print_table([names, *columns[:count]], names[0], to_the_left, (), width if fits(count) else None)
        columns = columns[count:]


def _width(column: tuple[str, Sequence[str]], name: str, narrowest_name: int = NARROWEST_NAME) -> int:
    """Characters that a column needs, with the space beside it."""
    title, texts = column
    needed = max(map(len, (title, *texts))) + 2
    return min(needed, narrowest_name) if title == name else needed
