"""Documents that are made as they are read: additions, each of which is one document."""

import random
from collections.abc import Iterator


def additions(count: int = 20_000, digits: int = 3, seed: int = 0) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(count):
        a, b = (draw.randrange(10**digits) for _ in range(2))
        yield f"{a} + {b} = {a + b}\n"
