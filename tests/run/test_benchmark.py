"""`gptexp bench`: the figures of a run, its tables, bench.json, and refused arguments."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from gptexp import bench
from gptexp.process.errors import ConfigError, UserError
from gptexp.run import benchmark
from gptexp.training.phases import PHASES

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


def test_figures_are_medians_without_the_warm_up() -> None:
    """Figures that are null are left out. DDP repeats its last measurement of a reduction; each counts once."""
    reduced = [900.0, 900.0, 900.0, 7.0, 8.0, 9.0, 120.0, 120.0, 120.0, 120.0, 120.0]
    steps = [{"perf/step_ms": 10.0 + n, "perf/reduce_ms": r, "perf/mfu_palm": None} for n, r in enumerate(reduced)]
    assert benchmark.counted(steps) == {
        "perf/step_ms": 16.5, "perf/reduce_ms": 8.5, "steps": 8, "step_ms_quartiles": [14.25, 18.75],
    }  # fmt: skip


ROW = {
    "perf/step_ms": 5.0, "step_ms_quartiles": [4.0, 6.0], "perf/tokens_per_s": 1e4, "perf/peak_mem_gib": 0.5,
    "perf/reduce_ms": 0.0, **dict.fromkeys(PHASES, 1.0), "cold_s": 2.0, "warm_s": 1.0,
    "effective": {"device_name": "a CPU", "threads_per_rank": 2},
}  # fmt: skip


@pytest.fixture
def only_nano_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the runs of `bench` by known results."""

    def measured(name: str, *_: object) -> dict[str, object]:
        if name != "nano":
            raise UserError("the run ended early: more memory than there is")
        return ROW

    monkeypatch.setattr(benchmark, "_measured", measured)
    monkeypatch.setattr(benchmark, "apart", lambda call, *args: 4e10)
    monkeypatch.setattr(benchmark, "prepare", lambda data: None)


@pytest.mark.usefixtures("only_nano_fits")
def test_a_failing_workload_keeps_the_results_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["gpt2", "nano", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"nano +10,000", out)
    assert "gpt2: the run ended early: more memory" in err
    saved = json.loads((tmp_path / "out" / "bench.json").read_text())["workloads"]
    assert (saved["nano"]["perf/step_ms"], "more memory" in saved["gpt2"]["error"]) == (5.0, True)


@pytest.mark.usefixtures("only_nano_fits")
def test_bench_fails_if_every_workload_fails(tmp_path: Path) -> None:
    assert bench.main(["gpt2", "--device", "cpu", "--out", str(tmp_path / "none")]) == 1


def test_wrong_overrides_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim.lr"):
        bench.main(["nano", "optim.lr=-1", "--device", "cpu", "--out", str(tmp_path / "wrong")])
    assert not (tmp_path / "wrong").exists()


@pytest.mark.slow
def test_a_real_run_is_measured_and_leaves_no_checkpoint(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    overrides = [o for o in tiny if not o.startswith(("log=", "train.max_steps"))]
    done = gptexp("bench", "nano", *overrides, "--device", "cpu", "--out", "out", env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert result["copy_bytes_per_s"] > 0
    row = result["workloads"]["nano"]
    assert row["steps"] >= 20  # the run logs further ones until it is killed
    assert (row["total_batch_size"], row["effective"]["compile"]) == (128, False)
    low, high = row["step_ms_quartiles"]
    assert low <= row["perf/step_ms"] <= high
    assert row["perf/tokens_per_s"] == pytest.approx(1e3 * 128 / row["perf/step_ms"], rel=0.2)
    phases = sum(row[phase] for phase in PHASES)
    assert 0.5 * row["perf/step_ms"] < phases < 1.1 * row["perf/step_ms"]
    assert row["gemm_share"] == pytest.approx(
        row["flops_per_token_palm"] * row["perf/tokens_per_s"] / row["gemm_flops_per_s"]["model"]
    )
    assert 0 < row["warm_s"] < 60
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    for heading in ("Speed", "Milliseconds of a step", "Highest rates"):
        assert heading in done.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["huge"], 2, "huge: no such workload"),
        (["nano", "--out", "full"], 2, "not an empty directory; give a new one"),
        (["nano", "model.n_head=3"], 2, "model.n_embd=32: not divisible by model.n_head=3"),
        (["nano", "data=text", "data.path=empty.txt"], 3, "empty.txt: contains no text"),
    ],
)
def test_an_invalid_workload_or_option_is_refused(
    gptexp: Gptexp, tmp_path: Path, argv: list[str], code: int, line: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty.txt").touch()
    refused = gptexp("bench", *argv, "--device", "cpu")
    assert (refused.returncode, line in refused.stderr) == (code, True), refused.stderr


@pytest.mark.e2e
def test_a_workload_of_another_device_is_refused_with_the_list_of_workloads(gptexp: Gptexp) -> None:
    refused = gptexp("bench", "gpt2_xl", "--device", "cpu")
    assert refused.returncode == 2
    assert "gpt2_xl: no such workload on cpu; workloads: nano," in refused.stderr


@pytest.mark.slow
def test_bench_repeats_the_out_of_memory_message_of_the_run(gptexp: Gptexp) -> None:
    large = ["batch.total_batch_size=1048576", "batch.micro_batch_size=4096", "train.loss=plain", "train.compile=off"]
    failing = gptexp("bench", "nano", "--device", "cpu", *large, env={"PYTHONPATH": str(ROOT)})
    assert failing.returncode == 1
    assert "the run ended early (exit code 2): " in failing.stderr
    assert "a step needs more memory than this cpu has free" in failing.stderr
