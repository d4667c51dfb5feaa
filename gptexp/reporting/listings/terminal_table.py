"""Columns of tables, and a table for the terminal.

On a narrow terminal the table has fewer columns, and texts take several lines; no number is cut.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from gptexp.process.terminal import printable

NARROWEST_NAME = 24  # characters
PIPE_WIDTH = 10_000  # characters of a line in a file or a pipe, where nothing is wrapped

Columns = Sequence[tuple[str, Sequence[str]]]  # the title of each column, with its texts
T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a table with a row for each T."""

    key: str
    title: str
    value: Callable[[T], Any]  # for scripts and to sort by; None if the row has none
    form: str = ""  # format specification
    words: Callable[[T], str] | None = None  # for readers, if that is not the formatted value

    def text(self, row: T) -> str:
        if self.words is not None:
            return printable(self.words(row))
        value = self.value(row)
        return "" if value is None else printable(format(value, self.form))


def texts_of(columns: Sequence[Column[T]], rows: Sequence[T]) -> Columns:
    """The title of each column that has a text, with its text for each row."""
    filled = [(column.title, [column.text(row) for row in rows]) for column in columns]
    return [column for column in filled if any(column[1])]


def print_table(
    columns: Columns,
    wrapped: Collection[str],
    to_the_left: Collection[str],
    least_needed: Sequence[str],
    width: int | None,
    narrowest: int = NARROWEST_NAME,
) -> list[str]:
    """Print `columns` on lines of `width` characters, or on lines of any length if it is None.

    `wrapped` are the titles of columns that may be wrapped. `least_needed` are the titles of columns that are left out
    first, in this order, until each wrapped column has `narrowest` characters, or all that it needs if these are fewer.
    Returns the titles that are left out.
    """
    needed = {column[0]: _width(column, wrapped, narrowest) for column in columns}
    kept = {title for title in needed if title not in least_needed}
    for title in reversed(least_needed):
        if title in needed and (width is None or sum(needed[other] for other in {*kept, title}) <= width):
            kept.add(title)
    columns = [column for column in columns if column[0] in kept]
    left = {*to_the_left, *wrapped}
    console = Console(width=width or PIPE_WIDTH)
    if sum(_width(column, ()) for column in columns) - 2 <= console.width:
        _print_unwrapped(columns, left, console)
    else:
        table = Table(box=None, pad_edge=False)
        for title, _ in columns:
            justify: JustifyMethod = "left" if title in left else "right"
            table.add_column(title, justify=justify, no_wrap=title not in wrapped, overflow="fold")
        for row in zip(*(texts for _, texts in columns), strict=True):
            table.add_row(*map(Text, row))
        console.print(table)
    return [title for title in needed if title not in kept]


def _print_unwrapped(columns: Columns, left: Collection[str], console: Console) -> None:
    """Print a table that fits, as rich does, which takes a second for three thousand rows."""
    padded = []
    for title, texts in columns:
        width = max(map(cell_len, (title, *texts)))
        align = str.ljust if title in left else str.rjust
        padded.append([align(text, width - cell_len(text) + len(text)) for text in (title, *texts)])
    head, *rows = map("  ".join, zip(*padded, strict=True))
    console.print(Text(head, style="table.header"))
    console.file.writelines(f"{row}\n" for row in rows)


def print_in_blocks(
    names: tuple[str, Sequence[str]], columns: Columns, to_the_left: Collection[str], width: int | None
) -> None:
    """Print `columns` beside the names of the rows, in as many tables as it takes for lines of `width` characters."""

    def fits(count: int) -> bool:
        return width is None or sum(_width(column, names[:1]) for column in (names, *columns[:count])) <= width

    while columns:
        count = max([1, *filter(fits, range(1, len(columns) + 1))])
        print_table([names, *columns[:count]], names[:1], to_the_left, (), width if fits(count) else None)
        columns = columns[count:]


def _width(column: tuple[str, Sequence[str]], wrapped: Collection[str], narrowest: int = NARROWEST_NAME) -> int:
    """Characters that a column needs, with the space beside it."""
    title, texts = column
    needed = max(map(cell_len, (title, *texts))) + 2
    return min(needed, narrowest) if title in wrapped else needed
