"""The data order: a bijection, random by statistical tests, equal in all versions and at every world size."""

import hashlib
import tracemalloc

import numpy as np
import pytest
import scalar_order
from scalar_order import ScalarOrder
from scipy import stats

from gptexp.config.batch import plan_batch
from gptexp.data.order import Order, mix, permute, splitmix64

FEISTEL = 70_001  # just above the size below which hashes are sorted


@pytest.mark.parametrize("n", [1, 2, 3, 5, 1000, 65_535, 65_536, FEISTEL, 2**17])
def test_permutation_is_a_bijection(n: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, mix(1337, 0))), np.arange(n))


def test_splitmix64_is_the_published_function() -> None:
    """First outputs of the reference implementation (Vigna, splitmix64.c) seeded with 1234567."""
    state, out = np.array([1234567], np.uint64), []
    for _ in range(3):
        out.append(int(splitmix64(state)[0]))
        state = state + np.uint64(0x9E3779B97F4A7C15)
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("n", [1000, FEISTEL])
def test_the_permutation_does_not_change_between_versions(n: int) -> None:
    """These digests must not change: a later version that resumes a run must read the same data."""
    digest = hashlib.sha256(permute(np.arange(n), n, mix(1337, 0)).astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == {1000: "af1a1ad3b0b5f181", FEISTEL: "0f09785f63c2bdb1"}[n]


def test_the_feistel_permutation_passes_tests_of_randomness() -> None:
    """Neighbours land far apart, parities are independent, and the 32 × 32 grid of (from, to) fills evenly."""
    table = np.zeros((32, 32))
    correlations, flips = [], []
    for seed in range(20):
        to = permute(np.arange(FEISTEL), FEISTEL, mix(seed))
        correlations.append(np.corrcoef(to[:-1], to[1:])[0, 1])
        flips.append(np.mean(to[:-1] % 2 != to[1:] % 2))
        np.add.at(table, (np.arange(FEISTEL) * 32 // FEISTEL, to * 32 // FEISTEL), 1)
    assert abs(np.mean(correlations)) < 4 / np.sqrt(20 * FEISTEL)
    assert abs(np.mean(flips) - 0.5) < 4 * 0.5 / np.sqrt(20 * FEISTEL)
    # Rows and columns have fixed sums, so 31 × 31 cells are free.
    chi2 = ((table - table.mean()) ** 2 / table.mean()).sum()
    assert 0.001 < stats.chi2.sf(chi2, 31 * 31) < 0.999


def test_small_permutations_are_uniform() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(12_000):
        key = tuple(permute(np.arange(4), 4, mix(seed)).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 0.001


@pytest.mark.parametrize(("n", "n_val"), [(100, 0), (100, 7), (100, 99), (FEISTEL, 512)])
@pytest.mark.parametrize("shuffled", [True, False])
def test_an_epoch_reads_each_training_window_once_and_no_held_out_one(n: int, n_val: int, shuffled: bool) -> None:
    order = Order(n, n_val, seed=3, shuffled=shuffled)
    for epoch in range(2):
        samples = np.arange(epoch * order.n_train, (epoch + 1) * order.n_train)
        windows = order.train_windows(samples)
        assert np.array_equal(np.sort(np.concatenate([windows, order.val_windows()])), np.arange(n))
        if not shuffled:
            assert np.array_equal(windows, np.sort(windows))
    assert len(order.val_windows()) == n_val


def test_epochs_and_seeds_differ_and_validation_does_not_depend_on_the_seed() -> None:
    a, b = Order(1000, 50, 1, True), Order(1000, 50, 2, True)
    first, second = a.train_windows(np.arange(950)), a.train_windows(np.arange(950, 1900))
    assert np.mean(first == second) < 0.05
    assert np.mean(first == b.train_windows(np.arange(950))) < 0.05
    assert np.array_equal(a.val_windows(), b.val_windows())


def test_validation_is_spread_over_the_whole_corpus() -> None:
    held_out = Order(100_000, 1000, 0, True).val_windows()
    assert stats.kstest(held_out / 100_000, "uniform").pvalue > 0.001


def test_a_batch_may_cross_the_end_of_an_epoch() -> None:
    order = Order(10, 3, seed=5, shuffled=True)
    whole = order.train_windows(np.arange(21))
    assert np.array_equal(order.train_windows(np.arange(5, 9)), whole[5:9])
    assert sorted(whole[:7]) == sorted(whole[7:14]) == sorted(whole[14:])


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_reads_the_same_windows_at_every_micro_batch_and_world_size(
    micro_batch_size: int, world_size: int
) -> None:
    """Rank r takes micro-batches [r·A, (r+1)·A) of the step; concatenated over ranks that is the plain order."""
    order, sequences = Order(100, 10, 7, True), 32
    plan = plan_batch(sequences * 16, micro_batch_size, 16, world_size)
    step = 5
    starts = [
        step * plan.sequences + (rank * plan.grad_accum_steps + micro) * micro_batch_size
        for rank in range(world_size)
        for micro in range(plan.grad_accum_steps)
    ]
    read = np.concatenate([order.train_windows(np.arange(s, s + micro_batch_size)) for s in starts])
    assert np.array_equal(read, order.train_windows(np.arange(step * sequences, (step + 1) * sequences)))


# (windows, held-out windows, T): none, few and many are held out; one run of windows, and runs of one window.
STREAMS = [(1, 0, 4), (2, 0, 1), (9, 0, 4), (40, 3, 5), (40, 20, 5), (60, 6, 7), (30, 29, 3), (25, 1, 16)]


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(("n", "n_val", "t"), STREAMS)
def test_shifted_windows_never_train_on_a_target_that_is_held_out(n: int, n_val: int, t: int, shuffled: bool) -> None:
    """By brute force over all targets of three cycles of offsets. Each epoch has the same number of windows."""
    order = Order(n, n_val, seed=3, shuffled=shuffled, shifted=True)
    held_out = {window * t + 1 + i for window in order.val_windows().tolist() for i in range(t)}
    assert np.array_equal(order.val_windows(), Order(n, n_val, seed=8, shuffled=shuffled).val_windows())
    open_windows = {*range(n)} - {*order.val_windows().tolist()}
    runs = sum(window + 1 not in open_windows for window in open_windows)
    assert order.n_train == len(open_windows) - runs
    if not order.n_train:
        return
    seen: set[int] = set()
    for epoch in range(3 * t):
        starts = order.train_starts(np.arange(epoch * order.n_train, (epoch + 1) * order.n_train), t)
        assert {int(start) % t for start in starts} == {order.offset(epoch, t)}
        targets = [int(start) + 1 + i for start in starts for i in range(t)]
        assert len(targets) == len(set(targets))  # each at most once in an epoch
        assert min(targets) >= 1
        assert max(targets) <= n * t
        assert not held_out & set(targets)
        assert shuffled or targets == sorted(targets)
        seen |= set(targets)
    # In a cycle every target of two or more adjacent training windows is read, but for the last of them.
    adjacent = {w for w in open_windows if {w - 1, w + 1} & open_windows}
    last = {(window + 1) * t for window in adjacent if window + 1 not in open_windows}
    assert seen == {window * t + 1 + i for window in adjacent for i in range(t)} - last


def test_each_offset_comes_once_in_a_cycle_in_an_order_of_its_own() -> None:
    order = Order(100, 0, seed=3, shuffled=True, shifted=True)
    cycles = [[order.offset(cycle * 64 + i, 64) for i in range(64)] for cycle in range(3)]
    assert all(sorted(cycle) == [*range(64)] for cycle in cycles)
    assert cycles[0] != cycles[1] != cycles[2] != cycles[0]
    assert [Order(100, 0, 4, True, True).offset(i, 64) for i in range(64)] != cycles[0]


def test_offsets_do_not_change_between_versions() -> None:
    """Like the permutations, which a resumed run reads again."""
    order = Order(1000, 50, seed=1337, shuffled=True, shifted=True)
    assert [order.offset(epoch, 256) for epoch in range(6)] == [18, 112, 52, 96, 208, 50]
    assert order.train_starts(np.array([0, 1, 2000, 10**12]), 256).tolist() == [185106, 161810, 89396, 103404]


@pytest.mark.parametrize("seed", [0, 1337, 2**63 - 1])
@pytest.mark.parametrize(("shuffled", "shifted"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize(("n", "n_val"), [(FEISTEL, 512), (4**9, 100), (4**9 + 40, 0), (1000, 50)])
def test_the_order_is_that_of_scalar_arithmetic(n: int, n_val: int, seed: int, shuffled: bool, shifted: bool) -> None:
    """At ends of epochs, in between, and after two cycles of offsets."""
    order, reference = Order(n, n_val, seed, shuffled, shifted), ScalarOrder(n, n_val, seed, shuffled, shifted)
    assert order.n_train == len(reference.windows)
    epochs = np.array([1, 2, 3, 128, 10**6])
    ends = (epochs[:, None] * order.n_train + np.arange(-20, 20)).ravel()
    drawn = np.random.default_rng(0).integers(0, 3 * order.n_train, 200)
    samples = np.concatenate([np.arange(40), ends, drawn])
    assert order.train_starts(samples, 64).tolist() == [reference.start(sample, 64) for sample in samples.tolist()]


@pytest.mark.parametrize("values", [(), (0,), (2**64 - 1,), (1337, 0), (0, 1337), (2**63 - 1, 10**12, 5)])
def test_a_key_is_that_of_scalar_arithmetic(values: tuple[int, ...]) -> None:
    assert mix(*values) == scalar_order.mix(*values)


def test_without_a_shift_the_windows_are_those_of_the_fixed_grid() -> None:
    order, samples = Order(100, 10, 7, True), np.arange(300)
    assert np.array_equal(order.train_starts(samples, 16), order.train_windows(samples) * 16)


def test_the_order_of_a_large_stream_needs_no_memory_for_its_windows() -> None:
    """A stream of 10^13 tokens. A sample in any epoch is found without the ones before it."""
    order = Order(10**10, 1000, seed=1, shuffled=True, shifted=True)
    tracemalloc.start()
    starts = order.train_starts(np.array([0, 5 * 10**9, 10**15]), 1024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6
    assert ((starts >= 0) & (starts < 1024 * 10**10)).all()
