"""`gptexp plan` at other numbers of ranks: the arithmetic of a step, and the verdict of the critical batch size."""

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY

from gptexp.command import planning, prediction
from gptexp.command.planning import plan, print_plan
from gptexp.command.prediction import Asked, Computing, critical_of, lines, network_of, predict
from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.machine import network as kept
from gptexp.machine.network import AllReduce, Fitted
from gptexp.model.allreduce import Network
from gptexp.model.gpus import GPUS
from gptexp.model.networks import NETWORKS, NVLINK_WAYS, PCIE_WAYS, WITHIN_NODE
from gptexp.plan import main
from gptexp.process.errors import ConfigError
from gptexp.run.calibrate import Alone

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

GPT2 = ["model=gpt2", "batch.total_batch_size=524288", "batch.micro_batch_size=1", "train.max_tokens=1e9"]
ALONE = Alone(micro_s=4e-3, backward_s=2.5e-3, once_s=1e-3)
EQUAL = Computing(ALONE, ALONE)


def predicted(cfg: Config, asked: Asked = Asked(GPUS["h100"]), computing: Computing = EQUAL) -> dict[str, Any]:  # noqa: B008
    planned = plan(cfg, gpu=asked.gpu)
    predict(cfg, planned, asked, computing, partial(plan, gpu=asked.gpu))
    return planned


def measured_inside(backend: str, comm: str, ranks: int, latency_s: float, bytes_per_s: float = 1e9) -> AllReduce:
    return AllReduce(backend, comm, ranks, 1, Fitted(latency_s, bytes_per_s, {"8": 1e-3}), None)


@pytest.fixture
def tiny_batch(tmp_path: Path) -> list[str]:
    """Steps of 8 sequences of 16 tokens in micro-batches of 2, planned for a CPU."""
    return [*(o for o in TINY if not o.startswith("data=")), f"data.cache_dir={tmp_path}"]


def test_a_step_is_the_one_computed_by_hand(tiny_batch: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores, where nothing is hidden: one bucket of 12 · 16² + 16 · 16 + 50,304 · 16 = 808,192 gradients.

    2 ranks: 2 (0.1 ms + 4 · 808,192 bytes / 2 at 1 GB/s) = 3.432768 ms, and 2 (0.1 ms + 64 ns) for the report.
    4 ranks: 6 (0.1 ms + 808.192 µs) = 5.449152 ms, and 6 (0.1 ms + 32 ns); they take turns on the cores.
    """
    cfg = compose([*tiny_batch, "world.size=2"])
    kept.keep(cfg.data, measured_inside("gloo", "float32", 2, 1e-4))
    monkeypatch.setattr(prediction, "count_cores", lambda: 2)
    computing = Computing(beside=ALONE, single=Alone(micro_s=3e-3, backward_s=2e-3, once_s=0.5e-3))
    one, two, four = predicted(cfg, Asked(), computing)["at_ranks"]
    assert [row["ranks"] for row in (one, two, four)] == [1, 2, 4]
    assert [row["sequences"] for row in (one, two, four)] == [8, 4, 2]
    alone_ms = 4 * 3 + 0.5
    assert 1e3 * one["step_s"] == pytest.approx(alone_ms)
    assert (one["waiting_s"], one["efficiency"]) == (0, 1)
    assert 1e3 * two["waiting_s"] == pytest.approx(3.632896)
    assert 1e3 * two["step_s"] == pytest.approx(2 * 4 + 1 + 3.632896)
    assert two["efficiency"] == pytest.approx(alone_ms / 2 / 12.632896)
    assert 1e3 * four["waiting_s"] == pytest.approx(6.049344)
    assert 1e3 * four["step_s"] == pytest.approx(2 * (4 + 1) + 6.049344)


def test_with_shared_state_each_rank_updates_its_part(tiny_batch: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "count_cores", lambda: 8)
    for sharding, updates in (("none", 1), ("optimizer", 1 / 2), ("full", 1 / 2)):
        cfg = compose([*tiny_batch, "world.size=2", f"world.sharding={sharding}"])
        kept.keep(cfg.data, measured_inside("gloo", "float32", 2, 1e-4))
        row = predicted(cfg, Asked())["at_ranks"][1]
        assert row["step_s"] - row["waiting_s"] == pytest.approx(2 * 4e-3 + updates * 1e-3)


def test_a_split_step_reduces_in_the_micro_steps_that_the_plan_says() -> None:
    """With nothing hidden, a micro-step gathers all twice but the embeddings once, and reduces all once."""
    nothing = Alone(0.0, 0.0, 1e-9)
    sizes = ["batch.micro_batch_size=2", "world.size=16", "world.sharding=full"]
    waits = {}
    for every in ("step", "micro_step"):
        cfg = compose([*GPT2[:2], *sizes, f"world.reduce_every={every}"])
        asked = Asked(GPUS["h100"], network="ethernet_10")
        waits[every] = predicted(cfg, asked, Computing(nothing, nothing))["at_ranks"][1]["waiting_s"]
    parameters, outside = 124_475_904, (50_304 + 1024 + 2) * 768
    bytes_per_s = 1.2e9
    gathered = 2 * (2 * parameters - outside) * 15 / 16 / bytes_per_s
    reduced = 4 * parameters * 15 / 16 / bytes_per_s
    micro_steps = 512 // 16 // 2
    assert waits["step"] == pytest.approx(micro_steps * gathered + reduced, rel=0.01)
    assert waits["micro_step"] == pytest.approx(micro_steps * (gathered + reduced), rel=0.01)


def test_two_plans_agree_about_the_same_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """With an automatic micro-batch, each row has that of its own plan."""
    rows = {}
    for ranks in (128, 256, 512):
        cfg = compose([*GPT2, "batch.micro_batch_size=auto", f"world.size={ranks}"])
        print_plan(cfg, with_time=False, as_json=True, asked=Asked(GPUS["h100"]))
        rows[ranks] = {row["ranks"]: row for row in json.loads(capsys.readouterr().out)["at_ranks"]}
    assert rows[128][256] == pytest.approx(rows[256][256])
    assert rows[256][256] == pytest.approx(rows[512][256])
    assert [rows[512][ranks]["micro_batch_size"] for ranks in (256, 512)] == [2, 1]
    print_plan(compose([*GPT2, "world.size=256"]), False, False, Asked(GPUS["h100"]))
    out = capsys.readouterr().out
    assert "at 256 on 32 nodes each has 2 sequences a step in micro-batches of 1: " in out
    assert "at 512 on 64 nodes each has 1 sequence a step: " in out


def test_what_cannot_be_divided_is_left_out() -> None:
    planned = predicted(compose([*GPT2, "world.size=512"]))
    assert [row["ranks"] for row in planned["at_ranks"]] == [256, 512]  # 1,024 ranks would have half a sequence each


def test_a_tree_is_not_predicted_as_a_ring() -> None:
    planned = predicted(compose([*GPT2, "world.size=16", "train.reduction=tree"]))
    assert "train.reduction=tree" in planned["unpredicted"]
    assert "at_ranks" not in planned


def test_bfloat16_sends_half_the_bytes() -> None:
    """Where nothing is hidden and latencies are small, a step waits half as long."""
    slow = Asked(GPUS["h100"], network="ethernet_10")
    alone = Computing(Alone(4e-3, 0.0, 0.0), Alone(4e-3, 0.0, 0.0))
    waiting = [
        predicted(compose([*GPT2, "world.size=16", f"world.comm={comm}"]), slow, alone)["at_ranks"][1]["waiting_s"]
        for comm in ("float32", "bfloat16")
    ]
    assert waiting[1] / waiting[0] == pytest.approx(0.5, rel=0.01)


def test_a_plan_for_gpus_has_its_waiting_in_the_time_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = compose([*GPT2, "world.size=512"])
    print_plan(cfg, with_time=False, as_json=True, asked=Asked(GPUS["h100"]))
    printed = json.loads(capsys.readouterr().out)
    own = printed["at_ranks"][-1]
    assert printed["time"]["step_s"] == pytest.approx(own["step_s"])
    assert own["waiting_s"] > 0.2 * own["step_s"]
    print_plan(cfg, with_time=False, as_json=False, asked=Asked(GPUS["h100"]))
    table = capsys.readouterr().out
    assert f"at 512 on 64 nodes each has 1 sequence a step: {1e3 * own['step_s']:.3g} ms" in table
    assert f"{own['efficiency']:.0%} efficiency" in table
    assert "network        18 NVLinks; 8 × InfiniBand NDR" in table
    print_plan(cfg, False, False, Asked(GPUS["h100"], "ethernet_100", 4))
    assert "at 512 on 128 nodes" in (table := capsys.readouterr().out)
    assert "; 100 Gbit/s Ethernet a node" in table
    print_plan(compose(GPT2), False, True, Asked(GPUS["h100"]))
    assert "at_ranks" not in json.loads(capsys.readouterr().out)  # one rank waits for nothing


def test_the_nearest_measurement_of_this_machine_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose([*GPT2, f"data.cache_dir={tmp_path}", "world.size=4", "train.device=cpu"])
    assert network_of(cfg, Asked(), 4) == "the network is unknown; gptexp bench comm world.size=4 measures it"
    for ranks, latency_s in ((2, 2e-6), (8, 8e-6), (4, 4e-6), (4, 5e-6)):  # the newest one of four ranks
        kept.keep(cfg.data, measured_inside("gloo", "float32", ranks, latency_s))
    kept.keep(cfg.data, measured_inside("gloo", "bfloat16", 2, 7e-6))
    (tmp_path / "measured" / "comm-damaged.json").write_text('{"machine": {')
    (tmp_path / "measured" / "comm-older.json").write_text('{"machine": {}, "backend": "gloo", "latency_s": 1}')
    for comm, ranks, latency_s in (
        ("float32", 4, 5e-6),
        ("float32", 2, 2e-6),
        ("float32", 64, 8e-6),
        ("bfloat16", 4, 7e-6),
    ):
        cfg.world.comm = comm
        found = network_of(cfg, Asked(), ranks)
        assert isinstance(found, Network)
        assert [way.inside_s for way in found.ways] == [latency_s]
    assert network_of(cfg, Asked(ranks_per_node=1), 4) == (
        "the network between 4 nodes is unknown; give --network, or measure it there: torchrun --nnodes=2 … -m "
        "gptexp.bench comm"
    )
    between = network_of(cfg, Asked(network="ethernet_10", ranks_per_node=2), 4)
    assert isinstance(between, Network)
    assert (between.between, between.ranks_per_node) == (NETWORKS["ethernet_10"], 2)
    monkeypatch.setattr(kept, "machine", lambda _backend: {"cpu": "another"})
    assert isinstance(network_of(cfg, Asked(), 4), str)


def test_a_measurement_holds_for_its_kind_of_gpu_and_what_is_asked_for_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose([*GPT2, f"data.cache_dir={tmp_path}", "world.size=64"])
    monkeypatch.setattr(kept, "machine", lambda _backend: {"gpu": "NVIDIA H100 80GB HBM3"})
    nodes = AllReduce("nccl", "float32", 8, 2, Fitted(5e-6, 100e9, {}), Fitted(40e-6, 10e9, {}))
    kept.keep(cfg.data, nodes)
    kept.keep(cfg.data, measured_inside("nccl", "float32", 8, 6e-6, 200e9))
    kept.keep(cfg.data, measured_inside("gloo", "float32", 8, 1.0))

    def found(name: str, **asked: Any) -> Network:
        network = network_of(cfg, Asked(GPUS[name], **asked), 64)
        assert isinstance(network, Network)
        return network

    of_h100 = found("h100")
    assert of_h100.inside.name == "measured: nccl, 8 ranks"
    assert of_h100.between is not None
    assert (of_h100.between.bytes_per_s, of_h100.ranks_per_node) == (10e9, 4)
    assert {(way.inside_s, way.between_s, way.start_s) for way in of_h100.ways} == {(6e-6, 40e-6, 0.0)}
    # A thousand ranks: trees, whose messages between the nodes grow with the logarithm.
    assert of_h100.all_reduce_s(1024, 8) == pytest.approx(2 * (3 * 6e-6 + 8 * 40e-6), rel=1e-3)
    given = found("h100", network="ethernet_10", ranks_per_node=2)
    assert (given.between, given.ranks_per_node) == (NETWORKS["ethernet_10"], 2)
    assert {(way.inside_s, way.between_s) for way in given.ways} == {(6e-6, 4e-6), (6e-6, 8.5e-6), (6e-6, 14e-6)}
    assert found("a100") == Network(WITHIN_NODE["a100"], 8, NETWORKS["hdr"], NVLINK_WAYS)
    assert found("l40s") == Network(WITHIN_NODE["l40s"], 8, NETWORKS["ethernet_100"], PCIE_WAYS)


def test_a_node_here_has_the_gpus_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose([*GPT2, f"data.cache_dir={tmp_path}", "world.size=4"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    network = network_of(cfg, Asked(), 4)
    assert isinstance(network, Network)
    assert [network.nodes(ranks) for ranks in (2, 4, 8)] == [1, 1, 2]


def test_on_a_cpu_nothing_is_hidden_without_spare_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    batch = ["batch.total_batch_size=128", "batch.micro_batch_size=2", f"data.cache_dir={tmp_path}"]
    wide = ["model.n_layer=4", "model.n_embd=256"]  # else there is one bucket, which is full at the end
    cfg = compose([*(o for o in TINY if o[:5] not in ("data=", "batch")), *batch, *wide, "world.size=2"])
    kept.keep(cfg.data, measured_inside("gloo", "float32", 2, 1e-4))
    of_cores = {}
    for cores in (2, 8):
        monkeypatch.setattr(prediction, "count_cores", lambda cores=cores: cores)
        of_cores[cores] = predicted(cfg, Asked())["at_ranks"]
    assert of_cores[2][1]["waiting_s"] > of_cores[8][1]["waiting_s"]


def test_a_plan_with_times_predicts_from_one_rank_beside_others(
    tiny_batch: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = compose([*tiny_batch, "world.size=2"])
    at_once = []

    def sampled(_cfg: Config, _run: object, _effective: object, ranks: int) -> Alone:
        at_once.append(ranks)
        return ALONE

    monkeypatch.setattr(prediction, "sample_alone", sampled)
    monkeypatch.setattr(prediction, "count_cores", lambda: 2)
    monkeypatch.setattr(planning, "add_times", lambda runs: None)
    print_plan(cfg, with_time=False, as_json=False)
    assert "ranks          add --time to predict the waiting" in capsys.readouterr().out
    print_plan(cfg, with_time=True, as_json=False)
    assert (
        "ranks          the network is unknown; gptexp bench comm world.size=2 measures it" in capsys.readouterr().out
    )
    assert at_once == []
    kept.keep(cfg.data, measured_inside("gloo", "float32", 2, 1e-4))
    print_plan(cfg, with_time=True, as_json=False)
    out = capsys.readouterr().out
    assert "at 2 each has 4 sequences a step" in out
    assert "measured: gloo, 2 ranks" in out
    assert at_once == [1, 2]


def test_ranks_that_this_machine_cannot_start_have_a_predicted_time(
    tiny_batch: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["batch.total_batch_size=256", "batch.micro_batch_size=1", "train.max_steps=10", "world.size=16"]
    cfg = compose([*tiny_batch, *options])
    kept.keep(cfg.data, measured_inside("gloo", "float32", 2, 1e-4))
    monkeypatch.setattr(prediction, "sample_alone", lambda *_: ALONE)
    monkeypatch.setattr(prediction, "count_cores", lambda: 2)
    print_plan(cfg, with_time=True, as_json=True)
    planned = json.loads(capsys.readouterr().out)
    [own] = [row for row in planned["at_ranks"] if row["ranks"] == 16]
    assert planned["time"] == pytest.approx({"step_s": own["step_s"], "total_s": 10 * own["step_s"]})
    print_plan(cfg, with_time=True, as_json=False)
    assert "as predicted; without start and validation" in capsys.readouterr().out


@pytest.fixture(scope="module")
def measured(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the noise scale 2,000 tokens: 125 sequences of 16 tokens."""
    directory = tmp_path_factory.mktemp("measured") / "run"
    shutil.copytree(finished_run, directory)
    [first, *_] = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    signal, trace = 1.0, 125.0
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(200):
            norms = {"gns/small_sq_norm": signal + trace / 2, "gns/big_sq_norm": signal + trace / 8}
            event = {**first, "event": "step", "step": step, "tokens": 128 * (step + 1), "train/loss": 5.0, **norms}
            file.write(json.dumps({**event, "gns/small_sequences": 2, "gns/sequences": 125.0}) + "\n")
    return directory


def test_the_verdict_compares_the_batch_with_the_measured_critical_size(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for total, verdict, words in (("1920", "below", "is below"), ("2048", "above", "passes")):  # its noise is constant
        sizes = ["model.block_size=16", f"batch.total_batch_size={total}", "batch.micro_batch_size=2"]
        cfg = compose(["model=nano", *sizes, "world.size=4"])
        planned = plan(cfg, gpu=GPUS["h100"])
        critical = critical_of(cfg, planned, measured)
        assert critical is not None
        assert critical["tokens"] == pytest.approx(2000, rel=1e-3)
        assert (critical["verdict"], critical["ranks"]) == (verdict, 62)  # 62 ranks with 2 sequences of 16 tokens each
        print_plan(cfg, False, False, Asked(GPUS["h100"], critical=measured))
        printed = capsys.readouterr()
        assert f"the batch of {int(total):,} tokens {words} the measured gradient noise scale" in printed.out
        keys = "model.n_layer, model.n_embd, data.name, data.path"  # of the fixture's run
        assert f"warning: {measured} has measured its gradient noise scale with other {keys}\n" in printed.err


@pytest.mark.parametrize(
    ("total", "high", "verdict"),
    [
        (256, 8000, "is below"),
        (2048, 8000, "is within the interval of"),
        (8192, 8000, "passes"),
        (8192, None, "is within"),
    ],
)
def test_a_batch_within_the_interval_passes_nothing(
    measured: Path, monkeypatch: pytest.MonkeyPatch, total: int, high: int | None, verdict: str
) -> None:
    found = {"what": "gradient noise scale", "tokens": 2000.0, "low": 500.0, "high": high}
    monkeypatch.setattr(prediction, "_noise_scale_of", lambda _directory: found)
    cfg = compose(["model=nano", "model.block_size=16", f"batch.total_batch_size={total}", "batch.micro_batch_size=2"])
    planned = plan(cfg)
    planned["critical"] = critical_of(cfg, planned, measured)
    [(_, text)] = [line for line in lines(planned) if line[0] == "critical size"]
    assert f"the batch of {total:,} tokens {verdict}" in text


def test_a_directory_that_has_measured_nothing_is_refused(finished_run: Path, tmp_path: Path) -> None:
    cfg = compose(["model=nano"])
    shutil.copytree(finished_run, tmp_path / "cell")
    for directory, why in (
        (tmp_path / "none", "no such directory"),
        (tmp_path, "no run there has measured a noise scale"),
        (finished_run, "this run has no gradient noise scale; train for longer"),
    ):
        with pytest.raises(ConfigError, match=why):
            critical_of(cfg, {"total_batch_size": 1, "micro_batch_size": 1}, directory)
    assert critical_of(cfg, {}, None) is None


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--ranks-per-node", "0"], "--ranks-per-node=0: must be 1 or above"),
        (["--network", "ndr"], "--network: only device=GPU and --time predict"),
        (["-m", "optim.lr=1e-3,2e-3", "--critical", "."], "--critical: is for the plan of one run"),
        (["-m", "optim.lr=1e-3,2e-3", "--time", "--network", "ndr"], "--network: of a sweep only device=GPU predicts"),
    ],
)
def test_wrong_arguments_are_refused(argv: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        main(["model=nano", *argv])
