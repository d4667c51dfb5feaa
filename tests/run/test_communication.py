"""`gptexp bench comm`: the all-reduce of real ranks, kept for `gptexp plan`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gptexp import bench
from gptexp.config.compose import compose
from gptexp.machine.network import recall
from gptexp.model.allreduce import fit_ring
from gptexp.process.errors import ConfigError
from gptexp.run import communication

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.e2e
def test_the_all_reduce_of_two_ranks_is_measured_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["world.size=2", "train.device=cpu", f"data.cache_dir={tmp_path}"]
    assert bench.main(["comm", *where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["ranks"], found["nodes"], found["comm"]) == ("gloo", 2, 1, "float32")
    seconds = {int(size): s for size, s in found["seconds"].items()}
    assert list(seconds) == communication.SIZES
    assert (found["latency_s"], found["bytes_per_s"]) == pytest.approx(fit_ring(2, seconds))
    kept = recall(compose(where[1:]).data, "gloo", "float32", 2)
    assert kept is not None
    assert kept.latency_s == found["latency_s"]


@pytest.mark.e2e
def test_the_ranks_of_a_launcher_are_measured_as_they_are(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = [
        *launcher,
        "-m",
        "gptexp.bench",
        "comm",
        "--device",
        "cpu",
        f"data.cache_dir={tmp_path}",
        "world.comm=bfloat16",
    ]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all-reduce of bfloat16, gloo, 2 ranks") == 1  # rank 0 alone prints
    assert "latency" in done.stdout


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["comm"], "one rank sends nothing; give world.size=2 or more"),
        (["comm", "nano", "world.size=2"], "nano: bench comm measures no workload"),
        (["comm", "world.size=2", "--out", "x"], "--out x: bench comm keeps its result in the cache"),
        (["comm", "world.sizes=2"], "unknown key"),
        (["com"], "com: no such workload; use one of .*comm"),
    ],
)
def test_what_has_no_meaning_is_refused(argv: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        bench.main(argv)
