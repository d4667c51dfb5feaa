"""The order of windows in Python's integers, one sample at a time: the reference for `gptexp/data/order.py`."""

from dataclasses import dataclass
from functools import cache, cached_property

VALIDATE, OFFSET = (int.from_bytes(word, "big") for word in (b"validate", b"offset"))


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
    return x ^ x >> 31


def mix(*values: int) -> int:
    key = 0
    for value in values:
        key = splitmix64(key ^ value)
    return key


@cache
def sorted_by_hash(n: int, key: int) -> list[int]:
    return sorted(range(n), key=lambda i: (splitmix64(i ^ key), i))


def permute(index: int, n: int, key: int) -> int:
    """The image of `index`: by sorting below 65,536, else by six Feistel rounds, repeated until it is below n."""
    if n < 65_536:
        return sorted_by_hash(n, key)[index]
    half = 1
    while 4**half < n:
        half += 1
    while True:
        left, right = divmod(index, 2**half)
        for i in range(6):
            left, right = right, left ^ splitmix64(right ^ mix(key, i)) % 2**half
        index = left * 2**half + right
        if index < n:
            return index


@dataclass(frozen=True)
class ScalarOrder:
    n_windows: int
    n_val: int
    seed: int
    shuffled: bool = True
    shifted: bool = False

    @cached_property
    def windows(self) -> list[int]:
        """The training windows in the order of the text."""
        held_out = {permute(i, self.n_windows, VALIDATE) for i in range(self.n_val)}
        if self.shifted:
            held_out |= {window - 1 for window in {*held_out, self.n_windows}}
        return [window for window in range(self.n_windows) if window not in held_out]

    def start(self, sample: int, seq_len: int) -> int:
        """The first token of the window of a sample."""
        n = len(self.windows)
        epoch, position = divmod(sample, n)
        if self.shuffled:
            position = permute(position, n, mix(self.seed, epoch))
        cycle, place = divmod(epoch, seq_len)
        shift = permute(place, seq_len, mix(self.seed, cycle, OFFSET)) if self.shifted else 0
        return self.windows[position] * seq_len + shift
