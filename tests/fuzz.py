"""Helpers of tests with random input: unusual values, and kinds of damage to files."""

import random
from collections.abc import Callable
from pathlib import Path

VALUES = [
    *Path(__file__).with_name("fuzz_values.txt").read_text(encoding="utf-8").splitlines(),
    *("", " ", "\n", "x" * 300, "[" * 50),
]

Damage = Callable[[Path, random.Random], object]


def flip(body: bytes, draw: random.Random) -> bytes:
    """`body` with one bit changed."""
    at = draw.randrange(len(body))
    return body[:at] + bytes([body[at] ^ 1 << draw.randrange(8)]) + body[at + 1 :]
