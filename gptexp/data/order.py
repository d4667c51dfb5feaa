"""Which window of the token stream is read when: a pure function of (seed, epoch, position).

Nothing here knows of ranks, micro-batches or steps, and nothing has a state to save: sample number s is window
`permutation(n, seed, epoch)[s mod n]` of epoch s // n on every machine, for ever. The integers are our own
(splitmix64, Feistel network), since numpy and torch promise their random streams for one version only.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# Below this many items a permutation by sorting hashes is exact and cheap; above it the Feistel network is
# indistinguishable from uniform and needs no memory.
_SORT_BELOW = 65_536
_FEISTEL_ROUNDS = 6
_VALIDATION_KEY = 0x76616C6964617465  # "validate": which windows are held out does not depend on the seed


def splitmix64(x: UInt64) -> UInt64:
    """Steele, Lea and Flood's mixing function (OOPSLA 2014): a bijection of 64-bit integers."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix(*values: int) -> int:
    """One 64-bit key from several integers; the order counts."""
    key = np.zeros(1, np.uint64)
    for value in values:
        key = splitmix64(key ^ np.array([value % 2**64], np.uint64))
    return int(key[0])


def permute(index: Int64, n: int, key: int) -> Int64:
    """Where each of `index` (in [0, n)) lands under the permutation of [0, n) that `key` names."""
    if n < _SORT_BELOW:
        return _sorted_permutation(n, key)[index]
    half_bits = ((n - 1).bit_length() + 1) // 2
    out = _feistel(index.astype(np.uint64), half_bits, key)
    while (outside := out >= n).any():  # cycle walking: at most four times too large, so this ends soon
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
    """The windows of one token stream: which are held out, and in which order the others are read.

    Window i covers tokens [i*T, i*T + T], T inputs and their T targets.
    """

    n_windows: int
    n_val: int
    seed: int
    shuffled: bool

    @property
    def n_train(self) -> int:
        """Windows per epoch."""
        return self.n_windows - self.n_val

    def train_windows(self, samples: Int64) -> Int64:
        """The window of each global sample number, over all epochs."""
        epochs, positions = np.divmod(samples, self.n_train)
        if self.shuffled:
            for epoch in np.unique(epochs):
                inside = epochs == epoch
                positions[inside] = permute(positions[inside], self.n_train, mix(self.seed, int(epoch)))
        # Position p is the p-th window that is not held out. The j-th held-out window stands behind
        # `held_out[j] - j` of the others, so every one with held_out[j] - j <= p moves p up by one.
        held_out = self.val_windows()
        return positions + np.searchsorted(held_out - np.arange(len(held_out)), positions, side="right")

    def val_windows(self) -> Int64:
        """The held-out windows, ascending: spread over the whole stream by hash, the same for every seed."""
        return _val_windows(self.n_windows, self.n_val)


@lru_cache(maxsize=4)
def _val_windows(n_windows: int, n_val: int) -> Int64:
    return np.sort(permute(np.arange(n_val, dtype=np.int64), n_windows, _VALIDATION_KEY))
