"""The bench measures what `train` runs, and what it measures against."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from gptexp import bench
from gptexp.attention import KERNELS
from gptexp.ceilings import LAYERS, attention_ms, copy_bandwidth, gemm_rates, gemm_shapes
from gptexp.config import ModelConfig
from gptexp.errors import ConfigError, UserError
from gptexp.model import GPT
from gptexp.phases import PHASES

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ModelConfig(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=512)
CPU = torch.device("cpu")


def test_the_shapes_are_all_that_a_model_multiplies_with() -> None:
    """Every matrix of the model once, but for the two embeddings: wpe is looked up, wte counts as lm_head."""
    with torch.device("meta"):
        model = GPT(SMALL)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name != "wpe.weight")
    shapes = gemm_shapes(SMALL, tokens=7)
    assert all(rows == 7 for rows, _, _, _ in shapes.values())
    assert sum(inner * columns * count for _, inner, columns, count in shapes.values()) == matrices


def test_rates_are_weighed_as_a_step_weighs_them() -> None:
    rates = gemm_rates(SMALL, 64, CPU, torch.float32)
    assert tuple(rates) == LAYERS
    alone = [rates[layer] for layer in LAYERS[:-1]]
    assert 0 < min(alone) <= rates["model"] <= max(alone)
    flops = {name: rows * inner * columns * n for name, (rows, inner, columns, n) in gemm_shapes(SMALL, 64).items()}
    mean = sum(flops.values()) / sum(flops[name] / rates[name] for name in flops)  # harmonic: the times add up
    assert rates["model"] == pytest.approx(mean, rel=1e-9)


def test_kernels_that_a_cpu_does_not_have_are_none() -> None:
    measured = attention_ms(SMALL, 2, 16, CPU, torch.float32)
    assert tuple(measured) == tuple(KERNELS) == ("cudnn", "flash", "efficient", "math")
    assert (measured["cudnn"], measured["efficient"]) == (None, None)
    assert all(measured[name] for name in ("flash", "math"))
    assert copy_bandwidth(CPU) > 1e8


def test_what_is_counted() -> None:
    """No warm-up; no figure that is null; a reduction that DDP did not measure anew, and tells of again, once."""
    reduced = [900.0, 900.0, 900.0, 7.0, 8.0, 9.0, 120.0, 120.0, 120.0, 120.0, 120.0]
    steps = [{"perf/step_ms": 10.0 + n, "perf/reduce_ms": r, "perf/mfu_palm": None} for n, r in enumerate(reduced)]
    assert bench.counted(steps) == {
        "perf/step_ms": 16.5, "perf/reduce_ms": 8.5, "steps": 8, "step_ms_quartiles": [14.25, 18.75],
    }  # fmt: skip


def test_a_workload_that_does_not_fit_costs_itself_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "perf/step_ms": 5.0, "step_ms_quartiles": [4.0, 6.0], "perf/tokens_per_s": 1e4, "perf/peak_mem_gib": 0.5,
        "perf/reduce_ms": 0.0, **{f"perf/{phase}_ms": 1.0 for phase in PHASES}, "cold_s": 2.0, "warm_s": 1.0,
        "effective": {"device_name": "a CPU", "threads_per_rank": 2},
    }  # fmt: skip
    fits = {"nano"}

    def measured(name: str, *_: object) -> dict[str, object]:
        if name not in fits:
            raise UserError("the run ended early: more memory than there is")
        return row

    monkeypatch.setattr(bench, "_measured", measured)
    monkeypatch.setattr(bench, "apart", lambda call, *args: 4e10)
    monkeypatch.setattr("gptexp.data.prepare.prepare", lambda data: None)
    assert bench.main(["gpt2", "nano", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"nano +10,000", out)
    assert "gpt2: the run ended early: more memory" in err
    saved = json.loads((tmp_path / "out" / "bench.json").read_text())["workloads"]
    assert (saved["nano"]["perf/step_ms"], "more memory" in saved["gpt2"]["error"]) == (5.0, True)
    fits.clear()
    assert bench.main(["nano", "--device", "cpu", "--out", str(tmp_path / "none")]) == 1
    with pytest.raises(ConfigError, match=r"optim.lr"):  # before anything is measured
        bench.main(["nano", "optim.lr=-1", "--device", "cpu", "--out", str(tmp_path / "wrong")])


@pytest.mark.slow
def test_bench_times_a_real_run_and_leaves_no_checkpoint(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    overrides = [o for o in tiny if not o.startswith(("log=", "train.max_steps"))]
    done = gptexp("bench", "nano", *overrides, "--device", "cpu", "--out", "out", env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert result["copy_bytes_per_s"] > 0
    row = result["workloads"]["nano"]
    assert (row["steps"], row["total_batch_size"], row["effective"]["compile"]) == (20, 128, False)
    low, high = row["step_ms_quartiles"]
    assert low <= row["perf/step_ms"] <= high
    assert row["perf/tokens_per_s"] == pytest.approx(1e3 * 128 / row["perf/step_ms"], rel=0.2)
    assert set(PHASES) == {"data", "forward", "backward", "clip", "optimizer"}
    phases = sum(row[f"perf/{phase}_ms"] for phase in PHASES)
    assert 0.5 * row["perf/step_ms"] < phases < 1.1 * row["perf/step_ms"]
    assert row["gemm_share"] == pytest.approx(
        row["flops_per_token_palm"] * row["perf/tokens_per_s"] / row["gemm_flops_per_s"]["model"]
    )
    assert 0 < row["warm_s"] < 60
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    for heading in ("Speed", "Milliseconds of a step", "At best"):
        assert heading in done.stdout


@pytest.mark.slow
def test_what_cannot_be_measured_is_one_line(gptexp: Gptexp, tmp_path: Path) -> None:
    unknown = gptexp("bench", "huge", "--device", "cpu")
    assert (unknown.returncode, "huge: no such workload on cpu; there are nano," in unknown.stderr) == (2, True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    full = gptexp("bench", "nano", "--device", "cpu", "--out", "full")
    assert (full.returncode, "not empty; name a new directory" in full.stderr) == (2, True)
    illegal = gptexp("bench", "nano", "--device", "cpu", "model.n_head=3")
    assert (illegal.returncode, "model.n_embd=32: not divisible by model.n_head=3" in illegal.stderr) == (2, True)
    (tmp_path / "empty.txt").touch()
    empty = gptexp("bench", "nano", "--device", "cpu", "data=text", "data.path=empty.txt")
    assert (empty.returncode, "text: holds no text" in empty.stderr) == (3, True)
    large = ["batch.total_batch_size=1048576", "batch.micro_batch_size=4096", "train.loss=plain", "train.compile=off"]
    failing = gptexp("bench", "nano", "--device", "cpu", *large, env={"PYTHONPATH": str(ROOT)})
    assert failing.returncode == 1
    assert "the run ended early (exit code 2): " in failing.stderr
    assert "a step needs more memory than this cpu has left" in failing.stderr
