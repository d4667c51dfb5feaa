"""Counts: every spelling of a whole number gives it, and any other text is refused."""

import random
from decimal import Decimal, localcontext

import pytest

from gptexp.process.fields import DIGITS, count_rule, parse_count

RNG = random.Random(0)
NUMBERS = [0, 1, 999, 1024, 2**19, 10**6, 2**63 - 1, *(RNG.randrange(10 ** RNG.randrange(1, 19)) for _ in range(200))]


def in_units(number: Decimal, factor: int) -> str:
    """`number` / `factor` in decimal digits. They are exact, because 2 and 5 are the only primes of a factor."""
    with localcontext(prec=200):
        return f"{number / factor:f}"


def spellings(number: int, unit: int) -> list[str]:
    shifted = [f"{in_units(Decimal(number), 10**power)}{e}{power}" for power in (1, 3, 12) for e in ("e", "E+")]
    with_suffix = [in_units(Decimal(number), unit**p) + s for s, p in zip("kKMBG", (1, 1, 2, 3, 3), strict=True)]
    return [str(number), f"{number:_}", f"+{number}", f"{number}.0", f"{number * 100}e-2", *shifted, *with_suffix]


@pytest.mark.parametrize("unit", [1000, 1024])
def test_every_spelling_of_a_whole_number_gives_it(unit: int) -> None:
    for number in NUMBERS:
        for text in spellings(number, unit):
            assert parse_count(text, unit) == number, text
            assert parse_count(f"-{text.removeprefix('+')}", unit) == -number, text


def test_k_is_a_thousand_unless_the_unit_is_given() -> None:
    assert [parse_count(text) for text in ("1k", "0.5M", "2B", "2G", "1e6", "1_000")] == [
        1000, 500_000, 2 * 10**9, 2 * 10**9, 10**6, 1000
    ]  # fmt: skip
    assert [parse_count(text, 1024) for text in ("1k", "0.5M", "3.125M", "2B", "1e3")] == [
        1024, 2**19, 3_276_800, 2**31, 1000
    ]  # fmt: skip


@pytest.mark.parametrize("unit", [1000, 1024])
def test_a_number_that_is_not_whole_is_refused_however_close_it_is(unit: int) -> None:
    tiny = Decimal(1).scaleb(-150)
    for number in NUMBERS:
        for suffix, factor in (("", 1), ("k", unit), ("M", unit**2)):
            for other in (Decimal(number) + Decimal("0.5"), Decimal(f"{number}.{'0' * 149}1"), tiny):
                with pytest.raises(ValueError, match="whole number"):
                    parse_count(in_units(other, factor) + suffix, unit)


@pytest.mark.parametrize(
    "text",
    ["", " ", "k", "M", ".", "-", "1m", "1b", "1g", "1kk", "1kM", "1 k", " 1", "1k ", "1Ki", "1T", "1,000", "0x10",
     "_1", "1e", "1e1.5", "1ek", "--1", "1-1", "inf", "nan", "None", "auto", "True", "１", "١k", "1\n", "²",
     f"1e{DIGITS}", f"1{'0' * DIGITS}", "1e999", "1e9999999999", "9" * 10_000, f"1e{DIGITS - 1}B", "1/2", "[1]"],
)  # fmt: skip
def test_any_other_text_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match="whole number") as error:
        parse_count(text)
    assert str(error.value) == count_rule(1000)
    assert "\n" not in str(error.value)
