"""`gptexp plan` at other numbers of ranks: the arithmetic of a step, and the verdict of the critical batch size."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY

from gptexp.command import critical, planning, prediction
from gptexp.command.critical import CriticalSize, judge_batch
from gptexp.command.planning import Request, add_prediction, plan, print_plan
from gptexp.command.prediction import Computing
from gptexp.config.batch import plan_batch
from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.machine import network as kept
from gptexp.machine.network import AllReduce, Fitted, network_of
from gptexp.model.allreduce import NVLINK_WAYS, PCIE_WAYS, Alone, Network
from gptexp.model.gpus import GPUS, NETWORKS
from gptexp.plan import main
from gptexp.process.errors import ConfigError

GPT2 = ["model=gpt2", "batch.total_batch_size=524288", "batch.micro_batch_size=1", "train.max_tokens=1e9"]
H100 = Request(GPUS["h100"])
ALONE = Alone(micro_s=4e-3, backward_s=2.5e-3, once_s=1e-3)
# Steps of 8 sequences of 16 tokens in micro-batches of 2, planned for a CPU.
SMALL = [option for option in TINY if not option.startswith("data=")]


def predicted(monkeypatch: pytest.MonkeyPatch, cfg: Config, request: Request, *times: Alone) -> dict[int, Any]:
    """The steps by their numbers of ranks, from the times of a rank beside others and alone."""
    times = times or (ALONE, ALONE)
    monkeypatch.setattr(planning, "_measure_computing", lambda _: Computing(*times))
    planned = plan(cfg, gpu=request.gpu)
    add_prediction(planned, request)
    assert planned.prediction is not None
    return {step.ranks: step for step in planned.prediction.steps}


def keep_measured(cfg: Config, ranks: int, latency_s: float, backend: str = "gloo", comm: str = "float32") -> None:
    kept.keep(cfg.data, AllReduce(backend, comm, ranks, 1, Fitted(latency_s, 1e9, {"8": 1e-3}), None))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """`SMALL` on two ranks of a machine with two cores, whose network is measured."""
    options = [*SMALL, f"data.cache_dir={tmp_path}", "world.size=2"]
    keep_measured(compose(options), 2, 1e-4)
    monkeypatch.setattr(prediction, "count_cores", lambda: 2)
    monkeypatch.setattr(planning, "count_cores", lambda: 2)
    return options


MEASURED = Request(with_time=True)


def test_a_step_is_the_one_computed_by_hand(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores, where nothing is hidden: one bucket of 12 · 16² + 16 · 16 + 50,304 · 16 = 808,192 gradients.

    2 ranks: 2 (0.1 ms + 4 · 808,192 bytes / 2 at 1 GB/s) = 3.432768 ms, and 2 (0.1 ms + 64 ns) for the report.
    4 ranks: 6 (0.1 ms + 808.192 µs) = 5.449152 ms, and 6 (0.1 ms + 32 ns); they take turns on the cores.
    """
    steps = predicted(monkeypatch, compose(small), MEASURED, ALONE, Alone(3e-3, 2e-3, 0.5e-3))
    assert {ranks: step.sequences for ranks, step in steps.items()} == {1: 8, 2: 4, 4: 2}
    alone_ms = 4 * 3 + 0.5
    assert (1e3 * steps[1].step_s, steps[1].waiting_s, steps[1].efficiency) == (pytest.approx(alone_ms), 0, 1)
    for ranks, computing_ms, waiting_ms in ((2, 2 * 4 + 1, 3.632896), (4, 2 * (4 + 1), 6.049344)):
        assert 1e3 * steps[ranks].waiting_s == pytest.approx(waiting_ms)
        assert 1e3 * steps[ranks].step_s == pytest.approx(computing_ms + waiting_ms)
        assert steps[ranks].efficiency == pytest.approx(alone_ms / ranks / (computing_ms + waiting_ms))


@pytest.mark.parametrize(("sharding", "updates"), [("none", 1), ("optimizer", 1 / 2), ("full", 1 / 2)])
def test_with_shared_state_each_rank_updates_its_part(
    small: list[str], sharding: str, updates: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = predicted(monkeypatch, compose([*small, f"world.sharding={sharding}"]), MEASURED)[2]
    assert step.step_s - step.waiting_s == pytest.approx(2 * 4e-3 + updates * 1e-3)


@pytest.mark.parametrize("every", ["step", "micro_step"])
def test_a_split_step_reduces_in_the_micro_steps_that_the_plan_says(
    every: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing hidden, a micro-step gathers all twice but the embeddings once, and reduces all once."""
    sizes = ["batch.micro_batch_size=2", "world.size=16", "world.sharding=full", f"world.reduce_every={every}"]
    slow, nothing = replace(H100, network="ethernet_10"), Alone(0.0, 0.0, 1e-9)
    waiting_s = predicted(monkeypatch, compose([*GPT2[:2], *sizes]), slow, nothing, nothing)[16].waiting_s
    parameters, outside = 124_475_904, (50_304 + 1024 + 2) * 768
    gathered, reduced = (size * 15 / 16 / 1.2e9 for size in (2 * (2 * parameters - outside), 4 * parameters))
    micro_steps = 512 // 16 // 2
    expected_s = micro_steps * gathered + (micro_steps if every == "micro_step" else 1) * reduced
    assert waiting_s == pytest.approx(expected_s, rel=0.01)


def test_two_plans_agree_about_the_same_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """With an automatic micro-batch, each row has that of its own plan."""
    rows = {}
    for ranks in (128, 256, 512):
        print_plan(compose([*GPT2, "batch.micro_batch_size=auto", f"world.size={ranks}"]), replace(H100, as_json=True))
        rows[ranks] = {row["ranks"]: row for row in json.loads(capsys.readouterr().out)["at_ranks"]}
    assert rows[128][256] == pytest.approx(rows[256][256])
    assert rows[256][256] == pytest.approx(rows[512][256])
    # 1,024 ranks would have half a sequence each.
    assert {ranks: row["micro_batch_size"] for ranks, row in rows[512].items()} == {256: 2, 512: 1}


def test_a_tree_is_not_predicted_as_a_ring() -> None:
    planned = plan(compose([*GPT2, "world.size=16", "train.reduction=tree"]), gpu=H100.gpu)
    add_prediction(planned, H100)
    assert "train.reduction=tree" in (planned.unpredicted or "")
    assert planned.to_dict().keys() & {"at_ranks", "unpredicted"} == {"unpredicted"}


def test_bfloat16_sends_half_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is hidden and latencies are small, a step waits half as long."""
    slow, alone = replace(H100, network="ethernet_10"), Alone(4e-3, 0.0, 0.0)
    configs = [compose([*GPT2, "world.size=16", f"world.comm={comm}"]) for comm in ("float32", "bfloat16")]
    whole_s, half_s = (predicted(monkeypatch, cfg, slow, alone, alone)[16].waiting_s for cfg in configs)
    assert half_s / whole_s == pytest.approx(0.5, rel=0.01)


def test_a_plan_for_gpus_has_its_waiting_in_the_time_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = compose([*GPT2, "world.size=512"])
    print_plan(cfg, replace(H100, as_json=True))
    printed = json.loads(capsys.readouterr().out)
    own = printed["at_ranks"][-1]
    assert printed["time"]["step_s"] == pytest.approx(own["step_s"])
    assert own["waiting_s"] > 0.2 * own["step_s"]
    assert printed["network"]["ranks_per_node"] == 8
    print_plan(cfg, replace(H100, network="ethernet_100", ranks_per_node=4))
    table = capsys.readouterr().out
    assert f"at 256 on 64 nodes each has {2} sequences a step in micro-batches of 1: " in table
    assert "at 512 on 128 nodes each has 1 sequence a step: " in table
    assert "network         18 NVLinks; 100 Gbit/s Ethernet a node\n" in table
    print_plan(compose(GPT2), replace(H100, as_json=True))
    assert "at_ranks" not in json.loads(capsys.readouterr().out)  # one rank waits for nothing


def test_the_nearest_measurement_of_this_machine_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose([*GPT2, f"data.cache_dir={tmp_path}", "world.size=4", "train.device=cpu"])
    assert network_of(cfg, 4, None, None, None).crossed == [None]
    for ranks, latency_s in ((2, 2e-6), (8, 8e-6), (4, 4e-6), (4, 5e-6)):  # the newest one of four ranks
        keep_measured(cfg, ranks, latency_s)
    keep_measured(cfg, 2, 7e-6, comm="bfloat16")
    (tmp_path / "measured" / "comm-damaged.json").write_text('{"machine": {')
    (tmp_path / "measured" / "comm-older.json").write_text('{"machine": {}, "backend": "gloo", "latency_s": 1}')
    nearest = {("float32", 4): 5e-6, ("float32", 2): 2e-6, ("float32", 64): 8e-6, ("bfloat16", 4): 7e-6}
    for (cfg.world.comm, ranks), latency_s in nearest.items():
        assert [way.inside_s for way in network_of(cfg, ranks, None, None, None).ways] == [latency_s]
    assert network_of(cfg, 4, None, None, 1).crossed == [None]
    over = network_of(cfg, 4, None, "ethernet_10", 2)
    assert (over.between, over.ranks_per_node) == (NETWORKS["ethernet_10"], 2)
    monkeypatch.setattr(kept, "machine", lambda _backend: {"cpu": "another"})
    assert network_of(cfg, 4, None, None, None).crossed == [None]


def test_a_measurement_holds_for_its_kind_of_gpu_and_what_is_asked_for_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose([*GPT2, f"data.cache_dir={tmp_path}", "world.size=64"])
    monkeypatch.setattr(kept, "machine", lambda _backend: {"gpu": "NVIDIA H100 80GB HBM3"})
    kept.keep(cfg.data, AllReduce("nccl", "float32", 8, 2, Fitted(5e-6, 1e11, {}), Fitted(40e-6, 10e9, {})))
    keep_measured(cfg, 8, 6e-6, "nccl")
    keep_measured(cfg, 8, 1.0, "gloo")

    def network_with(name: str, network: str | None = None, per_node: int | None = None) -> Network:
        return network_of(cfg, 64, GPUS[name], network, per_node)

    of_h100 = network_with("h100")
    assert [link.name for link in of_h100.crossed if link is not None] == [
        "measured: nccl, 8 ranks", "measured: nccl, 8 ranks on 2 nodes"
    ]  # fmt: skip
    assert of_h100.ranks_per_node == 4
    assert {(way.inside_s, way.between_s, way.start_s) for way in of_h100.ways} == {(6e-6, 40e-6, 0.0)}
    # A thousand ranks: trees, whose messages between the nodes grow with the logarithm.
    assert replace(of_h100, ranks=1024).all_reduce_s(8) == pytest.approx(2 * (3 * 6e-6 + 8 * 40e-6), rel=1e-3)
    given = network_with("h100", "ethernet_10", 2)
    assert (given.between, given.ranks_per_node) == (NETWORKS["ethernet_10"], 2)
    assert {(way.inside_s, way.between_s) for way in given.ways} == {(6e-6, 4e-6), (6e-6, 8.5e-6), (6e-6, 14e-6)}
    assert network_with("a100") == Network(64, 8, GPUS["a100"].link, NETWORKS["hdr"], NVLINK_WAYS)
    assert network_with("l40s") == Network(64, 8, GPUS["l40s"].link, NETWORKS["ethernet_100"], PCIE_WAYS)


def test_a_node_here_has_the_gpus_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose([*GPT2, f"data.cache_dir={tmp_path}", "world.size=4"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert [network_of(cfg, ranks, None, None, None).nodes for ranks in (2, 4, 8)] == [1, 1, 2]


def test_on_a_cpu_nothing_is_hidden_without_spare_cores(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ["model.n_layer=4", "model.n_embd=256"]  # else there is one bucket, which is full at the end
    waiting_s = []
    for cores in (2, 8):
        monkeypatch.setattr(prediction, "count_cores", lambda cores=cores: cores)
        waiting_s.append(predicted(monkeypatch, compose([*small, *wide]), MEASURED)[2].waiting_s)
    assert waiting_s[0] > waiting_s[1]


def test_a_plan_with_times_predicts_from_one_rank_beside_others(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = []

    def sampled(_cfg: Config, _run: object, _effective: object, ranks: int) -> Alone:
        at_once.append(ranks)
        return ALONE

    monkeypatch.setattr(planning, "sample_alone", sampled)
    cfg = compose(small)
    unmeasured = replace(cfg, world=replace(cfg.world, backend="nccl"))
    for config, request, why in (
        (cfg, Request(), "add --time to predict the waiting"),
        (unmeasured, MEASURED, "gptexp bench comm world.size=2 measures it"),
        (cfg, replace(MEASURED, ranks_per_node=1), "give --network, or measure it there: torchrun --nnodes=2 "),
    ):
        planned = plan(config)
        add_prediction(planned, request)
        assert why in (planned.unpredicted or "")
    assert at_once == []
    planned = plan(cfg)
    add_prediction(planned, MEASURED)
    assert planned.prediction is not None
    assert at_once == [1, 2]


def test_ranks_that_this_machine_cannot_start_have_a_predicted_time(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["batch.total_batch_size=256", "batch.micro_batch_size=1", "train.max_steps=10", "world.size=16"]
    monkeypatch.setattr(planning, "sample_alone", lambda *_: ALONE)
    monkeypatch.setattr(planning, "sample", lambda *_: pytest.fail("started ranks"))
    print_plan(compose([*small, *options]), replace(MEASURED, as_json=True))
    planned = json.loads(capsys.readouterr().out)
    [own] = [row for row in planned["at_ranks"] if row["ranks"] == 16]
    assert planned["time"] == pytest.approx({"step_s": own["step_s"], "total_s": 10 * own["step_s"]})


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


@pytest.mark.parametrize(("total", "verdict"), [(1920, "below"), (2048, "above")])  # the noise is constant
def test_the_verdict_compares_the_batch_with_the_measured_critical_size(
    measured: Path, capsys: pytest.CaptureFixture[str], total: int, verdict: str
) -> None:
    sizes = ["model.block_size=16", f"batch.total_batch_size={total}", "batch.micro_batch_size=2"]
    print_plan(compose(["model=nano", *sizes, "world.size=4"]), replace(H100, critical=measured, as_json=True))
    printed = capsys.readouterr()
    planned = json.loads(printed.out)
    judged = planned["critical"]
    assert judged["tokens"] == pytest.approx(2000, rel=1e-3)
    assert (judged["verdict"], judged["from"]) == (verdict, str(measured))
    assert judged["ranks"] == 62  # with 2 sequences of 16 tokens each
    assert judged["other_keys"] == ["model.n_layer", "model.n_embd", "data.name", "data.path"]  # of the fixture's run
    assert planned["warnings"][-1].endswith(", ".join(judged["other_keys"]))
    assert planned["warnings"][-1] in printed.err


@pytest.mark.parametrize(
    ("total", "high", "verdict"),
    [
        (256, 8000, "below"),
        (1024, 8000, "within"),
        (2048, 8000, "within"),
        (8192, 8000, "above"),
        (8192, None, "within"),
    ],
)
def test_a_batch_within_the_interval_passes_nothing(
    measured: Path, monkeypatch: pytest.MonkeyPatch, total: int, high: int | None, verdict: str
) -> None:
    size = CriticalSize("gradient noise scale", 2000.0, 500.0, high, measured)
    monkeypatch.setattr(critical, "_noise_scale_of", lambda _directory: size)
    judged = judge_batch(compose(["model=nano"]), plan_batch(total, 2, 16, 1), measured)
    assert judged is not None
    assert judged.verdict == verdict


def test_a_directory_that_has_measured_nothing_is_refused(finished_run: Path, tmp_path: Path) -> None:
    cfg, batch = compose(["model=nano"]), plan_batch(32, 1, 16, 1)
    shutil.copytree(finished_run, tmp_path / "cell")
    for directory, why in (
        (tmp_path / "none", "no such directory"),
        (tmp_path, "no run there has measured a noise scale"),
        (finished_run, "this run has no gradient noise scale; train for longer"),
    ):
        with pytest.raises(ConfigError, match=why):
            judge_batch(cfg, batch, directory)
    assert judge_batch(cfg, batch, None) is None


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
