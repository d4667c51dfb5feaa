"""Values in the words and units that people read."""

from collections.abc import Iterable, Sequence
from typing import Any

KEYS_SHOWN = 3
DAY_S = 86_400
YEAR_S = 365.25 * DAY_S


def shown(value: Any) -> str:
    """The value as text for the command line, at most 200 characters long."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def uncapitalised(text: str) -> str:
    """A title inside a sentence: "Sharpness of SAM" becomes "sharpness of SAM"."""
    return text[:1].lower() + text[1:]


def counted(number: int, noun: str) -> str:
    """The number with its noun, for example "1 rank" or "2,000 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def titled(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Titles and their texts as lines of two columns, without those that have no text."""
    return [f"{title:<16}{text}" for title, text in lines if text]


def listed(texts: Sequence[str]) -> str:
    """For example "a, b and c"."""
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def first_keys(texts: Sequence[str]) -> str:
    """The first three of some keys, and how many others there are."""
    others = len(texts) - KEYS_SHOWN
    return ", ".join(texts[:KEYS_SHOWN]) + (f" and {counted(others, 'other key')}" if others > 0 else "")


def rounded(number: float) -> str:
    """A number that is not negative as text, for example "0.53", "40.12" or "53,103"."""
    return f"{number:,.2f}" if number < 100 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """A time as text, for example "40 ms", "4.5 s", "3 min 20 s", "1 h 5 min" or "3.2 days"."""
    if not seconds < 1000 * YEAR_S:
        return "more than a thousand years"
    if 0 < seconds < 0.1:
        return f"{1e3 * seconds:.2g} ms"
    whole, minutes = round(seconds), round(seconds / 60)
    if whole < 60:
        return f"{seconds:.1f} s" if whole < 10 else f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 1440:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    if seconds < YEAR_S:
        return f"{seconds / DAY_S:.1f} days"
    return f"{seconds / YEAR_S:,.1f} years"


def size_shown(size: int) -> str:
    """A number of bytes as text, for example "1.5 GiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} B"
