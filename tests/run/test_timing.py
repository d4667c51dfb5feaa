"""The trial that decides dtype, compilation and loss on a CPU: what it tries, its times, and how they are kept."""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptexp.config.schema import Config, ModelConfig
from gptexp.config.vocabulary import with_vocab_size
from gptexp.distributed.ranks import Rank
from gptexp.machine import measured as kept
from gptexp.machine.effective import Effective, load_effective, save_effective
from gptexp.machine.measured import MARGIN, Measured, measure_once, recall
from gptexp.machine.resolve import resolve
from gptexp.model.gpt import GPT
from gptexp.run import timing
from gptexp.run.timing import ROUNDS, SHARE, settle, to_try

CPU, TWO_RANKS = torch.device("cpu"), Rank(0, 2, 0, 2)
N_VOCAB = 257


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a CPU with bfloat16, and no compiler unless a test installs one."""
    monkeypatch.setattr(timing, "has_native_bfloat16", lambda device: True)
    monkeypatch.setattr(timing, "missing_compiler", lambda device: "the C++ compiler is not installed")


@pytest.fixture
def long_run(tmp_path: Path) -> Config:
    """A small model, and a run that is just long enough to try dtype and loss."""
    cfg = Config()
    cfg.model = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8)
    cfg.data.tokenizer, cfg.data.cache_dir = "bytes", str(tmp_path / "cache")
    cfg.batch.total_batch_size, cfg.batch.micro_batch_size = 16, 2
    cfg.train.max_steps = round(4 * ROUNDS / SHARE)
    return cfg


def tried(cfg: Config) -> list[str]:
    return list(to_try(cfg, CPU, resolve(cfg, CPU, Rank())))


def test_a_trial_takes_at_most_a_thousandth_of_the_run(long_run: Config) -> None:
    assert tried(long_run) == ["dtype", "loss"]
    assert long_run.train.max_steps is not None
    long_run.train.max_steps -= 1
    assert tried(long_run) == ["dtype"]
    long_run.train.max_steps //= 2
    assert tried(long_run) == []
    long_run.sweep.cells = 2  # a sweep decides once for all of its cells
    assert tried(long_run) == ["dtype"]
    long_run.sweep.cells = 4
    assert tried(long_run) == ["dtype", "loss", "attention"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("reduction", "tree"), ("deterministic", True), ("dtype", "float32"), ("loss", "plain"), ("attention", "math")],
)
def test_what_is_asked_for_or_must_not_depend_on_times_is_not_tried(long_run: Config, key: str, value: object) -> None:
    setattr(long_run.train, key, value)
    long_run.train.max_steps = 10**6
    keys = ("dtype", "loss", "attention")
    assert tried(long_run) == (
        [] if key in ("reduction", "deterministic") else [other for other in keys if other != key]
    )


def test_a_saved_choice_is_not_tried_again(long_run: Config) -> None:
    earlier = resolve(long_run, CPU, Rank())
    assert to_try(long_run, CPU, resolve(long_run, CPU, Rank(), earlier)) == {}


def test_a_plain_loss_with_many_logits_is_not_tried(long_run: Config) -> None:
    long_run.model.vocab_size = 2**25  # for which the rule is chunked, so nothing is left to compare
    assert "loss" not in tried(long_run)


@pytest.mark.parametrize(
    ("planned_s", "values"),
    [
        (9_999.0, {"loss": ["plain", "chunked"]}),
        (10_001.0, {"loss": ["plain", "chunked", "fused"]}),
        (35_001.0, {"compile": ["off", "on"], "loss": ["plain", "chunked", "fused"]}),
    ],
)
def test_what_must_be_compiled_is_tried_if_that_takes_less_than_a_thousandth(
    long_run: Config, monkeypatch: pytest.MonkeyPatch, planned_s: float, values: dict[str, list[str]]
) -> None:
    assert (timing.COMPILE_LOSS_S, timing.COMPILE_S) == (10.0, 35.0)
    monkeypatch.setattr(timing, "missing_compiler", lambda device: None)
    monkeypatch.setattr(timing, "eager_s", lambda cfg, rank: planned_s)
    long_run.train.max_steps = 10**6
    always = {"dtype": ["float32", "bfloat16"], "attention": ["flash", "math"]}
    assert to_try(long_run, CPU, resolve(long_run, CPU, Rank())) == {**always, **values}
    long_run.train.compile = "on"  # then every value needs a graph of its own
    assert "dtype" not in tried(long_run)


@pytest.mark.parametrize(
    ("of_rule", "other", "chosen"), [(10.0, 9.0, "bfloat16"), (10.0, 9.6, "float32"), (10.0, 12.0, "float32")]
)
def test_a_value_must_be_faster_than_that_of_the_rule_by_a_margin(of_rule: float, other: float, chosen: str) -> None:
    assert MARGIN == 1.05
    measured = Measured({"dtype": {"float32": of_rule, "bfloat16": other}})
    value, reason = measured.deciding("dtype", lambda: ("float32", "a rule"))()
    assert (value, f"bfloat16 {other:.3g} ms" in reason) == (chosen, True)
    assert measured.deciding("loss", lambda: ("plain", "a rule"))() == ("plain", "a rule")


def test_compiling_is_a_switch() -> None:
    times = {"off": 2.0, "on": 1.0}
    assert Measured({"compile": times}).deciding("compile", lambda: (False, ""))()[0] is True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[Effective]]:
    """Replace a micro-batch by a sleep: 2 ms if `key` has `value`, else 0.5 ms. Returns the variants that have run."""

    def with_slow(key: str, value: str) -> list[Effective]:
        seen: list[Effective] = []

        def micro_batch(model: GPT, effective: Effective, *_: torch.Tensor) -> None:
            seen.append(effective)
            time.sleep(2e-3 if effective.choices[key].value == value else 0.5e-3)

        monkeypatch.setattr(timing, "_micro_batch", micro_batch)
        return seen

    return with_slow


@pytest.mark.parametrize(("slower", "faster"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_faster_dtype_is_chosen_and_saved(
    long_run: Config, slow: Callable[[str, str], list[Effective]], tmp_path: Path, slower: str, faster: str
) -> None:
    slow("dtype", slower)
    effective = settle(long_run, CPU, Rank(), None, N_VOCAB)
    assert (effective.dtype.value, effective.dtype.source) == (faster, "decided")
    times = effective.measured["dtype"]
    assert times[slower] > 1.5 > times[faster] > 0.4
    save_effective(tmp_path, effective)
    assert load_effective(tmp_path) == effective


def test_later_values_are_tried_with_the_values_found_before(
    long_run: Config, slow: Callable[[str, str], list[Effective]]
) -> None:
    seen = slow("dtype", "float32")
    settle(long_run, CPU, Rank(), None, N_VOCAB)
    of_dtype, of_loss = seen[: 2 * ROUNDS], seen[2 * ROUNDS :]
    assert [e.dtype.value for e in of_dtype] == ["float32", "bfloat16"] * ROUNDS  # in turns
    assert {(e.dtype.value, e.loss.value) for e in of_loss} == {("bfloat16", "plain"), ("bfloat16", "chunked")}
    assert not any(e.compile.value for e in seen)


def test_the_first_trial_decides_for_every_later_run_and_world_size(
    long_run: Config, slow: Callable[[str, str], list[Effective]]
) -> None:
    slow("dtype", "float32")
    first = settle(long_run, CPU, Rank(), None, N_VOCAB)
    seen = slow("dtype", "bfloat16")  # the machine has changed its mind
    for rank in (Rank(), TWO_RANKS):
        later = settle(long_run, CPU, rank, None, N_VOCAB)
        assert (later.dtype, later.loss, later.measured) == (first.dtype, first.loss, first.measured)
    assert settle(long_run, CPU, Rank(), None, N_VOCAB, measures=False).dtype == first.dtype
    assert not seen
    other = replace(long_run, model=replace(long_run.model, n_embd=16))
    assert settle(other, CPU, Rank(), None, N_VOCAB).dtype.value == "float32"  # another shape is measured again


def test_a_plan_measures_nothing(long_run: Config, slow: Callable[[str, str], list[Effective]]) -> None:
    seen = slow("dtype", "float32")
    effective = settle(long_run, CPU, Rank(), None, N_VOCAB, measures=False)
    assert (seen, effective.measured, effective.dtype) == ([], {}, resolve(long_run, CPU, Rank()).dtype)


def test_long_micro_batches_have_fewer_sequences_and_rounds(
    long_run: Config, slow: Callable[[str, str], list[Effective]], monkeypatch: pytest.MonkeyPatch
) -> None:
    long_run.batch.micro_batch_size = 64
    known = with_vocab_size(long_run, 320)
    assert timing.sequences(known) == 64
    known.model = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304)
    assert timing.sequences(known) == 1
    long_run.batch.micro_batch_size = 2
    seen = slow("dtype", "float32")
    monkeypatch.setattr(timing, "ENOUGH_S", 0.0)
    settle(long_run, CPU, Rank(), None, N_VOCAB)
    assert len(seen) == 4 * timing.LEAST_ROUNDS


SHAPE = {"model": "a shape"}


def test_processes_that_start_at_once_measure_once(long_run: Config) -> None:
    calls, found = [], []

    def measure() -> Measured:
        calls.append(1)
        time.sleep(0.2)
        return Measured({"dtype": {"float32": float(len(calls))}})

    threads = [threading.Thread(target=lambda: found.append(measure_once(long_run, SHAPE, measure))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(calls), {str(f.ms) for f in found}) == (1, {"{'dtype': {'float32': 1.0}}"})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"shape": {"model": "another"}, "ms": {}}'])
def test_a_damaged_file_is_measured_again(long_run: Config, content: str) -> None:
    times = Measured({"dtype": {"float32": 1.0}})
    measure_once(long_run, SHAPE, lambda: times)
    assert recall(long_run, SHAPE) == times
    kept._path(long_run, SHAPE).write_text(content)
    assert recall(long_run, SHAPE) is None
    assert measure_once(long_run, SHAPE, lambda: times) == times
    assert recall(long_run, SHAPE) == times


def test_a_cache_that_cannot_be_written_costs_a_trial_and_not_the_run(long_run: Config, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()  # a file where the folder should be
    times = Measured({"dtype": {"float32": 1.0}})
    assert measure_once(long_run, SHAPE, lambda: times) == times


def test_real_micro_batches_are_timed(long_run: Config) -> None:
    """Both dtypes and losses run with their own kernels, and no weights or gradients change between them."""
    with torch.profiler.profile() as profile:
        effective = settle(long_run, CPU, Rank(), None, N_VOCAB)
    names = [event.name for event in profile.events()]
    assert names.count("_Chunked") == ROUNDS
    assert names.count("aten::cross_entropy_loss") == 3 * ROUNDS
    assert effective.measured.keys() == {"dtype", "loss"}
    assert all(ms > 0 for times in effective.measured.values() for ms in times.values())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")
def test_compiled_micro_batches_are_timed(long_run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "missing_compiler", lambda device: None)
    monkeypatch.setattr(timing, "eager_s", lambda cfg, rank: 1e6)
    long_run.train.max_steps = 10**6
    effective = settle(long_run, CPU, Rank(), None, N_VOCAB)
    times = effective.measured["compile"]
    assert effective.compile.value == (times["off"] > MARGIN * times["on"])
    assert ("loss" in effective.measured) == (not effective.compile.value)
