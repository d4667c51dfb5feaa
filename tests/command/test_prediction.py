"""`gptexp plan` at other numbers of ranks: the arithmetic of a step, and the verdict of the critical batch size."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

from gptexp.command import planning, prediction
from gptexp.command.planning import plan, print_plan
from gptexp.command.prediction import Asked, critical_of, network_of, predict
from gptexp.config.compose import compose
from gptexp.config.schema import Config
from gptexp.machine import network as kept
from gptexp.machine.network import AllReduce
from gptexp.model.allreduce import Network, buckets, waiting_s
from gptexp.model.gpus import GPUS
from gptexp.model.networks import NETWORKS, WITHIN_NODE
from gptexp.plan import main
from gptexp.process.errors import ConfigError
from gptexp.run.calibrate import Alone

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

GPT2 = ["model=gpt2", "batch.total_batch_size=524288", "batch.micro_batch_size=1", "train.max_tokens=1e9"]
ALONE = Alone(micro_s=4e-3, backward_s=2.5e-3, once_s=1e-3)


def predicted(cfg: Config, asked: Asked = Asked(GPUS["h100"]), alone: Alone = ALONE) -> dict[str, Any]:  # noqa: B008
    planned = plan(cfg, gpu=asked.gpu)
    predict(cfg, planned, asked, alone)
    return planned


def test_a_step_is_the_share_of_the_batch_and_what_the_backward_pass_does_not_hide() -> None:
    cfg = compose([*GPT2, "world.size=256"])
    planned = predicted(cfg)
    assert [row["ranks"] for row in planned["at_ranks"]] == [128, 256, 512]
    assert [row["sequences"] for row in planned["at_ranks"]] == [4, 2, 1]
    assert [row["nodes"] for row in planned["at_ranks"]] == [16, 32, 64]
    network = Network(WITHIN_NODE["h100"], 8, NETWORKS["ndr"], has_trees=True)
    cfg.model.vocab_size = 50_304
    mib = 4 * planned["parameters"] / 5  # compiled: five buckets
    assert planned["effective"]["compile"]
    for row in planned["at_ranks"]:
        found = buckets(cfg.model, 1024, mib, mib)
        waiting = waiting_s(found, row["ranks"], network, ALONE.backward_s, 4) + network.all_reduce_s(row["ranks"], 128)
        step_s = row["sequences"] * 4e-3 + 1e-3 + waiting
        assert (row["waiting_s"], row["step_s"]) == pytest.approx((waiting, step_s))
        assert row["efficiency"] == pytest.approx((512 * 4e-3 + 1e-3) / (row["ranks"] * step_s))


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
    alone = Alone(4e-3, 0.0, 0.0)
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
        kept.keep(cfg.data, AllReduce("gloo", "float32", ranks, 1, latency_s, 1e9, {"8": 1e-3}))
    kept.keep(cfg.data, AllReduce("nccl", "float32", 4, 1, 1.0, 1e9, {}))
    kept.keep(cfg.data, AllReduce("gloo", "bfloat16", 2, 1, 7e-6, 1e9, {}))
    (tmp_path / "measured" / "comm-damaged.json").write_text('{"machine": {')
    for comm, ranks, latency_s in (
        ("float32", 4, 5e-6),
        ("float32", 2, 2e-6),
        ("float32", 64, 8e-6),
        ("bfloat16", 4, 7e-6),
    ):
        cfg.world.comm = comm
        found = network_of(cfg, Asked(), ranks)
        assert isinstance(found, Network)
        assert found.inside.latency_s == latency_s
    monkeypatch.setattr(kept, "machine", lambda: {"cpu": "another"})
    assert isinstance(network_of(cfg, Asked(), 4), str)


def test_on_a_cpu_nothing_is_hidden_without_spare_cores_and_crowded_ranks_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batch = ["batch.total_batch_size=128", "batch.micro_batch_size=2", f"data.cache_dir={tmp_path}"]
    wide = ["model.n_layer=4", "model.n_embd=256"]  # else there is one bucket, which is full at the end
    cfg = compose([*(o for o in TINY if o[:5] not in ("data=", "batch")), *batch, *wide, "world.size=2"])
    kept.keep(cfg.data, AllReduce("gloo", "float32", 2, 1, 1e-4, 1e9, {}))
    of_cores = {}
    for cores in (2, 8):
        monkeypatch.setattr(prediction, "count_cores", lambda cores=cores: cores)
        of_cores[cores] = predicted(cfg, Asked())["at_ranks"]
    assert of_cores[2][1]["waiting_s"] > of_cores[8][1]["waiting_s"]
    compute = [row["step_s"] - row["waiting_s"] for row in of_cores[2]]
    assert compute == pytest.approx([4 * 4e-3 + 1e-3, 2 * 4e-3 + 1e-3, 2 * (4e-3 + 1e-3)])  # four ranks on two cores


def test_a_plan_with_times_predicts_from_one_rank_beside_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = compose([*(o for o in TINY if not o.startswith("data=")), f"data.cache_dir={tmp_path}", "world.size=2"])
    at_once = []

    def sampled(_cfg: Config, _run: object, _effective: object, ranks: int) -> Alone:
        at_once.append(ranks)
        return ALONE

    monkeypatch.setattr(prediction, "sample_alone", sampled)
    monkeypatch.setattr(prediction, "count_cores", lambda: 2)
    monkeypatch.setattr(planning, "add_times", lambda runs: None)
    print_plan(cfg, with_time=True, as_json=False)
    assert (
        "ranks          the network is unknown; gptexp bench comm world.size=2 measures it" in capsys.readouterr().out
    )
    assert at_once == []
    kept.keep(cfg.data, AllReduce("gloo", "float32", 2, 1, 1e-4, 1e9, {}))
    print_plan(cfg, with_time=True, as_json=False)
    out = capsys.readouterr().out
    assert "at 2 each has 4 sequences a step" in out
    assert "measured: gloo, 2 ranks" in out
    assert at_once == [2]


def test_ranks_that_this_machine_cannot_start_have_a_predicted_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["batch.total_batch_size=256", "batch.micro_batch_size=1", "train.max_steps=10", "world.size=16"]
    cfg = compose([*(o for o in TINY if not o.startswith("data=")), *options, f"data.cache_dir={tmp_path}"])
    kept.keep(cfg.data, AllReduce("gloo", "float32", 2, 1, 1e-4, 1e9, {}))
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
    for total, passes in (("1920", False), ("2048", True)):
        sizes = ["model.block_size=16", f"batch.total_batch_size={total}", "batch.micro_batch_size=2"]
        cfg = compose(["model=nano", *sizes, "world.size=4"])
        planned = plan(cfg, gpu=GPUS["h100"])
        critical = critical_of(cfg, planned, measured)
        assert critical is not None
        assert critical["tokens"] == pytest.approx(2000, rel=1e-3)
        assert (critical["passes"], critical["ranks"]) == (passes, 62)  # 62 ranks with 2 sequences of 16 tokens each
        print_plan(cfg, False, False, Asked(GPUS["h100"], critical=measured))
        verb = "passes" if passes else "is within"
        assert f"the batch of {int(total):,} tokens {verb} the measured gradient noise scale" in capsys.readouterr().out


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
    ],
)
def test_wrong_arguments_are_refused(argv: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        main(["model=nano", *argv])
