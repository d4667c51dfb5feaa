"""Tensors of windows: the micro-batches of one rank, and the fixed validation batches.

The global sample number s counts sequences since the start of the run. A step of S sequences that starts after s
sequences consumes samples [s, s+S). Rank r of W processes micro-batches [r*M/W, (r+1)*M/W) of the step's M. So the
windows of a step depend neither on the number of ranks nor on the micro-batch size.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from gptexp.config.batch import count_val_windows, count_windows
from gptexp.config.run_plan import PlannedStep
from gptexp.config.schema import Config, DataConfig
from gptexp.data.order import Order, mix
from gptexp.data.prepare import prepare, prepare_texts, tokens_hash
from gptexp.data.split import split, spread
from gptexp.data.stream import TokenStream
from gptexp.data.tokenizer import Tokenizer, bytes_of_ids
from gptexp.process.errors import DataError
from gptexp.process.words import counted

WINDOWS_AT_ONCE = 1024  # validation windows whose bytes are counted at once
WINDOWS_LOOKED_UP = 4096  # training windows whose first tokens are found at once: fewer take longer for each
TOKENS_READ = 4096  # of the micro-batches that are read at once: to wake a thread takes longer than to read 512 tokens


@dataclass
class MicroBatch:
    """Inputs and targets of one forward pass."""

    x: torch.Tensor  # (B, T) int64
    y: torch.Tensor  # (B, T) int64, x shifted by one token
    fingerprint: int  # sum of the windows' hashes modulo 2^64
    dropout_seed: int  # a function of (seed, step, micro-batch of the step), so independent of the rank


@dataclass
class Dataset:
    """The training stream with its order, and the validation windows. Built by `build_dataset`."""

    train: TokenStream
    order: Order
    val: TokenStream
    val_starts: np.ndarray  # the first token of each validation window
    seq_len: int
    hash: str  # hash of all tokens, whatever their path
    directory: Path  # of the training tokens
    n_vocab: int  # number of ids of the tokenizer
    texts: dict[str, "Dataset"] = field(default_factory=dict)  # by their names, with the windows of data.validation

    def check_ids(self, vocab_size: int | str) -> None:
        """Raise `DataError` if an id is outside of the model's vocabulary. With `auto` its size is not known yet."""
        for stream in (self.train, self.val, *(text.val for text in self.texts.values())):
            if isinstance(vocab_size, int) and stream.max_id >= vocab_size:
                raise DataError(
                    f"{stream.directory}: contains id {stream.max_id:,}, outside model.vocab_size={vocab_size:,}; "
                    "use model.vocab_size=auto"
                )

    def rows(self, stream: TokenStream, starts: Iterable[int]) -> np.ndarray:
        """Read the windows that begin at the tokens `starts`: (number of them, T + 1).

        Inputs and targets overlap in T - 1 tokens.
        """
        rows = [stream.read(int(start), self.seq_len + 1) for start in starts]
        return np.reshape(rows, (len(rows), self.seq_len + 1))  # also if there are no rows


def build_dataset(cfg: Config, most_val_windows: int | None = None) -> Dataset:
    """Prepare the tokens of `cfg` if they are missing, and open them. Raises `DataError`."""
    directories, others = prepare(cfg.data), prepare_texts(cfg.data)
    dataset = open_dataset(cfg.data, directories, cfg.seq_len, cfg.train.seed, most_val_windows, others=others)
    dataset.check_ids(cfg.model.vocab_size)
    return dataset


def open_dataset(
    data: DataConfig,
    directories: tuple[Path, Path | None],
    seq_len: int,
    seed: int,
    most_val_windows: int | None = None,
    check_files: bool = True,
    others: Mapping[str, Path] = MappingProxyType({}),
) -> Dataset:
    """Open the prepared tokens in `directories`: those for training and, if there are separate ones, for validation.

    `others` are those of each text of data.validation.

    Reads each manifest once, and the headers of all files if `check_files`. `most_val_windows` limits the held-out
    windows that are returned, and changes no training window. Raises `DataError` for too few tokens.
    """
    train_dir, val_dir = directories

    def opened(directory: Path, most: int | None) -> TokenStream:
        stream = TokenStream(directory, most, check_files)
        if count_windows(len(stream), seq_len) < 1:
            raise DataError(
                f"{directory}: {counted(len(stream), 'token')}, fewer than one window of seq_len+1 = {seq_len + 1}; "
                "give more text or a smaller batch.seq_len"
            )
        return stream

    def starts(stream: TokenStream) -> np.ndarray:
        windows = count_val_windows(data.val_tokens, seq_len)
        return spread(count_windows(len(stream), seq_len), windows, seq_len)[:most_val_windows]

    train = opened(train_dir, data.max_tokens)
    held_out = data if val_dir is None else replace(data, val_tokens=0, val_ratio=None)
    if val_dir is None:
        val, hash = train, tokens_hash(train)
    else:
        # Other projects publish losses on the first tokens of their validation split, so only these are used.
        is_split = data.name == "tokens" and data.val_path is None
        val = opened(val_dir, data.val_tokens + 1 if is_split else None)
        hash = tokens_hash(train, val)
    parts = split(held_out, len(train), seq_len, seed, most_val_windows)
    val_starts = parts.val_starts if val_dir is None else starts(val)
    dataset = Dataset(train, parts.order, val, val_starts, seq_len, hash, train_dir, train.n_vocab)
    for name, directory in others.items():
        try:
            stream = opened(directory, None)
        except DataError as error:
            raise DataError([f"data.validation.{name}: {problem}" for problem in error.problems]) from None
        dataset.texts[name] = replace(dataset, val=stream, val_starts=starts(stream), texts={})
    return dataset


def fingerprint(rows: np.ndarray) -> int:
    """Sum of the 64-bit hashes of the rows, modulo 2^64: independent of their order and of their split over ranks."""
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return sum(int.from_bytes(h, "little") for h in hashes) % 2**64


def micro_batches(
    dataset: Dataset, steps: Iterable[PlannedStep], rank: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of `steps`. While those of a group are used, a thread reads the next group."""
    groups = _groups(_read(dataset, steps, rank, device))
    thread = ThreadPoolExecutor(1, "prefetch")
    following = thread.submit(next, groups, None)
    try:
        while (group := following.result()) is not None:
            following = thread.submit(next, groups, None)
            while group:
                yield group.popleft()  # nothing here keeps it alive
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _groups(batches: Iterable[MicroBatch]) -> Iterator[deque[MicroBatch]]:
    """Yield `batches` in groups of at least `TOKENS_READ` tokens. Those before an error are a group too."""
    group, tokens = deque[MicroBatch](), 0
    try:
        for batch in batches:
            group.append(batch)
            tokens += batch.x.numel()
            if tokens >= TOKENS_READ:
                yield group
                group, tokens = deque(), 0
    except Exception:
        yield group
        raise
    yield group


def _read(dataset: Dataset, steps: Iterable[PlannedStep], rank: int, device: torch.device) -> Iterator[MicroBatch]:
    for step, micro_batch, starts in _windows(dataset, steps, rank):
        rows = dataset.rows(dataset.train, starts)
        seed = mix(dataset.order.seed, step, micro_batch)
        yield MicroBatch(*_to_device(rows, device), fingerprint(rows), seed)


def _windows(dataset: Dataset, steps: Iterable[PlannedStep], rank: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the rank's micro-batches of `steps`: step, micro-batch of the step, the first token of each window."""
    share = _share(steps, rank, dataset.seq_len)
    for first in share:
        block = [first, *islice(share, WINDOWS_LOOKED_UP // len(first[2]))]
        samples = np.fromiter(chain.from_iterable(samples for _, _, samples in block), np.int64)
        starts = iter(dataset.order.train_starts(samples, dataset.seq_len).tolist())
        for step, micro_batch, of_batch in block:
            yield step, micro_batch, list(islice(starts, len(of_batch)))


def _share(steps: Iterable[PlannedStep], rank: int, seq_len: int) -> Iterator[tuple[int, int, range]]:
    """Yield the rank's micro-batches of `steps`: step, micro-batch of the step, sample numbers."""
    for step in steps:
        mine, size = step.batch.grad_accum_steps, step.batch.micro_batch_size
        for micro_batch in range(rank * mine, (rank + 1) * mine):
            first = step.tokens_before // seq_len + micro_batch * size
            yield step.number, micro_batch, range(first, first + size)


def val_batches(
    dataset: Dataset, batch_size: int, rank: int, world_size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's share of the validation windows: inputs and targets (at most `batch_size`, T).

    Every rank has equally many batches. A batch may be empty.
    """
    each, rest = divmod(len(dataset.val_starts), world_size)  # the first `rest` ranks have one more
    first = rank * each + min(rank, rest)
    mine = dataset.val_starts[first : first + each + (rank < rest)]
    for i in range(0, each + (rest > 0), batch_size):
        yield _to_device(dataset.rows(dataset.val, mine[i : i + batch_size]), device)


def val_bytes_per_token(dataset: Dataset, tokenizer: Tokenizer) -> float:
    """Bytes of text that a validation target stands for, on average over all targets. Raises `DataError`."""
    lengths = np.array(bytes_of_ids(tokenizer))
    if dataset.val.max_id >= len(lengths):
        raise DataError(f"{dataset.val.directory}: contains id {dataset.val.max_id:,}, which the tokenizer lacks")
    parts = np.array_split(dataset.val_starts, len(dataset.val_starts) // WINDOWS_AT_ONCE + 1)
    total = sum(int(lengths[dataset.rows(dataset.val, part)[:, 1:]].sum()) for part in parts)
    return total / (len(dataset.val_starts) * dataset.seq_len)


def _to_device(rows: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of `rows` (B, T + 1), each contiguous so that a compiled model's strides do not change."""
    inputs, targets = (torch.from_numpy(part.astype(np.int64, order="C")) for part in (rows[:, :-1], rows[:, 1:]))
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
