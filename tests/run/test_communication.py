"""`gptexp bench comm`: the all-reduce of real ranks, kept for `gptexp plan`."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import wait_for

from gptexp import bench
from gptexp.config.compose import compose
from gptexp.machine.network import AllReduce, Fitted, keep, recall
from gptexp.process.errors import ConfigError
from gptexp.run import communication
from gptexp.run.communication import fit

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]
Sabotage = Callable[[str, str], dict[str, str]]


@pytest.mark.e2e
def test_the_all_reduce_of_two_ranks_is_measured_and_kept(gptexp: Gptexp, tmp_path: Path) -> None:
    where = ["world.size=2", "train.device=cpu", f"data.cache_dir={tmp_path}"]
    done = gptexp("bench", "comm", *where, "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert (measured["backend"], measured["ranks"], measured["nodes"], measured["comm"]) == ("gloo", 2, 1, "float32")
    seconds = {int(size): s for size, s in measured["inside"]["seconds"].items()}
    assert list(seconds) == communication.SIZES
    assert measured["inside"] == asdict(fit(2, 2, seconds))
    assert measured["between"] is None
    [kept] = recall(compose(where[1:]).data, "gloo", "float32", 2, "")
    assert asdict(kept) == measured


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": "x"},
        {"ranks": 0},
        {"nodes": 0},
        {"nodes": 10**18},
        {"inside": 7},
        {"inside": {"latency_s": "x"}},
        {"comm": None},
    ],
)
def test_a_damaged_measurement_does_not_count(tmp_path: Path, change: dict[str, Any]) -> None:
    data = compose([f"data.cache_dir={tmp_path}"]).data
    found = AllReduce("gloo", "float32", 2, 1, Fitted(1e-5, 1e9, {"1024": 1e-4}), None)
    path = keep(data, found)
    assert recall(data, "gloo", "float32", 2, "") == [found]
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert recall(data, "gloo", "float32", 2, "") == []


@pytest.mark.e2e
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path, start: Start, sabotage: Sabotage) -> None:
    """Which would wait for it until a timeout."""
    code = """
    import os
    if os.environ.get("KILLED_RANK"):
        plain = m._measure_as_rank
        def measure(cfg, as_json, rank, store):
            if rank.rank == int(os.environ["KILLED_RANK"]):
                os.kill(os.getpid(), 9)
            return plain(cfg, as_json, rank, store)
        m._measure_as_rank = measure
    """
    env = sabotage("gptexp.run.communication", code)
    argv = ["bench", "comm", "world.size=3", "train.device=cpu", f"data.cache_dir={tmp_path}"]
    process = start(*argv, env={**env, "KILLED_RANK": "1"})
    _, said = process.communicate(timeout=240)
    assert process.returncode == 1, said
    assert [line for line in said.splitlines() if "rank" in line] == [
        "gptexp: a rank of bench comm failed: process 1 terminated with signal SIGKILL"
    ]
    assert "Traceback" not in said


@pytest.mark.e2e
def test_ranks_end_with_their_parent(tmp_path: Path, start: Start, sabotage: Sabotage) -> None:
    """Also one that waits in a library for a rank that does not come."""
    code = """
    import pathlib, time
    plain = m._measure_as_rank
    def measure(cfg, as_json, rank, store):
        (pathlib.Path(cfg.data.cache_dir) / f"rank{rank.rank}").touch()
        return plain(cfg, as_json, rank, store) if rank.rank == 0 else time.sleep(1000)
    m._measure_as_rank = measure
    """
    env = sabotage("gptexp.run.communication", code)
    process = start("bench", "comm", "world.size=2", "train.device=cpu", f"data.cache_dir={tmp_path}", env=env)
    wait_for(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(2)), process)
    time.sleep(2)  # until rank 0 waits
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []


@pytest.mark.e2e
def test_ranks_of_two_nodes_are_measured_within_and_between_them(tmp_path: Path) -> None:
    """Two agents of torchrun on this machine in place of two nodes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = []
    for node in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        where = ["--nproc-per-node=2", "--master-addr=localhost", f"--master-port={port}"]
        argv = ["-m", "gptexp.bench", "comm", "--json", "train.device=cpu", f"data.cache_dir={tmp_path}"]
        agents.append(subprocess.Popen([*launcher, *where, *argv], cwd=tmp_path, stdout=subprocess.PIPE, text=True))
    outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0]
    measured = json.loads("".join(outputs))
    assert (measured["ranks"], measured["nodes"]) == (4, 2)
    seconds = {int(size): s for size, s in measured["between"]["seconds"].items()}
    assert measured["between"] == asdict(fit(4, 2, seconds, measured["inside"]["latency_s"], has_trees=False))
    [kept] = recall(compose([f"data.cache_dir={tmp_path}"]).data, "gloo", "float32", 4, "")
    assert replace(kept.network(), ranks=8).nodes == 4


@pytest.mark.e2e
def test_the_ranks_of_a_launcher_are_measured_as_they_are(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = ["-m", "gptexp.bench", "comm", "--device", "cpu", f"data.cache_dir={tmp_path}", "world.comm=bfloat16"]
    done = subprocess.run([*launcher, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all-reduce of bfloat16, gloo, 2 ranks") == 1  # rank 0 alone prints
    assert "in a node: latency" in done.stdout


def test_ranks_that_cannot_start_are_refused_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "spawn", lambda *_args, **_kwargs: pytest.fail("started ranks"))
    monkeypatch.setattr(communication, "count_cores", lambda: 2)
    for gpus, argv, why in (
        (0, ["world.size=9"], r"world\.size=9: 2 cores run at most 8 ranks"),
        (0, ["world.size=2", "world.backend=nccl"], r"world\.backend=nccl: needs CUDA devices, not cpu"),
        (1, ["world.size=2"], r"world\.size=2: local rank 1 has no GPU, because this node has 1 GPU"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(ConfigError, match=why):
            bench.main(["comm", *argv])


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


def test_one_rank_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="one rank sends nothing"):
        bench.main(["comm"])
