"""How each `auto` is resolved: from the config, then from an earlier decision, then from this machine."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptexp.config.batch import legal_micro_batches
from gptexp.config.schema import Config
from gptexp.distributed.ranks import AT_ONCE, Rank
from gptexp.machine import resolve as module
from gptexp.machine.device import Device
from gptexp.machine.effective import Choice, Effective, apply, load_effective, save_effective
from gptexp.machine.resolve import estimate, resolve
from gptexp.model.gpus import UNKNOWN_GPU
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir

CPU, MPS, GPU = torch.device("cpu"), torch.device("mps"), UNKNOWN_GPU


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of the C++ compiler, which the machine may lack; nothing is compiled here."""
    monkeypatch.setenv("CXX", sys.executable)


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a CPU that emulates bfloat16 and has no faster float32 kernel, on every machine."""
    monkeypatch.setattr(module, "has_native_bfloat16", lambda device: device.type != "cpu")
    monkeypatch.setattr(module.cpu, "has_fast_onednn_float32", lambda: False)


def values(effective: Effective) -> dict[str, Any]:
    return {key: choice.value for key, choice in effective.choices.items()}


def sources(effective: Effective) -> set[str]:
    return {choice.source for choice in effective.choices.values()}


# --- decisions of this machine ---------------------------------------------------------------------------------------


ON_A_CPU = {"dtype": "float32", "compile": False, "loss": "chunked", "fused": True, "attention": "flash"}
ON_A_GPU = {"dtype": "bfloat16", "matmul_precision": "high", "fused": True, "compile": True, "loss": "plain"}


@pytest.mark.parametrize(("device", "expected"), [(CPU, ON_A_CPU), (GPU, ON_A_GPU), (MPS, {"compile": False})])
def test_the_automatic_choices_on_a_device(
    device: Device, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "missing_compiler", lambda device: None)
    cfg = Config()
    cfg.train.max_tokens = 10**4  # on a GPU, a run of any length is compiled
    effective = resolve(cfg, device, Rank())
    assert expected.items() <= values(effective).items()
    assert all(choice.reason for choice in effective.choices.values())


def test_a_gpu_uses_the_plain_loss_without_compilation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing_compiler", lambda device: "Triton is not installed")
    effective = resolve(Config(), GPU, Rank())
    assert effective.compile == Choice(False, "decided", "Triton is not installed")
    assert effective.loss.value == "plain"


@pytest.mark.parametrize(
    ("fast", "error", "chosen"), [(True, 4e-7, "medium"), (True, 3e-3, "highest"), (False, 4e-7, "highest")]
)
def test_medium_precision_is_chosen_if_it_is_accurate_and_faster(
    monkeypatch: pytest.MonkeyPatch, fast: bool, error: float, chosen: str
) -> None:
    monkeypatch.setattr(module.cpu, "has_fast_onednn_float32", lambda: fast)
    monkeypatch.setattr(module.cpu, "onednn_float32_error", lambda: error)
    assert resolve(Config(), CPU, Rank()).matmul_precision.value == chosen


@pytest.fixture
def cpu_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_native_bfloat16", lambda device: True)
    monkeypatch.setattr(module.cpu, "has_fast_bfloat16", lambda: True)


@pytest.mark.usefixtures("cpu_with_bfloat16")
@pytest.mark.parametrize(
    ("amx", "width", "seq_len", "vocabulary", "dtype"),
    [
        (True, 768, 1024, 50304, "bfloat16"),
        (True, 128, 64, 50304, "bfloat16"),
        (True, 128, 64, 320, "float32"),
        (True, 192, 64, 320, "bfloat16"),
        (True, 128, 256, 320, "bfloat16"),
        (False, 128, 64, 320, "bfloat16"),
    ],
)
def test_with_amx_a_small_model_with_few_ids_trains_in_float32(
    amx: bool, width: int, seq_len: int, vocabulary: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.cpu, "has_amx", lambda: amx)
    cfg = Config()
    cfg.model = replace(cfg.model, n_embd=width, block_size=seq_len, vocab_size=vocabulary)
    assert resolve(cfg, CPU, Rank()).dtype.value == dtype
    assert resolve(cfg, GPU, Rank()).dtype.value == "bfloat16"


@pytest.mark.usefixtures("cpu_with_bfloat16")
def test_bfloat16_is_not_chosen_where_its_products_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.cpu, "has_fast_bfloat16", lambda: False)
    choice = resolve(Config(), CPU, Rank()).dtype
    assert (choice.value, "faster in float32" in choice.reason) == ("float32", True)


@pytest.mark.parametrize(("vocabulary", "loss"), [(320, "plain"), (1024, "plain"), (1088, "chunked")])
def test_a_small_vocabulary_has_whole_logits(vocabulary: int, loss: str) -> None:
    cfg = Config()
    cfg.model = replace(cfg.model, vocab_size=vocabulary)
    assert resolve(cfg, CPU, Rank()).loss.value == loss


# --- values set in the config ----------------------------------------------------------------------------------------


def asking_for_everything() -> Config:
    cfg = Config()
    cfg.train.dtype, cfg.train.compile, cfg.train.loss, cfg.optim.fused = "bfloat16", "on", "plain", "off"
    cfg.train.matmul_precision, cfg.train.attention, cfg.batch.micro_batch_size = "high", "math", 4
    cfg.world.threads_per_rank, cfg.model.vocab_size = 3, 50432
    return cfg


def test_values_set_in_the_config_are_never_changed() -> None:
    """Neither this machine nor an earlier decision changes them."""
    effective = resolve(asking_for_everything(), CPU, Rank(), resolve(Config(), CPU, Rank()))
    assert values(effective) == {
        "dtype": "bfloat16", "compile": True, "loss": "plain", "fused": False, "threads_per_rank": 3,
        "matmul_precision": "high", "attention": "math", "micro_batch_size": 4,
        "vocab_size": 50432,
    }  # fmt: skip
    assert sources(effective) == {"asked"}


def test_values_set_in_the_config_of_another_cell_are_ignored() -> None:
    asked = Config()
    asked.train.dtype, asked.world.threads_per_rank = "bfloat16", 3
    earlier = resolve(asked, CPU, Rank())
    assert values(resolve(Config(), CPU, Rank(), earlier)) == values(resolve(Config(), CPU, Rank()))


# --- earlier decisions ---------------------------------------------------------------------------------------------


def decided(**choices: Any) -> Effective:
    """An earlier decision of this machine, with other values for some keys."""
    plain = resolve(Config(), CPU, Rank())
    return replace(plain, **{key: Choice(value, "decided", "") for key, value in choices.items()})


def test_an_earlier_decision_is_kept_at_every_later_start() -> None:
    kept = {"loss": "plain", "threads_per_rank": 17, "attention": "math"}
    earlier = decided(**kept)
    for _ in range(3):
        earlier = resolve(Config(), CPU, Rank(), earlier)
        assert {key: (choice.value, choice.source) for key, choice in earlier.choices.items() if key in kept} == {
            key: (value, "saved") for key, value in kept.items()
        }


def test_threads_are_decided_again_for_another_number_of_ranks_per_node() -> None:
    two = resolve(Config(), CPU, Rank(0, 2, 0, 2), decided(loss="plain", threads_per_rank=17))
    assert (two.loss.value, two.threads_per_rank.value != 17) == ("plain", True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_threads_do_not_depend_on_the_runs_that_share_the_machine_later(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the first start, also for another number of ranks per node, which it has not decided."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    found = {}
    for first, later in ((1, 1), (1, 4), (4, 4), (4, 1), (4, 16)):
        monkeypatch.setenv(AT_ONCE, str(first))
        earlier = resolve(Config(), CPU, Rank())
        monkeypatch.setenv(AT_ONCE, str(later))
        effective = resolve(Config(), CPU, Rank(0, ranks, 0, ranks), earlier)
        found[first, later] = (effective.threads_per_rank.value, effective.runs_at_once)
    assert found == {(first, later): (16 // (first * ranks), first) for first, later in found}


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda"},
        {"compile": Choice(True, "asked", "asked for")},  # in the config of another cell
        {"dtype": Choice("float64", "asked", "asked for")},
    ],
)
def test_a_decision_is_ignored_if_a_value_that_it_depends_on_has_changed(other: dict[str, Any]) -> None:
    found = resolve(Config(), CPU, Rank(), replace(decided(loss="plain", attention="math"), **other))
    assert (found.loss.value, found.attention.value) == ("chunked", "flash")


# --- effective.json --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [Config(), asking_for_everything()])
def test_effective_json_is_loaded_as_it_was_saved(tmp_path: Path, cfg: Config) -> None:
    effective = replace(resolve(cfg, CPU, Rank()), peak_flops_per_rank=1e12)
    save_effective(tmp_path, effective)
    assert load_effective(tmp_path) == effective
    saved = json.loads((tmp_path / run_dir.EFFECTIVE).read_text())
    assert saved["dtype"] == effective.dtype.value  # flat values, for other tools


def test_loading_before_the_first_start_returns_none(tmp_path: Path) -> None:
    assert load_effective(tmp_path) is None


@pytest.mark.parametrize("words", ["", "asked for", "another text", "asked"])
def test_the_text_of_a_saved_reason_has_no_effect(tmp_path: Path, words: str) -> None:
    """`resolve` returns the same values and sources for every wording of the reasons in an earlier file."""
    earlier_cfg = Config()
    earlier_cfg.train.dtype = "bfloat16"  # set in the earlier config only
    earlier_cfg.train.loss = "plain"
    earlier = replace(resolve(earlier_cfg, CPU, Rank()), threads_per_rank=Choice(17, "decided", "the node's cores"))
    found = []
    for reworded in (False, True):
        written = earlier.to_dict()
        if reworded:
            written["reasons"] = dict.fromkeys(written["reasons"], words)
        run_dir.write_json(tmp_path / run_dir.EFFECTIVE, written)
        effective = resolve(Config(), CPU, Rank(), load_effective(tmp_path))
        found.append({key: (choice.value, choice.source) for key, choice in effective.choices.items()})
    assert found[0] == found[1]
    assert found[0]["threads_per_rank"] == (17, "saved")
    assert found[0]["dtype"] == ("float32", "decided")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"dtype": 3}, "dtype=3: wrong type"),
        ({"compile": "on"}, "compile="),
        ({"peak_flops_per_rank": -1.0}, "must be finite and above 0"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"reasons": {}}, "not the saved choices of a run"),
        ({"sources": dict.fromkeys(resolve(Config(), CPU, Rank()).choices, "guessed")}, "sources.vocab_size="),
    ],
)
def test_a_damaged_file_is_refused_with_a_fix(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    written = {**resolve(Config(), CPU, Rank()).to_dict(), **change}
    (tmp_path / run_dir.EFFECTIVE).write_text(json.dumps(written))
    with pytest.raises(
        ConfigError, match=r"effective.json: not the saved choices of a run .*remove it, or start a new run"
    ) as e:
        load_effective(tmp_path)
    assert line in str(e.value)


# --- compiling -------------------------------------------------------------------------------------------------------


def test_a_run_is_compiled_only_if_that_saves_time() -> None:
    cfg = Config()
    cfg.train.dtype = "bfloat16"
    choices = []
    for tokens in (10**4, 10**10):
        cfg.train.max_tokens = tokens
        choices.append(resolve(cfg, CPU, Rank()))
    assert [e.compile.value for e in choices] == [False, True]
    assert [e.loss.value for e in choices] == ["chunked", "fused"]
    # A later change of the length does not change the decision.
    for tokens, earlier in ((10**10, choices[0]), (10**4, choices[1])):
        cfg.train.max_tokens = tokens
        assert resolve(cfg, CPU, Rank(), earlier).compile.value == earlier.compile.value


def test_a_long_float32_run_is_compiled_only_with_fast_matrix_products() -> None:
    cfg = Config()
    cfg.train.dtype, cfg.train.max_tokens = "float32", 10**10
    cfg.train.matmul_precision = "highest"
    assert not resolve(cfg, CPU, Rank()).compile.value
    cfg.train.matmul_precision = "medium"
    assert resolve(cfg, CPU, Rank()).compile.value
    assert resolve(cfg, CPU, Rank()).loss.value == "chunked"


@pytest.fixture
def too_short_to_compile() -> Config:
    """A run with a quarter of the tokens of the shortest run, in powers of two, that is compiled."""
    cfg = Config()
    cfg.batch.total_batch_size = 1024
    cfg.train.dtype, cfg.train.max_tokens = "bfloat16", 10**4
    while not resolve(cfg, CPU, Rank()).compile.value:
        cfg.train.max_tokens *= 2
    cfg.train.max_tokens //= 4
    assert not resolve(cfg, CPU, Rank()).compile.value
    return cfg


def test_the_cells_of_a_sweep_share_the_cost_of_compiling(too_short_to_compile: Config) -> None:
    cfg = too_short_to_compile
    cfg.sweep.cells = 20
    effective = resolve(cfg, CPU, Rank())
    assert effective.compile.value
    assert "20 cells" in effective.compile.reason


def test_a_short_cell_of_a_large_sweep_is_not_compiled(too_short_to_compile: Config) -> None:
    cfg = too_short_to_compile
    cfg.train.max_tokens, cfg.sweep.cells = cfg.train.max_tokens // 4, 10**6
    assert not resolve(cfg, CPU, Rank()).compile.value


def test_a_missing_compiler_is_named_in_the_reason(
    too_short_to_compile: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_short_to_compile.sweep.cells = 20
    monkeypatch.setenv("CXX", "no-such-compiler")
    choice = resolve(too_short_to_compile, CPU, Rank()).compile
    assert (choice.value, choice.source, "no-such-compiler" in choice.reason) == (False, "decided", True)


# --- the micro-batch -------------------------------------------------------------------------------------------------


def automatic(sequences: int) -> Config:
    cfg = Config()
    cfg.batch.micro_batch_size, cfg.batch.total_batch_size = "auto", sequences * cfg.seq_len
    return cfg


def with_memory(monkeypatch: pytest.MonkeyPatch, memory: int | None) -> None:
    monkeypatch.setattr(module, "free_memory", lambda device: memory)


@pytest.mark.parametrize("sequences", [7, 96])
def test_an_automatic_micro_batch_is_the_largest_divisor_that_fits(
    monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    """The chosen size needs less than 95% of the memory. Each larger size needs more than 75%."""
    cfg = automatic(sequences)
    divisors = [d for d in range(1, sequences + 1) if sequences % d == 0]
    assert sorted(legal_micro_batches(cfg.batch.total_batch_size, cfg.seq_len, 1)) == divisors
    chosen = []
    for gib in (1, 4, 16, 64, 1024):
        with_memory(monkeypatch, gib * 2**30)
        effective = resolve(cfg, CPU, Rank())

        def share(size: int, effective: Effective = effective, gib: int = gib) -> float:
            """The share of the memory that a step with micro-batches of `size` needs by estimate."""
            tried = replace(effective, micro_batch_size=Choice(size, "decided", ""))
            return estimate(cfg, tried, 1).peak / (gib * 2**30)

        size = effective.micro_batch_size.value
        chosen.append(size)
        assert size in divisors
        assert size == 1 or share(size) < 0.95
        assert all(share(larger) > 0.75 for larger in divisors if larger > size)
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (1, sequences)


def test_an_automatic_micro_batch_is_1_if_the_free_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, None)
    assert resolve(automatic(96), CPU, Rank()).micro_batch_size.value == 1


@pytest.fixture
def decided_with_much_memory(monkeypatch: pytest.MonkeyPatch) -> Effective:
    """A decision for all 96 sequences at once. Afterwards, only 1 GiB is free."""
    with_memory(monkeypatch, 2**40)
    earlier = resolve(automatic(96), CPU, Rank())
    assert earlier.micro_batch_size.value == 96
    with_memory(monkeypatch, 2**30)
    return earlier


def test_a_decided_micro_batch_is_kept_for_a_run_with_the_same_memory_needs(
    decided_with_much_memory: Effective,
) -> None:
    cfg = automatic(96)
    cfg.optim.lr, cfg.train.seed = 1e-2, 7
    assert resolve(cfg, CPU, Rank(), decided_with_much_memory).micro_batch_size.value == 96


def test_a_micro_batch_is_decided_again_for_another_number_of_ranks(decided_with_much_memory: Effective) -> None:
    assert resolve(automatic(96), CPU, Rank(0, 2, 0, 2), decided_with_much_memory).micro_batch_size.value == 1


def test_a_micro_batch_is_decided_again_for_another_use_of_memory(decided_with_much_memory: Effective) -> None:
    cfg = automatic(96)
    cfg.train.activation_checkpointing = True
    assert resolve(cfg, CPU, Rank(), decided_with_much_memory).micro_batch_size.value < 96


def test_a_micro_batch_is_decided_again_for_another_batch(
    decided_with_much_memory: Effective, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory(monkeypatch, 2**50)
    assert resolve(automatic(7), CPU, Rank(), decided_with_much_memory).micro_batch_size.value == 7


def test_one_micro_step_accumulates_no_gradients() -> None:
    cfg = Config()
    cfg.batch.micro_batch_size, cfg.batch.total_batch_size = 4, 4 * cfg.seq_len
    one = estimate(cfg, resolve(cfg, CPU, Rank()), 1)
    cfg.batch.total_batch_size *= 2
    assert one.gradients + one.weights == estimate(cfg, resolve(cfg, CPU, Rank()), 1).gradients


def test_ranks_share_the_memory_of_a_cpu_and_not_that_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(device: Device, gib: int, ranks: int) -> int:
        with_memory(monkeypatch, gib * 2**30)
        return resolve(automatic(256), device, Rank(0, 4, 0, ranks)).micro_batch_size.value

    assert found(CPU, 32, 4) == found(CPU, 8, 1) < found(CPU, 32, 1)
    assert found(GPU, 32, 4) == found(GPU, 32, 1) > found(GPU, 8, 1)


def test_applying_sets_threads_and_precision_of_the_process() -> None:
    threads, cfg = torch.get_num_threads(), Config()
    cfg.train.matmul_precision, cfg.world.threads_per_rank = "high", 1
    try:
        apply(resolve(cfg, CPU, Rank()))
        assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == ("high", 1)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(threads)
