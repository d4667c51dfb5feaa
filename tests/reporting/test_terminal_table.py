"""Tables for the terminal: those that fit are printed as rich prints them, without its time."""

import io
import random
from collections.abc import Collection

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gptexp.reporting.listings.terminal_table import Columns, _print_unwrapped, print_table

LETTERS = "abcXYZ 0189,.-é日本語가Ａ\U0001f600\u0301\ufffd"  # some take two columns, one takes none


def by_rich(columns: Columns, left: Collection[str]) -> str:
    """The table that rich prints where it has room."""
    out = io.StringIO()
    table = Table(box=None, pad_edge=False)
    for title, _ in columns:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    for row in zip(*(texts for _, texts in columns), strict=True):
        table.add_row(*map(Text, row))
    Console(width=10_000, file=out).print(table)
    return out.getvalue()


@pytest.mark.parametrize("seed", range(50))
def test_a_table_that_fits_is_printed_as_rich_prints_it(seed: int) -> None:
    draw = random.Random(seed)

    def text(least: int) -> str:
        return "".join(draw.choices(LETTERS, k=draw.randint(least, 12))).strip()

    rows = draw.randint(0, 5)
    columns = [(f"{n}{text(1)}", [text(0) for _ in range(rows)]) for n in range(draw.randint(1, 5))]
    left = {title for title, _ in columns if draw.random() < 0.5}
    out = io.StringIO()
    _print_unwrapped(columns, left, Console(width=10_000, file=out))
    assert out.getvalue() == by_rich(columns, left)


@pytest.mark.parametrize("room", [0, -1])
def test_a_column_of_wide_characters_is_left_out_before_one_of_its_texts_is_cut(
    capsys: pytest.CaptureFixture[str], room: int
) -> None:
    columns = [("name", ["a"]), ("note", ["日本語日本語日"])]
    width = 4 + 2 + 7 * 2 + 2 + room
    assert print_table(columns, (), ("name", "note"), ("note",), width) == (["note"] if room < 0 else [])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_table_without_rows_is_its_titles(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("name", []), ("note", [])], (), ("name",), (), None)
    assert capsys.readouterr().out == "name  note\n"
