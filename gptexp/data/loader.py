"""Windows -> tensors: the micro-batches of one rank, and the fixed validation batches.

Global sample number s counts sequences since the start of the run. Step k of S sequences consumes samples
[k*S, (k+1)*S); its M micro-batches are dealt out in contiguous runs, rank r of W taking micro-batches
[r*M/W, (r+1)*M/W). So the windows of a step depend on neither rank count nor micro-batch size.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gptexp.batch import BatchPlan, count_val_windows, count_windows
from gptexp.config import Config, DataConfig
from gptexp.data.order import Order, mix
from gptexp.data.prepare import prepare, tokens_hash
from gptexp.data.shards import TokenStream
from gptexp.errors import DataError

PREFETCHED = 2  # micro-batches read ahead


@dataclass
class MicroBatch:
    """Inputs and targets of one forward pass, and what was read to make them."""

    x: torch.Tensor  # (B, T) int64
    y: torch.Tensor  # (B, T) int64, x one token later
    fingerprint: int  # sum of the windows' hashes modulo 2^64
    dropout_seed: int  # of (seed, step, micro-batch of the step): the same whatever rank runs it


@dataclass
class Dataset:
    """A training stream with its order, and the validation windows. Built by `build_dataset`."""

    train: TokenStream
    order: Order
    val: TokenStream
    val_windows: np.ndarray
    seq_len: int
    hash: str  # of all tokens, wherever they lie

    def rows(self, stream: TokenStream, windows: np.ndarray) -> np.ndarray:
        """The tokens of `windows`, (len(windows), T + 1) uint16: inputs and targets overlap in all but one."""
        t = self.seq_len
        return np.stack([stream.read(int(w) * t, t + 1) for w in windows])


def build_dataset(cfg: Config) -> Dataset:
    """Prepare (once a node) and open the tokens that `cfg` trains and validates on."""
    return open_dataset(cfg.data, *prepare(cfg.data), cfg.seq_len, cfg.train.seed, cfg.model.vocab_size)


def open_dataset(
    data: DataConfig, train_dir: Path, val_dir: Path | None, seq_len: int, seed: int, vocab_size: int
) -> Dataset:
    """Open prepared tokens; raises `DataError` where they are too few for one window or too large for the model."""
    train = TokenStream(train_dir, data.max_tokens)
    n_windows = count_windows(len(train), seq_len)
    val, val_from = train, n_windows
    if val_dir is not None:
        val = TokenStream(val_dir)
        val_from = count_windows(len(val), seq_len)
    n_val = count_val_windows(data.val_tokens, seq_len)
    for stream, path, windows in ((train, train_dir, n_windows), (val, val_dir or train_dir, val_from)):
        if windows < 1:
            raise DataError(
                f"{path}: {len(stream):,} tokens, fewer than one window of seq_len+1 = {seq_len + 1}; "
                "give more text or a smaller batch.seq_len"
            )
        if stream.max_id >= vocab_size:
            raise DataError(
                f"{path}: holds id {stream.max_id:,}, outside model.vocab_size={vocab_size:,}; "
                "use the vocabulary of its tokenizer"
            )
    if val_dir is None and n_val >= n_windows:
        raise DataError(
            f"data.val_tokens={data.val_tokens:,}: {n_val} windows of {seq_len} tokens leave none of the corpus's "
            f"{n_windows} to train on; use fewer, or more text"
        )
    held_out = 0 if val_dir else n_val
    order = Order(n_windows, held_out, seed, shuffled=data.order == "shuffled")
    from_val = Order(val_from, min(n_val, val_from), seed, shuffled=False)
    return Dataset(train, order, val, from_val.val_windows(), seq_len, tokens_hash(train_dir, val_dir))


def fingerprint(rows: np.ndarray) -> int:
    """Sum of a 64-bit hash of each row of tokens, modulo 2^64: the same whatever the order or the split."""
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return sum(int.from_bytes(h, "little") for h in hashes) % 2**64


def micro_batches(
    dataset: Dataset, plan: BatchPlan, rank: int, first_step: int, steps: int, device: torch.device
) -> Iterator[MicroBatch]:
    """This rank's micro-batches from `first_step` up to `steps`, read ahead by a thread."""

    def read(number: int) -> MicroBatch:
        step, micro_step = divmod(number, plan.grad_accum_steps)
        of_step = rank * plan.grad_accum_steps + micro_step
        first = step * plan.sequences + of_step * plan.micro_batch_size
        samples = np.arange(first, first + plan.micro_batch_size, dtype=np.int64)
        rows = dataset.rows(dataset.train, dataset.order.train_windows(samples))
        return MicroBatch(*_to_device(rows, device), fingerprint(rows), mix(dataset.order.seed, step, of_step))

    numbers = iter(range(first_step * plan.grad_accum_steps, steps * plan.grad_accum_steps))
    ahead: deque[Future[MicroBatch]] = deque()
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        for number in numbers:
            ahead.append(thread.submit(read, number))
            if len(ahead) > PREFETCHED:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def val_batches(
    dataset: Dataset, batch_size: int, rank: int, world_size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of the validation windows in batches of (at most `batch_size`, T); the last may be smaller."""
    mine = np.array_split(dataset.val_windows, world_size)[rank]
    for i in range(0, len(mine), batch_size):
        yield _to_device(dataset.rows(dataset.val, mine[i : i + batch_size]), device)


def _to_device(rows: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of `rows` (B, T + 1), each in memory of its own: a compiled model's strides never change."""
    inputs, targets = (torch.from_numpy(part.astype(np.int64, order="C")) for part in (rows[:, :-1], rows[:, 1:]))
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
