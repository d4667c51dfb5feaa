"""The split of a corpus: its training windows, and those that are held out for validation."""

from dataclasses import dataclass

import numpy as np

from gptexp.config.batch import count_val_windows, count_windows
from gptexp.config.schema import DataConfig
from gptexp.data.order import Int64, Order
from gptexp.process.errors import DataError
from gptexp.process.words import counted


@dataclass(frozen=True)
class Split:
    order: Order  # of the training windows
    val_starts: Int64  # the first token of each held-out window, in ascending order


def split(data: DataConfig, tokens: int, seq_len: int, seed: int, most_val_windows: int | None = None) -> Split:
    """Split a corpus of `tokens` tokens. With data.val_path nothing is held out of it.

    `most_val_windows` limits the held-out windows that are returned, and changes no training window. Raises `DataError`
    if a part that is asked for has no window.
    """
    train_tokens, n_val = tokens, _held_out(data, tokens, seq_len)
    if data.val_split == "tail" and n_val:
        train_tokens = _before_the_tail(data, tokens, seq_len)
        n_val = count_windows(tokens - train_tokens, seq_len)
    if data.val_ratio is not None and data.val_path is None and not n_val:
        raise DataError(
            f"data.val_ratio={data.val_ratio:g}: of {counted(tokens, 'token')} this holds out no window of seq_len+1 = "
            f"{seq_len + 1}; hold out more, or give more text"
        )
    n_windows, among_them = count_windows(train_tokens, seq_len), 0 if data.val_split == "tail" else n_val
    if n_windows <= among_them:
        given = f"val_ratio={data.val_ratio:g}" if data.val_ratio is not None else f"val_tokens={data.val_tokens:,}"
        raise DataError(
            f"data.{given}: for {counted(n_val, 'validation window')}, and the corpus has only "
            f"{count_windows(tokens, seq_len)}, so none is left for training; hold out less, or give more text"
        )
    order = Order(n_windows, among_them, seed, data.order == "shuffled", data.offset == "per_epoch")
    if not order.n_train:
        raise DataError(
            "data.offset=per_epoch: no window is left for training, because each is held out, or reaches into one that "
            "is, or beyond the end of the text; use data.offset=fixed, hold out less, or give more text"
        )
    returned = n_val if most_val_windows is None else min(n_val, most_val_windows)
    if data.val_split == "tail":
        return Split(order, train_tokens + np.arange(returned, dtype=np.int64) * seq_len)
    return Split(order, spread(n_windows, returned, seq_len))


def spread(n_windows: int, n_val: int, seq_len: int) -> Int64:
    """The first tokens of `n_val` windows, spread over a stream by a hash. A larger `n_val` includes these windows."""
    return Order(n_windows, min(n_val, n_windows), seed=0, shuffled=False).val_windows() * seq_len


def _held_out(data: DataConfig, tokens: int, seq_len: int) -> int:
    """The number of held-out windows that the config asks for, whether or not the corpus has them."""
    if data.val_path is not None:
        return 0
    share = data.val_tokens if data.val_ratio is None else data.val_ratio * tokens
    return count_val_windows(share, seq_len)


def _before_the_tail(data: DataConfig, tokens: int, seq_len: int) -> int:
    """The number of tokens in front of the tail. The tail has one token more than it has targets.

    For a ratio the cut is nanoGPT's own, data[:int(n * 0.9)], even if the windows do not fill the tail.
    """
    if data.val_ratio is not None:
        return int((1 - data.val_ratio) * tokens)
    return max(0, tokens - count_val_windows(data.val_tokens, seq_len) * seq_len - 1)
