"""The trial that decides dtype, compilation and loss on a CPU: what it tries, its times, and how they are kept."""

import json
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import events

from gptexp.config.schema import Config, ModelConfig
from gptexp.config.vocabulary import with_vocab_size
from gptexp.distributed.ranks import Rank
from gptexp.machine import cpu
from gptexp.machine import measured as kept
from gptexp.machine.device import has_native_bfloat16
from gptexp.machine.effective import Effective, load_effective, save_effective
from gptexp.machine.measured import MARGIN, Measured, Times, compared, measure_once, recall
from gptexp.machine.resolve import resolve
from gptexp.model.gpt import GPT
from gptexp.process.errors import UserError
from gptexp.process.signals import StopRequest
from gptexp.run import timing
from gptexp.run.timing import ROUNDS, SHARE, resolve_with_trial, to_try, trial

Start = Callable[..., "subprocess.Popen[str]"]

CPU, TWO_RANKS = torch.device("cpu"), Rank(0, 2, 0, 2)
N_VOCAB = 257


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a CPU with bfloat16, no compiler, and no time for starting a process unless a test changes that."""
    monkeypatch.setattr(timing, "has_native_bfloat16", lambda device: True)
    monkeypatch.setattr(timing, "missing_compiler", lambda device: "the C++ compiler is not installed")
    monkeypatch.setattr(timing, "START_S", 0.0)


@pytest.fixture
def long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A small model, and a run that is just long enough to compare dtypes and losses; float32 is that of the rule."""
    monkeypatch.setattr(cpu, "has_amx", lambda: True)
    cfg = Config()
    cfg.model = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8)
    cfg.data.tokenizer, cfg.data.cache_dir = "bytes", str(tmp_path / "cache")
    cfg.batch.total_batch_size, cfg.batch.micro_batch_size = 16, 2
    cfg.train.max_steps = round(4 * ROUNDS / SHARE)
    return cfg


def tried(cfg: Config) -> list[str]:
    return list(to_try(cfg, CPU, resolve(cfg, CPU, Rank()))[0])


def settled(cfg: Config, rank: Rank = TWO_RANKS) -> Effective:
    """`resolve_with_trial` with a trial in this process."""

    def measure(values: timing.Tried, rounds: int) -> Measured:
        return Measured(timing.measure(cfg, CPU, None, N_VOCAB, rounds, values))

    return resolve_with_trial(cfg, CPU, rank, None, N_VOCAB, measure)


def times(effective: Effective) -> Times:
    assert effective.measured is not None
    return effective.measured


# --- what is compared ------------------------------------------------------------------------------------------------


def test_the_micro_batches_of_a_trial_are_at_most_their_share_of_the_run(long_run: Config) -> None:
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
    long_run.train.max_steps = 10**7
    values, rounds = to_try(long_run, CPU, resolve(long_run, CPU, Rank()))
    assert (rounds, sum(map(len, values.values()))) == (timing.MOST_ROUNDS, 6)


@pytest.mark.parametrize(
    ("key", "value"),
    [("reduction", "tree"), ("deterministic", True), ("compile", "on"), ("dtype", "float32"), ("loss", "plain"),
     ("attention", "math")],
)  # fmt: skip
def test_what_is_asked_for_or_must_not_depend_on_times_is_not_compared(
    long_run: Config, key: str, value: object
) -> None:
    setattr(long_run.train, key, value)
    long_run.train.max_steps = 10**6
    keys = ("dtype", "loss", "attention")
    assert tried(long_run) == ([other for other in keys if other != key] if key in keys else [])


def test_attention_is_not_compared_with_dropout_for_which_a_cpu_has_one_kernel(long_run: Config) -> None:
    long_run.train.max_steps, long_run.model.dropout = 10**6, 0.2
    assert tried(long_run) == ["dtype", "loss"]
    assert times(settled(long_run)).keys() == {"dtype", "loss"}


def test_a_saved_choice_is_not_compared_again(long_run: Config) -> None:
    earlier = resolve(long_run, CPU, Rank())
    assert to_try(long_run, CPU, resolve(long_run, CPU, Rank(), earlier)) == ({}, 0)


def test_a_plain_loss_with_many_logits_is_not_tried(long_run: Config) -> None:
    long_run.model.vocab_size = 2**25  # for which the rule is chunked, so nothing is left to compare
    assert "loss" not in tried(long_run)


@pytest.mark.parametrize(
    ("planned_s", "values"),
    [
        (3_999.0, None),
        (4_001.0, {"loss": ["plain", "chunked"]}),
        (24_001.0, {"loss": ["plain", "chunked", "fused"]}),
        (74_001.0, {"compile": ["off", "on"], "loss": ["plain", "chunked"]}),
        (94_001.0, {"compile": ["off", "on"], "loss": ["plain", "chunked", "fused"]}),
        (
            114_001.0,
            {
                "compile": ["off", "on"],
                "loss": ["plain", "chunked", "fused"],
                "attention": ["flash", "math", "blocked"],
            },
        ),
    ],
)
def test_the_process_and_its_compilations_are_together_at_most_their_share(
    long_run: Config, monkeypatch: pytest.MonkeyPatch, planned_s: float, values: dict[str, list[str]] | None
) -> None:
    assert (SHARE, timing.COMPILE_PART_S, timing.COMPILE_S) == (1 / 2000, 10.0, 35.0)
    monkeypatch.setattr(timing, "START_S", 2.0)
    monkeypatch.setattr(timing, "missing_compiler", lambda device: None)
    monkeypatch.setattr(timing, "eager_s", lambda cfg, rank: planned_s)
    long_run.train.max_steps = 10**6
    always = {"dtype": ["float32", "bfloat16"], "attention": ["flash", "math"]}
    found, _ = to_try(long_run, CPU, resolve(long_run, CPU, Rank()))
    assert found == ({} if values is None else {**always, **values})
    long_run.train.max_minutes = 60.0
    assert tried(long_run) == []


# --- what decides ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ([9.0] * 5, "bfloat16"),
        ([9.6] * 5, "float32"),  # less than the margin
        ([12.0] * 5, "float32"),
        ([5.0, 5.0, 5.0, 11.0, 11.0], "float32"),  # faster in three rounds of five only
        ([5.0, 5.0, 5.0, 5.0, 90.0], "bfloat16"),
    ],
)
def test_a_value_must_be_faster_than_that_of_the_rule_by_a_margin_in_most_rounds(
    other: list[float], chosen: str
) -> None:
    assert MARGIN == 1.05
    comparison = compared("float32", {"float32": [10.0] * 5, "bfloat16": other})
    assert (comparison["rule"], comparison["chosen"]) == ("float32", chosen)
    value, reason = Measured({"dtype": comparison}).deciding("dtype", lambda: ("float32", "a rule"))()
    assert (value, f"bfloat16 {sorted(other)[2]:.3g} ms" in reason) == (chosen, True)
    assert Measured({"dtype": comparison}).deciding("loss", lambda: ("plain", "a rule"))() == ("plain", "a rule")


def test_rounds_are_compared_in_pairs_so_that_a_slow_machine_slows_both() -> None:
    comparison = compared("off", {"off": [10.0, 100.0, 20.0], "on": [8.0, 80.0, 16.0]})
    assert comparison["chosen"] == "on"
    assert Measured({"compile": comparison}).deciding("compile", lambda: (False, ""))()[0] is True


def test_what_was_compared_without_compiling_decides_nothing_for_a_compiled_model(long_run: Config) -> None:
    found = {"loss": compared("plain", {"plain": [2.0] * 3, "chunked": [1.0] * 3}),
             "attention": compared("flash", {"flash": [2.0] * 3, "math": [1.0] * 3})}  # fmt: skip
    for compiles, expected in (("off", ("chunked", "math")), ("on", ("plain", "math"))):
        long_run.train.compile = compiles
        effective = resolve(long_run, CPU, Rank(), measured=Measured(found))
        assert (effective.loss.value, effective.attention.value) == expected
        assert ("measured" in effective.attention.reason) == (compiles == "off")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[Effective]]:
    """Replace a micro-batch by a sleep: 2 ms if `key` has `value`, else 0.5 ms. Returns the variants that have run."""

    def with_slow(key: str, value: str) -> list[Effective]:
        seen: list[Effective] = []

        def micro_batch(model: GPT, effective: Effective, *_: torch.Tensor) -> None:
            seen.append(effective)
            time.sleep(2e-3 if effective.choices[key].value == value else 0.5e-3)

        monkeypatch.setattr(timing, "_micro_batch", micro_batch)
        monkeypatch.setattr(timing, "ENOUGH_S", math.inf)  # on a busy machine too, all rounds are made
        return seen

    return with_slow


@pytest.mark.parametrize(("slower", "faster"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_faster_dtype_is_chosen_and_saved(
    long_run: Config, slow: Callable[[str, str], list[Effective]], tmp_path: Path, slower: str, faster: str
) -> None:
    slow("dtype", slower)
    effective = settled(long_run)
    assert (effective.dtype.value, effective.dtype.source) == (faster, "decided")
    ms = times(effective)["dtype"]["ms"]
    assert ms[slower] > 1.5 > ms[faster] > 0.4
    save_effective(tmp_path, effective)
    assert load_effective(tmp_path) == effective
    resumed = resolve(long_run, CPU, Rank(), load_effective(tmp_path))
    assert resumed.measured == effective.measured


def test_later_values_are_compared_with_the_values_found_before(
    long_run: Config, slow: Callable[[str, str], list[Effective]]
) -> None:
    seen = slow("dtype", "float32")
    settled(long_run)
    of_dtype, of_loss = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert [e.dtype.value for e in of_dtype] == ["float32", "bfloat16"] * ROUNDS  # in turns
    assert {(e.dtype.value, e.loss.value) for e in of_loss} == {("bfloat16", "plain"), ("bfloat16", "chunked")}
    assert not any(e.compile.value for e in seen)


def test_the_first_trial_decides_for_every_later_run_and_world_size(
    long_run: Config, slow: Callable[[str, str], list[Effective]]
) -> None:
    slow("dtype", "float32")
    first = settled(long_run)
    seen = slow("dtype", "bfloat16")  # other times, as on a machine that is busy now
    for rank in (Rank(), TWO_RANKS):
        later = settled(long_run, rank)
        assert (later.dtype, later.loss, later.measured) == (first.dtype, first.loss, first.measured)
    assert resolve_with_trial(long_run, CPU, Rank(), None, N_VOCAB, None).dtype == first.dtype
    assert not seen
    other = replace(long_run, model=replace(long_run.model, n_embd=16))
    assert settled(other).dtype.value == "float32"  # another shape is measured again


def test_a_plan_measures_nothing_and_says_what_is_open(
    long_run: Config, slow: Callable[[str, str], list[Effective]]
) -> None:
    seen = slow("dtype", "float32")
    effective = resolve_with_trial(long_run, CPU, Rank(), None, N_VOCAB, None)
    assert (seen, effective.measured, effective.dtype.value) == ([], None, resolve(long_run, CPU, Rank()).dtype.value)
    assert effective.dtype.reason.endswith("; unless the run finds bfloat16 faster in a trial")


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
    settled(long_run)
    assert len(seen) == 4 * timing.LEAST_ROUNDS


# --- what is kept ----------------------------------------------------------------------------------------------------

SHAPE = {"model": "a shape"}
TIMES = Measured({"dtype": compared("float32", {"float32": [1.0], "bfloat16": [2.0]})})


def test_processes_that_start_at_once_measure_once(long_run: Config) -> None:
    calls, found = [], []

    def measure() -> Measured:
        calls.append(1)
        time.sleep(0.2)
        return TIMES

    threads = [threading.Thread(target=lambda: found.append(measure_once(long_run, SHAPE, measure))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(calls), found) == (1, [TIMES] * 3)


def test_the_key_tells_apart_what_changes_the_times(long_run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    known = with_vocab_size(long_run, 320)

    def key(cfg: Config = known, sequences: int = 2, compiles: str = "off") -> str:
        return json.dumps(kept.shape_of(cfg, sequences, {"loss": ["plain", "chunked"]}, {"compile": compiles}))

    keys = [key(), key(sequences=4), key(compiles="on"), key(with_vocab_size(long_run, 384))]
    keys.append(key(replace(known, train=replace(known.train, dtype="float32"))))
    monkeypatch.setattr(kept, "cores_per_rank", lambda rank: 64)
    keys.append(key())
    monkeypatch.setattr(kept, "fingerprint", lambda: "another CPU")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    other_length = replace(known, train=replace(known.train, max_steps=10**9))
    assert key(other_length) == key()


OTHER = '{"shape": {"model": "another"}, "times": {}}'
NO_TIMES, NO_VALUE = '{"shape": {"model": "a shape"}}', '{"shape": {"model": "a shape"}, "times": {"dtype": {}}}'


@pytest.mark.parametrize("content", ["", "{", "[]", OTHER, NO_TIMES, NO_VALUE])
def test_a_damaged_file_is_measured_again(long_run: Config, content: str) -> None:
    measure_once(long_run, SHAPE, lambda: TIMES)
    assert recall(long_run, SHAPE) == TIMES
    kept._path(long_run, SHAPE).write_text(content)
    assert recall(long_run, SHAPE) is None
    assert measure_once(long_run, SHAPE, lambda: TIMES) == TIMES
    assert recall(long_run, SHAPE) == TIMES


def test_what_cannot_be_kept_is_not_measured_so_that_the_same_command_chooses_alike(
    long_run: Config, tmp_path: Path
) -> None:
    (tmp_path / "cache").touch()  # a file where the folder should be
    assert measure_once(long_run, SHAPE, lambda: pytest.fail("measured")) == kept.NOTHING


def test_times_in_a_cache_that_cannot_be_written_are_used(long_run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_once(long_run, SHAPE, lambda: TIMES)
    monkeypatch.setattr(kept, "lock", lambda path: pytest.fail("locked"))
    assert measure_once(long_run, SHAPE, lambda: pytest.fail("measured")) == TIMES


def test_a_trial_that_was_interrupted_is_made_again(long_run: Config) -> None:
    assert measure_once(long_run, SHAPE, lambda: None) == kept.NOTHING
    assert measure_once(long_run, SHAPE, lambda: TIMES) == TIMES


# --- the process of a trial ------------------------------------------------------------------------------------------


def test_a_trial_that_fails_leaves_the_rules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], long_run: Config
) -> None:
    def fails(*_: object) -> str:
        raise UserError("train.*=auto: the trial was killed by SIGKILL")

    monkeypatch.setattr(timing, "ask", fails)
    effective = resolve_with_trial(
        long_run, CPU, Rank(), None, N_VOCAB, partial(trial, tmp_path, tmp_path, 257, StopRequest())
    )
    assert "the trial was killed by SIGKILL; the rules choose dtype, loss" in capsys.readouterr().err
    assert effective == replace(
        resolve(long_run, CPU, Rank(), n_vocab=N_VOCAB), micro_batch_size=effective.micro_batch_size
    )
    monkeypatch.setattr(timing, "ask", lambda *_: pytest.fail("tried again"))
    resolve_with_trial(long_run, CPU, Rank(), None, N_VOCAB, partial(trial, tmp_path, tmp_path, 257, StopRequest()))


def test_real_micro_batches_are_timed(long_run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both dtypes and losses run with their own kernels."""
    monkeypatch.setattr(timing, "ENOUGH_S", math.inf)
    with torch.profiler.profile() as profile:
        effective = settled(long_run)
    names = [event.name for event in profile.events()]
    assert names.count("_Chunked") == ROUNDS
    assert names.count("aten::cross_entropy_loss") == 3 * ROUNDS
    assert times(effective).keys() == {"dtype", "loss"}
    assert all(ms > 0 for comparison in times(effective).values() for ms in comparison["ms"].values())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")
def test_compiled_micro_batches_are_timed(long_run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "missing_compiler", lambda device: None)
    monkeypatch.setattr(timing, "eager_s", lambda cfg, rank: 1e6)
    long_run.train.max_steps = 10**6
    effective = settled(long_run)
    assert times(effective)["compile"]["chosen"] == ("on" if effective.compile.value else "off")
    assert times(effective)["loss"]["ms"].keys() == {"plain", "chunked", "fused"}


@pytest.mark.slow
def test_a_long_run_makes_a_trial_and_later_ones_use_it(start: Start, tiny: list[str], tmp_path: Path) -> None:
    """Its length is 10^10 tokens, of which it trains a few steps. The second run has two ranks."""
    overrides = [o for o in tiny if not o.startswith(("train.dtype", "train.max_steps"))]
    overrides += ["train.max_tokens=10_000_000_000", "train.eval_every=0", "train.save_every=0"]
    found: list[dict[str, Any]] = []
    for out, more in (("one", []), ("two", ["world=ddp2"])):
        run = start("train", *overrides, *more, f"hydra.run.dir={out}", env={**os.environ, "CXX": "no-such-compiler"})
        while not (tmp_path / out / "metrics.jsonl").exists() or not events(tmp_path / out, "step"):
            assert run.poll() is None, run.stderr and run.stderr.read()
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 143
        found.append(json.loads((tmp_path / out / "effective.json").read_text()))
    keys = {"loss", "attention"} | ({"dtype"} if has_native_bfloat16(CPU) else set())
    assert found[0]["measured"].keys() == keys
    assert found[1]["measured"] == found[0]["measured"]
    assert [found[1][key] for key in keys] == [found[0][key] for key in keys]
