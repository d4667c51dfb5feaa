"""The order of the windows of a token stream: a pure function of (seed, epoch, position).

It does not depend on ranks, micro-batches or steps, and it has no state: sample number s is window
`permutation(n, seed, epoch)[s mod n]` of epoch s // n on every machine. The permutation uses splitmix64 and a Feistel
network, because numpy and torch guarantee their random numbers only within one version.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Word = TypeVar("Word", int, npt.NDArray[Any])  # Python's or uint64

_WORD = 2**64 - 1  # all bits of a word: numpy's sums and products end there by themselves, Python's do not

# For fewer items than this, hashes are sorted, which is uniform and cheap. For more items, a Feistel network is
# indistinguishable from uniform and needs no memory.
_SORT_BELOW = 65_536
_FEISTEL_ROUNDS = 6
_VALIDATION_KEY = 0x76616C6964617465  # "validate" in ASCII: the held-out windows do not depend on the seed
_OFFSET_KEY = 0x6F6666736574  # "offset" in ASCII


def splitmix64(x: Word) -> Word:
    """Steele, Lea and Flood's mixing function (OOPSLA 2014): a bijection of 64-bit integers."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def mix(*values: int) -> int:
    """One 64-bit key from several integers; it depends on their order."""
    key = 0
    for value in values:
        key = splitmix64(key ^ value % 2**64)
    return key


def permute(index: Int64, n: int, key: int) -> Int64:
    """The images of `index` under the permutation of [0, n) that `key` determines."""
    if n < _SORT_BELOW:
        return _sorted_permutation(n, key)[index]
    half_bits = ((n - 1).bit_length() + 1) // 2
    out = _feistel(index.astype(np.uint64), half_bits, key)
    while (outside := out >= n).any():  # cycle walking; the network's domain is at most 4 n
        out[outside] = _feistel(out[outside], half_bits, key)
    return out.astype(np.int64)


@lru_cache(maxsize=4)
def _sorted_permutation(n: int, key: int) -> Int64:
    return np.argsort(splitmix64(np.arange(n, dtype=np.uint64) ^ np.uint64(key)), kind="stable")


def _feistel(x: UInt64, half_bits: int, key: int) -> UInt64:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for i in range(_FEISTEL_ROUNDS):
        left, right = right, left ^ (splitmix64(right ^ np.uint64(mix(key, i))) & mask)
    return (left << shift) | right


@dataclass(frozen=True)
class Order:
    """The held-out windows of one token stream and the order of the training windows.

    Window i consists of tokens i*T to i*T + T inclusive: T inputs and their T targets. If the training windows are
    `shifted`, all windows of an epoch begin up to T - 1 tokens later, and so reach into the next window. Then training
    leaves out the window in front of each held-out window, and the last one of the stream. It does so even at offset 0:
    every epoch has the same number of windows, and no training target is a target of a held-out window.
    """

    n_windows: int
    n_val: int
    seed: int
    shuffled: bool
    shifted: bool = False

    @property
    def n_train(self) -> int:
        """Windows per epoch."""
        return self.n_windows - len(self._left_out())

    def train_windows(self, samples: Int64) -> Int64:
        """The window of each global sample number, before the shift. Sample numbers count over all epochs."""
        epochs, positions = np.divmod(samples, self.n_train)
        if self.shuffled:
            for epoch in np.unique(epochs):
                inside = epochs == epoch
                positions[inside] = permute(positions[inside], self.n_train, mix(self.seed, int(epoch)))
        # Position p is the p-th window that is not left out. `left_out[j] - j` training windows precede the j-th
        # window left out, so each j with left_out[j] - j <= p increases the window of p by one.
        left_out = self._left_out()
        return positions + np.searchsorted(left_out - np.arange(len(left_out)), positions, side="right")

    def train_starts(self, samples: Int64, seq_len: int) -> Int64:
        """The first token of the window of each global sample number."""
        starts = self.train_windows(samples) * seq_len
        if self.shifted:
            epochs = samples // self.n_train
            for epoch in np.unique(epochs):
                starts[epochs == epoch] += self.offset(int(epoch), seq_len)
        return starts

    def offset(self, epoch: int, seq_len: int) -> int:
        """The tokens by which the windows of an epoch are shifted: each number in [0, T) once in T epochs."""
        cycle, place = divmod(epoch, seq_len)
        [offset] = permute(np.array([place]), seq_len, mix(self.seed, cycle, _OFFSET_KEY))
        return int(offset)

    def val_windows(self) -> Int64:
        """The held-out windows in ascending order: spread over the stream by a hash, the same for every seed."""
        return _val_windows(self.n_windows, self.n_val)

    def _left_out(self) -> Int64:
        """The windows that training does not read, in ascending order."""
        return _left_out(self.n_windows, self.n_val, self.shifted)


@lru_cache(maxsize=4)
def _val_windows(n_windows: int, n_val: int) -> Int64:
    return np.sort(permute(np.arange(n_val, dtype=np.int64), n_windows, _VALIDATION_KEY))


@lru_cache(maxsize=4)
def _left_out(n_windows: int, n_val: int, shifted: bool) -> Int64:
    held_out = _val_windows(n_windows, n_val)
    if not shifted:
        return held_out
    in_front = np.append(held_out, n_windows) - 1
    return np.union1d(held_out, in_front[in_front >= 0])
