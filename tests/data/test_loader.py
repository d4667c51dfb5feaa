"""From shards to micro-batches: equal windows at every micro-batch and world size, and held-out validation."""

import hashlib
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from scalar_order import ScalarOrder, mix
from texts import ids_of, text_config

from gptexp.config.batch import BatchPlan, plan_batch
from gptexp.config.run_plan import PlannedStep
from gptexp.data import loader
from gptexp.data.loader import fingerprint, micro_batches, open_dataset, val_batches
from gptexp.data.prepare import prepare
from gptexp.data.shards import ShardWriter
from gptexp.process.errors import DataError


def dataset_of(corpus: Path, seq_len: int = 16, **kwargs: object) -> object:
    data = text_config(corpus, **{"val_tokens": 64, **kwargs})
    return open_dataset(data, prepare(data), seq_len, 1337)


def planned(plan: BatchPlan, steps: int, first: int = 0) -> list[PlannedStep]:
    return [PlannedStep(number, number * plan.total_batch_size, plan) for number in range(first, steps)]


def read_all(dataset: object, micro_batch_size: int, world_size: int, steps: int) -> tuple[torch.Tensor, list[int]]:
    """Inputs of `steps` steps in global order, and the fingerprint after each step, over all ranks."""
    plan = plan_batch(8 * 16, micro_batch_size, 16, world_size)
    ranks = [micro_batches(dataset, planned(plan, steps), r, torch.device("cpu")) for r in range(world_size)]  # type: ignore[arg-type]
    inputs, total, prints = [], 0, []
    for _ in range(steps):
        for rank in ranks:
            for _ in range(plan.grad_accum_steps):
                batch = next(rank)
                assert torch.equal(batch.x[:, 1:], batch.y[:, :-1])
                inputs.append(batch.x)
                total = (total + batch.fingerprint) % 2**64
        prints.append(total)
    return torch.cat(inputs), prints


@pytest.mark.parametrize("data", [{}, {"offset": "per_epoch", "max_tokens": 400}])
def test_a_step_has_the_same_tokens_at_every_micro_batch_and_world_size(corpus: Path, data: dict[str, object]) -> None:
    """Also over five epochs, whose windows are shifted."""
    dataset = dataset_of(corpus, **data)
    reference, prints = read_all(dataset, 8, 1, 6)
    for micro_batch_size, world_size in ((1, 1), (2, 2), (4, 2), (1, 4), (2, 4)):
        inputs, others = read_all(dataset, micro_batch_size, world_size, 6)
        assert torch.equal(inputs, reference)
        assert others == prints
    assert len(set(prints)) == 6


@pytest.mark.parametrize("offset", ["fixed", "per_epoch"])
def test_a_large_stream_is_read_as_scalar_arithmetic_says(tmp_path: Path, offset: str) -> None:
    """Three ranks around the end of an epoch, each with more windows than are found at once, in three files."""
    t, n = 2, 70_001  # of so many windows the order is not a stored permutation
    ids = np.random.default_rng(0).integers(0, 50257, n * t + 1).astype("<u2")
    with ShardWriter(tmp_path / "s", 50257, {}, tokens_per_shard=50_000) as writer:
        writer.append(ids)
    data = text_config(tmp_path, val_tokens=64 * t, offset=offset)
    dataset = open_dataset(data, (tmp_path / "s", None), t, 1337)
    order = ScalarOrder(n, 64, 1337, shifted=offset == "per_epoch")
    plan = plan_batch(8 * t * 2 * 3, 8, t, 3)  # 48 sequences
    first = len(order.windows) // 48 - 140
    for rank in range(3):
        batches = micro_batches(dataset, planned(plan, first + 280, first), rank, torch.device("cpu"))
        for number, batch in enumerate(batches):
            step, micro_batch = first + number // 2, 2 * rank + number % 2
            starts = [order.start(48 * step + 8 * micro_batch + i, t) for i in range(8)]
            rows = [ids[start : start + t + 1] for start in starts]
            assert batch.x.tolist() == [row[:-1].tolist() for row in rows]
            assert batch.y.tolist() == [row[1:].tolist() for row in rows]
            hashes = [int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little") for row in rows]
            assert batch.fingerprint == sum(hashes) % 2**64
            assert batch.dropout_seed == mix(1337, step, micro_batch)
        assert number == 559


@pytest.mark.parametrize("failing", [0, 1, 13, 300])
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_an_error_comes_in_the_place_of_the_micro_batch_that_cannot_be_read(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, failing: int, micro_batch_size: int
) -> None:
    dataset = dataset_of(corpus)
    steps = planned(plan_batch(8 * 16, micro_batch_size, 16, 1), 310)
    all_of_it = [b.x for b in micro_batches(dataset, steps, 0, torch.device("cpu"))]  # type: ignore[arg-type]
    plain, reads = dataset.rows, iter(range(len(all_of_it)))  # type: ignore[attr-defined]

    def rows(*args: object) -> np.ndarray:
        if next(reads) == failing:
            raise OSError("the disk is gone")
        return plain(*args)

    monkeypatch.setattr(dataset, "rows", rows)
    before = []
    with pytest.raises(OSError, match="the disk is gone"):
        before.extend(b.x for b in micro_batches(dataset, steps, 0, torch.device("cpu")))  # type: ignore[arg-type]
    assert torch.equal(torch.cat([*before, *all_of_it[failing:]]), torch.cat(all_of_it))


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_a_reader_that_is_closed_early_ends_its_thread(corpus: Path) -> None:
    batches = micro_batches(dataset_of(corpus), planned(plan_batch(8 * 16, 8, 16, 1), 10**6), 0, torch.device("cpu"))  # type: ignore[arg-type]
    next(batches)
    [thread] = prefetching()
    batches.close()  # type: ignore[attr-defined]
    thread.join(60)
    assert not prefetching()


@pytest.mark.parametrize(("seq_len", "read"), [(1024, 21), (16, 64)])
def test_used_micro_batches_are_freed_and_few_are_read_in_advance(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, seq_len: int, read: int
) -> None:
    """When 20 have been taken: of 8,192 tokens each one more has been read; of 128 tokens two groups of 32."""
    dataset, inputs = dataset_of(corpus, seq_len, val_tokens=seq_len), list[weakref.ref[torch.Tensor]]()
    plain = loader._to_device

    def to_device(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = plain(*args)  # type: ignore[arg-type]
        inputs.append(weakref.ref(x))
        return x, y

    monkeypatch.setattr(loader, "_to_device", to_device)
    batches = micro_batches(dataset, planned(plan_batch(8 * seq_len, 8, seq_len, 1), 200), 0, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(20):
        used = next(batches)
    deadline = time.monotonic() + 60
    while len(inputs) < read and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(inputs) == read
    alive = [number for number, x in enumerate(inputs) if x() is not None]
    assert alive == [*range(19, read)]
    assert inputs[19]() is used.x


def test_the_fingerprint_depends_on_the_windows_and_not_on_their_order() -> None:
    rows = np.arange(40, dtype=np.uint16).reshape(4, 10)
    assert fingerprint(rows) == fingerprint(rows[[2, 0, 3, 1]])
    assert fingerprint(rows) == (fingerprint(rows[:1]) + fingerprint(rows[1:])) % 2**64
    changed = rows.copy()
    changed[3, 9] += 1
    assert fingerprint(rows) != fingerprint(changed)


@pytest.mark.parametrize("offset", ["fixed", "per_epoch"])
def test_reading_can_start_at_any_step(corpus: Path, offset: str) -> None:
    dataset = dataset_of(corpus, offset=offset, max_tokens=400)
    plan = plan_batch(8 * 16, 4, 16, 1)
    all_of_it = [b.x for b in micro_batches(dataset, planned(plan, 5), 0, torch.device("cpu"))]  # type: ignore[arg-type]
    from_third = [b.x for b in micro_batches(dataset, planned(plan, 5, first=3), 0, torch.device("cpu"))]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(all_of_it[6:]), torch.cat(from_third))


def test_shifted_windows_are_text_as_it_stands_and_have_other_fingerprints(corpus: Path) -> None:
    """The inputs of an epoch in sequential order are one stretch of the text, which begins at the offset."""
    fixed, shifted = (
        dataset_of(corpus, order="sequential", val_tokens=0, max_tokens=16 * 17 + 1, offset=offset)
        for offset in ("fixed", "per_epoch")
    )
    ids = ids_of(corpus.read_text())
    (plain, fingerprints), (inputs, others) = read_all(fixed, 8, 1, 4), read_all(shifted, 8, 1, 4)
    offsets = [shifted.order.offset(epoch, 16) for epoch in (0, 1)]  # type: ignore[attr-defined]
    assert plain.flatten().tolist() == ids[: 17 * 16] + ids[: 15 * 16]
    assert inputs.flatten().tolist() == [i for at in offsets for i in ids[at : at + 16 * 16]]
    assert not {*fingerprints} & {*others}


def test_sequential_order_reads_the_text_in_order_and_drops_the_tail(corpus: Path) -> None:
    dataset = dataset_of(corpus, order="sequential", val_tokens=0, max_tokens=16 * 20 + 7)
    inputs, _ = read_all(dataset, 8, 1, 3)
    ids = ids_of(corpus.read_text())
    assert inputs.flatten().tolist() == ids[:320] + ids[:64]  # 20 windows, then from the start


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_windows_do_not_depend_on_batch_or_world(corpus: Path, world_size: int) -> None:
    dataset = dataset_of(corpus, val_tokens=7 * 16)
    for batch_size in (1, 3, 8):
        rows = [
            x
            for rank in range(world_size)
            for x, _ in val_batches(dataset, batch_size, rank, world_size, torch.device("cpu"))  # type: ignore[arg-type]
        ]
        assert len(torch.cat(rows)) == 7
        starts = np.sort(dataset.val_starts).tolist()  # type: ignore[attr-defined]
        ids = ids_of(corpus.read_text())
        assert torch.cat(rows).tolist() == [ids[start : start + 16] for start in starts]


def test_an_offset_that_leaves_no_window_is_an_error(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"data.offset=per_epoch: no window is left for training, .* data.offset=fixed"):
        dataset_of(corpus, val_tokens=16, max_tokens=2 * 16 + 1, offset="per_epoch")


def test_held_out_windows_are_never_trained_on(corpus: Path) -> None:
    dataset = dataset_of(corpus, val_tokens=160)
    order = dataset.order  # type: ignore[attr-defined]
    trained = set(order.train_starts(np.arange(2 * order.n_train), 16).tolist())
    assert not trained & set(dataset.val_starts.tolist())  # type: ignore[attr-defined]
    assert len(trained) + 10 == order.n_windows


def test_val_path_adds_validation_text_and_trains_on_the_whole_corpus(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "val.txt"
    other.write_text("Something else entirely. " * 40)
    dataset = dataset_of(corpus, val_path=[str(other)], val_tokens=48)
    assert dataset.order.n_val == 0  # type: ignore[attr-defined]
    x = torch.cat([x for x, _ in val_batches(dataset, 2, 0, 1, torch.device("cpu"))])  # type: ignore[arg-type]
    ids = ids_of(other.read_text())
    assert len(x) == 3
    assert all(row.tolist() in [ids[w * 16 : w * 16 + 16] for w in range(len(ids) // 16)] for row in x)


def test_a_text_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("a b c")
    with pytest.raises(DataError, match=r"3 tokens, fewer than one window of seq_len\+1 = 17"):
        dataset_of(short)


def test_a_validation_set_larger_than_the_corpus_is_an_error(corpus: Path) -> None:
    with pytest.raises(DataError, match="so none is left for training"):
        dataset_of(corpus, val_tokens=10**6)


def test_an_id_outside_of_the_vocabulary_is_an_error(corpus: Path) -> None:
    data = text_config(corpus)
    with pytest.raises(DataError, match=r"outside model.vocab_size=100"):
        open_dataset(data, prepare(data), 16, 0).check_ids(100)
