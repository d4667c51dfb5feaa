"""Properties of this machine: free memory, float32 precision, devices, and errors of failed allocations."""

from pathlib import Path

import pytest
import torch

from gptexp.distributed.ranks import Rank
from gptexp.machine.device import free_memory, is_out_of_memory, pick_device, resolve_fused
from gptexp.process.errors import ConfigError

CPU = torch.device("cpu")


def test_free_memory_is_at_most_what_each_enclosing_cgroup_has_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = free_memory(CPU)
    assert free is not None
    assert free > 2**28
    mount, own = tmp_path / "cgroup", tmp_path / "self"
    monkeypatch.setattr("gptexp.machine.device.CGROUP", mount)
    monkeypatch.setattr("gptexp.machine.device.OWN_CGROUP", own)
    own.write_text("1:cpu:/elsewhere\n0::/slurm/job_7/step\n")

    def limit(group: str, most: str, used: int, cached: int) -> None:
        (mount / group).mkdir(parents=True, exist_ok=True)
        (mount / group / "memory.max").write_text(f"{most}\n")
        (mount / group / "memory.current").write_text(f"{used}\n")
        (mount / group / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")

    limit("slurm/job_7/step", "max", 1000, 0)
    assert free_memory(CPU) == pytest.approx(free, rel=0.2)
    limit("slurm/job_7", "5000", 3000, 800)  # the file cache can be reclaimed
    assert free_memory(CPU) == 2800
    limit("slurm", "9000", 7000, 0)
    assert free_memory(CPU) == 2000
    limit("slurm", "6000", 7000, 0)
    assert free_memory(CPU) == 0


def test_a_failed_allocation_of_torch_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("any text"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_an_allocation_that_fails_is_recognised_by_its_message(error: RuntimeError, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.device=cuda: no cuda device is visible"):
        pick_device("cuda", Rank())


@pytest.mark.parametrize(
    ("wanted", "device", "fused"), [("auto", "cpu", True), ("off", "cpu", False), ("auto", "meta", False)]
)
def test_fused_is_on_if_the_device_has_the_kernel(wanted: str, device: str, fused: bool) -> None:
    assert resolve_fused(wanted, torch.device(device)) is fused


def test_a_requested_fused_kernel_that_is_missing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"optim.fused=on: AdamW has no fused kernel for meta"):
        resolve_fused("on", torch.device("meta"))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports one GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
def test_a_task_of_srun_uses_the_only_gpu_that_it_sees() -> None:
    assert pick_device("cuda", Rank(1, 2, 1, 2, by_srun=True)) == torch.device("cuda", 0)


@pytest.mark.usefixtures("one_gpu")
def test_a_second_rank_of_a_node_with_one_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="local rank 1 has no GPU, because this node has 1 GPU;"):
        pick_device("cuda", Rank(1, 2, 1, 2, by_srun=False))
