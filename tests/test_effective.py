"""What `auto` comes to: asked for wins, an earlier decision holds, else this machine decides."""

from pathlib import Path

import pytest
import torch

from gptexp import effective as module
from gptexp.batch import legal_micro_batches
from gptexp.config import Config
from gptexp.distributed import Rank
from gptexp.effective import ESTIMATED, Effective, apply, estimate, resolve, step_context
from gptexp.errors import ConfigError
from gptexp.machine import free_memory, is_out_of_memory, medium_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that emulates bfloat16 and gains nothing by another float32 kernel, wherever the tests run."""
    monkeypatch.setattr(module, "has_native_bfloat16", lambda device: device.type != "cpu")
    monkeypatch.setattr(module, "medium_precision", lambda: (3e-7, 1.0))


def test_auto_on_a_cpu() -> None:
    effective = resolve(Config(), CPU, Rank())
    assert effective.dtype == "float32"
    assert (effective.compile, effective.loss, effective.fused) == (False, "chunked", True)
    assert effective.attention == "flash"
    assert all(effective.reasons.values())


def test_auto_on_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing_compiler", lambda device: None)
    cfg = Config()
    cfg.train.max_tokens = 10**4
    effective = resolve(cfg, GPU, Rank())
    assert (effective.dtype, effective.matmul_precision, effective.fused) == ("bfloat16", "high", True)
    assert (effective.compile, effective.loss) == (True, "plain")  # however short the run
    cfg.train.compile = "off"
    assert resolve(cfg, GPU, Rank()).loss == "plain"
    cfg.train.compile = "auto"
    assert not resolve(cfg, torch.device("mps"), Rank()).compile
    monkeypatch.setattr(module, "missing_compiler", lambda device: "Triton is not installed")
    effective = resolve(cfg, GPU, Rank())
    assert (effective.compile, effective.reasons["compile"]) == (False, "Triton is not installed")


def test_what_is_asked_for_is_never_changed() -> None:
    cfg = Config()
    cfg.train.dtype, cfg.train.compile, cfg.train.loss, cfg.optim.fused = "bfloat16", "on", "plain", "off"
    cfg.train.matmul_precision, cfg.train.attention, cfg.batch.micro_batch_size = "high", "math", 4
    cfg.world.threads_per_rank = 3
    effective = resolve(cfg, CPU, Rank(), resolve(Config(), CPU, Rank()).to_dict())
    assert (effective.dtype, effective.compile, effective.loss) == ("bfloat16", True, "plain")
    assert (effective.fused, effective.threads_per_rank) == (False, 3)
    assert (effective.matmul_precision, effective.attention, effective.micro_batch_size) == ("high", "math", 4)
    assert set(effective.reasons.values()) == {"asked for"}


def test_an_earlier_decision_holds_on_the_same_device_and_node_layout() -> None:
    earlier = resolve(Config(), CPU, Rank()).to_dict()
    earlier.update(loss="plain", threads_per_rank=17)
    assert resolve(Config(), CPU, Rank(), earlier).loss == "plain"
    assert resolve(Config(), CPU, Rank(), earlier).threads_per_rank == 17
    # Two ranks on the node instead of one: their threads are shared out anew, all else stays.
    two = resolve(Config(), CPU, Rank(0, 2, 0, 2), earlier)
    assert (two.loss, two.threads_per_rank != 17) == ("plain", True)
    assert resolve(Config(), CPU, Rank(), {**earlier, "device": "cuda"}).loss == "chunked"
    # What depends on another decision holds as long as that does.
    asked = dict.fromkeys(earlier["reasons"], "") | {"compile": "asked for", "dtype": "asked for"}
    for other in ({"compile": True}, {"dtype": "float64", "attention": "math"}):
        found = resolve(Config(), CPU, Rank(), {**earlier, **other, "reasons": asked})
        assert (found.loss, found.attention) == ("chunked", "flash")
    assert resolve(Config(), CPU, Rank(), {**earlier, "attention": "math"}).attention == "math"


def test_what_another_cell_was_asked_for_decides_nothing() -> None:
    asked = Config()
    asked.train.dtype, asked.world.threads_per_rank = "bfloat16", 3
    earlier = resolve(asked, CPU, Rank()).to_dict()
    assert resolve(Config(), CPU, Rank(), earlier) == resolve(Config(), CPU, Rank())


def test_it_survives_json() -> None:
    effective = resolve(Config(), CPU, Rank())
    assert Effective(**effective.to_dict()) == effective


def test_a_missing_device_is_one_line() -> None:
    from gptexp.distributed import pick_device

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    with pytest.raises(ConfigError, match=r"train.device=cuda: no cuda device is visible"):
        pick_device("cuda", Rank())


def test_medium_precision_is_taken_only_where_it_is_exact_and_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    for measured, chosen in (((4e-7, 2.1), "medium"), ((3e-3, 4.0), "highest"), ((3e-7, 1.0), "highest")):
        monkeypatch.setattr(module, "medium_precision", lambda measured=measured: measured)
        assert resolve(Config(), CPU, Rank()).matmul_precision == chosen
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert resolve(Config(), CPU, Rank()).matmul_precision == "highest"


def test_the_error_probe_knows_float32_from_bfloat16() -> None:
    error, speed = medium_precision()
    assert (1e-8 < error < 1e-2, speed > 0) == (True, True)
    assert torch.get_float32_matmul_precision() == "highest"
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    exact = a.double() @ b.double()
    rounded = (a.bfloat16().float() @ b.bfloat16().float()).double()
    assert (rounded - exact).norm() / exact.norm() > 100 * module.FLOAT32_ERROR
    assert ((a @ b).double() - exact).norm() / exact.norm() < module.FLOAT32_ERROR / 2


def test_compiling_must_pay_for_itself() -> None:
    cfg = Config()
    cfg.train.dtype = "bfloat16"
    choices = []
    for tokens in (10**4, 10**10):
        cfg.train.max_tokens = tokens
        choices.append(resolve(cfg, CPU, Rank()))
    assert [e.compile for e in choices] == [False, True]
    assert [e.loss for e in choices] == ["chunked", "plain"]
    cfg.train.dtype, cfg.train.matmul_precision = "float32", "highest"
    assert not resolve(cfg, CPU, Rank()).compile
    cfg.train.matmul_precision = "medium"
    assert resolve(cfg, CPU, Rank()).compile
    assert resolve(cfg, CPU, Rank()).loss == "chunked"
    # Once decided, a longer or shorter remainder changes nothing.
    cfg.train.dtype, cfg.train.max_tokens = "bfloat16", 10**4
    assert resolve(cfg, CPU, Rank(), {**choices[1].to_dict(), "reasons": dict.fromkeys(choices[1].reasons, "")}).compile


def test_the_cells_of_a_sweep_share_what_compiling_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Config()
    cfg.batch.total_batch_size = 1024
    cfg.train.dtype, cfg.train.max_tokens = "bfloat16", 10**4
    while not (effective := resolve(cfg, CPU, Rank())).compile:
        cfg.train.max_tokens *= 2
    cfg.train.max_tokens //= 4
    assert not resolve(cfg, CPU, Rank()).compile
    cfg.sweep.cells = 20
    assert resolve(cfg, CPU, Rank()).compile
    assert "of all 20 cells" in resolve(cfg, CPU, Rank()).reasons["compile"]
    cfg.train.max_tokens, cfg.sweep.cells = cfg.train.max_tokens // 4, 10**6
    assert not resolve(cfg, CPU, Rank()).compile  # each would wait longer for the cache than it saves
    monkeypatch.setenv("CXX", "no-such-compiler")
    effective = resolve(cfg, CPU, Rank())
    assert (effective.compile, effective.reasons["compile"][:17]) == (False, "no-such-compiler,")


def test_an_automatic_micro_batch_is_the_largest_that_divides_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Config()
    cfg.batch.micro_batch_size, cfg.batch.total_batch_size = "auto", 96 * cfg.seq_len
    sizes = legal_micro_batches(96 * cfg.seq_len, cfg.seq_len, 1)
    assert sizes == [d for d in range(96, 0, -1) if 96 % d == 0]
    chosen = []
    for gib in (1, 4, 16, 64, 1024):
        monkeypatch.setattr(module, "free_memory", lambda device, gib=gib: gib * 2**30)
        effective = resolve(cfg, CPU, Rank())
        assert effective.reasons["micro_batch_size"] == ESTIMATED
        chosen.append(effective.micro_batch_size)

        def peak(size: int, effective: Effective = effective) -> int:
            return estimate(cfg, module.replace(effective, micro_batch_size=size), 1).peak

        assert chosen[-1] == max([s for s in sizes if peak(s) <= module.USABLE * gib * 2**30], default=1)
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (1, 96)
    # It holds for whoever needs the same memory, however much there is later; for another cell it is found anew.
    monkeypatch.setattr(module, "free_memory", lambda device: 2**30)
    cfg.optim.lr, cfg.train.seed = 1e-2, 7
    assert resolve(cfg, CPU, Rank(), effective.to_dict()).micro_batch_size == 96
    assert resolve(cfg, CPU, Rank(0, 2, 0, 2), effective.to_dict()).micro_batch_size == 1
    cfg.train.activation_checkpointing = True
    assert resolve(cfg, CPU, Rank(), effective.to_dict()).micro_batch_size < 96
    monkeypatch.setattr(module, "free_memory", lambda device: 2**50)
    cfg.batch.total_batch_size = 7 * cfg.seq_len
    assert resolve(cfg, CPU, Rank(), effective.to_dict()).micro_batch_size == 7
    monkeypatch.setattr(module, "free_memory", lambda device: None)
    assert resolve(cfg, CPU, Rank()).micro_batch_size == 1


def test_one_micro_step_accumulates_nothing() -> None:
    cfg = Config()
    cfg.batch.micro_batch_size, cfg.batch.total_batch_size = 4, 4 * cfg.seq_len
    one = estimate(cfg, resolve(cfg, CPU, Rank()), 1)
    cfg.batch.total_batch_size *= 2
    assert one.gradients + one.weights == estimate(cfg, resolve(cfg, CPU, Rank()), 1).gradients


def test_ranks_share_the_memory_of_a_cpu_and_not_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Config()
    cfg.batch.micro_batch_size, cfg.batch.total_batch_size = "auto", 256 * cfg.seq_len

    def found(device: torch.device, gib: int, ranks: int) -> int:
        monkeypatch.setattr(module, "free_memory", lambda device: gib * 2**30)
        return resolve(cfg, device, Rank(0, 4, 0, ranks)).micro_batch_size

    assert found(CPU, 32, 4) == found(CPU, 8, 1) < found(CPU, 32, 1)
    assert found(GPU, 32, 4) == found(GPU, 32, 1) > found(GPU, 8, 1)


def test_free_memory_is_no_more_than_the_container_may_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = free_memory(CPU)
    assert free is not None
    assert free > 2**28
    mount, own = tmp_path / "cgroup", tmp_path / "self"
    monkeypatch.setattr("gptexp.machine.CGROUP", mount)
    monkeypatch.setattr("gptexp.machine.OWN_CGROUP", own)
    own.write_text("1:cpu:/elsewhere\n0::/slurm/job_7/step\n")

    def limit(group: str, most: str, used: int, cached: int) -> None:
        (mount / group).mkdir(parents=True, exist_ok=True)
        (mount / group / "memory.max").write_text(f"{most}\n")
        (mount / group / "memory.current").write_text(f"{used}\n")
        (mount / group / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")

    limit("slurm/job_7/step", "max", 1000, 0)
    assert free_memory(CPU) == pytest.approx(free, rel=0.2)
    limit("slurm/job_7", "5000", 3000, 800)  # what is cached of files makes room
    assert free_memory(CPU) == 2800
    limit("slurm", "9000", 7000, 0)
    assert free_memory(CPU) == 2000
    limit("slurm", "6000", 7000, 0)
    assert free_memory(CPU) == 0


def test_kernels_that_are_asked_for_are_there_or_refused() -> None:
    q = torch.randn(1, 2, 8, 4)
    for name in ("flash", "math"):
        cfg = Config()
        cfg.train.attention = name
        with step_context(resolve(cfg, CPU, Rank())), torch.profiler.profile() as profile:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        used = {e.key for e in profile.key_averages()}
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in used) == (name == "flash")
    cfg.train.attention, cfg.train.dtype = "flash", "float32"
    with pytest.raises(ConfigError, match=r"flash: takes no float32 on cuda; use train.dtype=bfloat16, or efficient"):
        resolve(cfg, GPU, Rank())
    cfg.train.attention = "cudnn"
    with pytest.raises(ConfigError, match=r"train.attention=cudnn: cpu has no such kernel; there are flash, math"):
        resolve(cfg, CPU, Rank())


def test_an_allocation_that_fails_is_known_by_what_it_says() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("of whatever kind"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_applying_sets_the_process_up() -> None:
    threads, cfg = torch.get_num_threads(), Config()
    cfg.train.matmul_precision, cfg.world.threads_per_rank = "high", 1
    try:
        apply(resolve(cfg, CPU, Rank()))
        assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == ("high", 1)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(threads)
