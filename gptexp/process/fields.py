"""Fields of config dataclasses, each with the rule that its value must satisfy, and how a count is written."""

import codecs
import re
from collections.abc import Callable
from dataclasses import Field, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

AUTO = "auto"  # the value is chosen at run time; effective.json holds the choices that affect training
OF_CODECS = "must be one of Python's codecs for text, such as utf-8, gbk, latin-1 or utf-16-le"
MOST_LAYERS = 10_000  # more than any model has
MOST_NUMBERS = 1_000_000  # more than the width of any layer
MOST_ROWS = 2**31  # more than the ids of any tokenizer, and than the tokens of any context
MOST_RANKS = 1_000_000  # more than any run has
LIMIT = 2**63  # exclusive upper bound of numbers: torch and numpy have 64-bit integers, and float32 overflows at 2^128
DIGITS = 30  # of the largest number that is read as a count, and then refused by its key's own rule

_COUNT = re.compile(r"([+-]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)([kKMBG]?)")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "B": 3, "G": 3}  # no m and no b, which are also milli and bytes


def parse_count(text: str, unit: int = 1000) -> int:
    """The whole number that `text` writes: 1000000, 1_000_000, 1e6, 0.5M. k is `unit`, M its square, B or G its cube.

    Raises `ValueError` with the rule (`count_rule`) for any other text, also for 1.5 and 1.0005k.
    """
    if (match := _COUNT.fullmatch(text)) and (number := Decimal(match[1])).adjusted() < DIGITS:
        count = Fraction(number) * int(unit ** _POWERS[match[2]])  # mypy: a power of an int may be a float
        if count.denominator == 1 and abs(count) < 10**DIGITS:
            return count.numerator
    raise ValueError(count_rule(unit))


def count_rule(unit: int) -> str:
    """The rule that `parse_count` applies, in words."""
    return f"must be a whole number, {count_forms(unit)}"


def count_forms(unit: int) -> str:
    """How a count may be written besides its digits, in words."""
    return f"also as 1e6, 64k (k = {unit:,}), 0.5M or 2B"


def unit_of(f: Field[Any]) -> int:
    """What k stands for in the field's value."""
    unit: int = f.metadata.get("unit", 1000)
    return unit


def ruled(default: Any, holds: Callable[[Any], bool], rule: str, code: str = "out-of-range") -> Any:
    """A key whose value must satisfy `holds` unless it is None; `rule` and `code` go into the error."""
    return field(default=default, metadata={"rule": (holds, rule, code)})


def choice(*values: str) -> Any:
    """A key whose value is one of `values`; the first is the default."""
    return field(default=values[0], metadata={"choices": values})


def choice_or_null(*values: str) -> Any:
    """A key whose value is one of `values` or None, the default."""
    return field(default=None, metadata={"choices": values})


def positive(default: Any) -> Any:
    """A number above 0."""
    return ruled(default, lambda v: 0 < v < LIMIT, "must be above 0, below 2^63")


def tokens_of_1024(default: Any, most: int | None = None) -> Any:
    """A number of tokens, above 0, whose k is 1,024: sizes of steps and contexts are usually powers of two.

    GPT-3's table writes 0.5M for steps of 524,288 tokens.
    """
    plain = positive(default) if most is None else up_to(most, default)
    return field(default=default, metadata={**plain.metadata, "unit": 1024})


def not_negative(default: Any) -> Any:
    """A number of 0 or above."""
    return ruled(default, lambda v: 0 <= v < LIMIT, "must be 0 or above, below 2^63")


def up_to(most: int, default: int | None) -> Any:
    """A whole number from 1 to `most`: something is made for each of so many."""
    return ruled(default, lambda v: 0 < v <= most, f"must be from 1 to {most:,}")


def size(default: int | None) -> Any:
    """A number of heads, or the width of a layer."""
    return up_to(MOST_NUMBERS, default)


def ratio(default: float) -> Any:
    """A number in [0, 1]."""
    return ruled(default, lambda v: 0 <= v <= 1, "must lie in [0, 1]")


def below_one(default: float) -> Any:
    """A number in [0, 1)."""
    return ruled(default, lambda v: 0 <= v < 1, "must lie in [0, 1)")


def count_or_auto(default: int | str, most: int = LIMIT - 1) -> Any:
    """A whole number from 1 to `most`, or auto."""
    legal = lambda v: v == AUTO or (isinstance(v, int) and 0 < v <= most)  # noqa: E731
    rule = "above 0" if most >= LIMIT - 1 else f"from 1 to {most:,}"
    return ruled(default, legal, f"must be a whole number {rule}, or auto")


def directory_name(default: str | None) -> Any:
    """The name of a directory or a project."""
    legal = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,80}")
    rule = "must have 1 to 80 characters A-Za-z0-9._- and not only dots"
    return ruled(default, lambda v: legal.fullmatch(v) is not None, rule, "not-a-name")


def encoding_name(default: str) -> Any:
    """The name of one of Python's codecs for text."""
    return ruled(default, is_encoding, OF_CODECS, "unknown-encoding")


def one_line(default: str | None) -> Any:
    """A line of text, without its end."""
    return ruled(default, lambda v: v.strip() != "" and "\n" not in v, "must be one line with text", "not-a-line")


def is_encoding(name: str) -> bool:
    """Whether a codec decodes bytes of any length, and reports those that it cannot decode (idna does neither)."""
    try:
        letter = "a".encode(name)  # refuses codecs that do not encode text, such as hex
        return codecs.getincrementaldecoder(name)("backslashreplace").decode(letter, True) == "a"
    except (LookupError, ValueError):
        return False
