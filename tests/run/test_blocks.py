"""Whole runs of models with today's blocks: resumed, split, exported, sampled, and begun from others' weights."""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import BLOCKS
from conftest import BYTES, e2e_then_slow, events, processes_of, wait_for
from judge import judge
from real_runs import begun, branch_and_whole, equal, newest, train_here
from test_export import compare

import gptexp as package
from gptexp.command.hydra_main import register_from_init
from gptexp.config.compose import compose
from gptexp.data.characters import ByteTokenizer
from gptexp.data.tokenizer_json import transformers_files
from gptexp.process.errors import ConfigError
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.mark.parametrize(
    "name", [name if name in ("qwen3", "all else") else pytest.param(name, marks=pytest.mark.e2e) for name in BLOCKS]
)
def test_a_resumed_run_ends_with_the_same_bits(tiny: list[str], tmp_path: Path, name: str) -> None:
    argv = [*tiny, *BYTES, *BLOCKS[name], "train.save_every=2"]
    run_dir.save_config(tmp_path / "run", compose(argv))
    assert train_here(argv, tmp_path / "run") == 0
    half = shutil.copytree(tmp_path / "run", tmp_path / "half")
    shutil.rmtree(newest(half))
    (half / "summary.json").unlink()
    assert newest(half).name == "step-00000002"
    assert train_here(argv, half) == 0
    assert equal(tmp_path / "run", half)


@pytest.mark.parametrize("name", e2e_then_slow(["all else", "qwen3", "nanochat"]))
def test_a_killed_run_on_two_ranks_ends_with_the_same_bits(
    gptexp: Gptexp, start: Start, tiny: list[str], tmp_path: Path, name: str
) -> None:
    argv = [*tiny, *BYTES, *BLOCKS[name], "world=ddp2", "train.max_steps=40", "train.save_every=10"]
    assert gptexp("train", *argv, "hydra.run.dir=whole").returncode == 0
    process = start("train", *argv, "hydra.run.dir=cut")
    wait_for(begun(tmp_path / "cut", 12), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while processes_of(tmp_path / "cut"):  # the ranks notice that their parent is gone
        time.sleep(0.02)
    done = gptexp("resume", "cut")
    assert done.returncode == 0, done.stderr
    assert equal(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("name", e2e_then_slow(["qwen3", "all else", "olmo2"]))
def test_a_split_model_trains_and_samples_as_a_whole_one(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, name: str
) -> None:
    argv = [
        *tiny,
        *BYTES,
        *BLOCKS[name],
        "world=ddp2",
        "train.max_steps=8",
        "model.dropout=0",
        "log.sample_tokens=12",
        "log.progress=lines",
    ]
    losses, said = [], []
    for sharding in ("none", "full"):
        done = gptexp("train", *argv, f"world.sharding={sharding}", f"hydra.run.dir={sharding}", timeout=500)
        assert done.returncode == 0, done.stderr
        losses.append([event["train/loss"] for event in events(tmp_path / sharding, "step")])
        said.append(done.stdout.split("--- a sample")[-1].split("---")[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert said[0] == said[1]


@pytest.mark.parametrize("name", e2e_then_slow(["all else", "llama", "qwen3"]))
def test_a_step_does_not_depend_on_micro_batch_and_ranks(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, name: str
) -> None:
    argv = [*tiny, *BYTES, *BLOCKS[name], "model.dropout=0", "train.max_steps=4"]
    found = []
    for number, more in enumerate((["batch.micro_batch_size=8"], ["batch.micro_batch_size=1"], ["world=ddp2"])):
        done = gptexp("train", *argv, *more, f"hydra.run.dir=run-{number}")
        assert done.returncode == 0, done.stderr
        found.append([event["train/loss"] for event in events(tmp_path / f"run-{number}", "step")])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_transformers_computes_what_an_exported_run_computes(
    gptexp: Gptexp, tiny: list[str], tmp_path: Path, name: str
) -> None:
    more = ["model.parametrisation=mup", "model.base_n_embd=8"]
    more += ["model.base_n_head=2"] if not any(text.startswith("model.head_dim=") for text in BLOCKS[name]) else []
    argv = [*tiny, "data.tokenizer=bytes", *BLOCKS[name], *more, "optim.lr=3e-2", "hydra.run.dir=run"]
    assert gptexp("train", *argv).returncode == 0
    done = gptexp("export", "run", "out")
    assert done.returncode == 0, done.stderr
    compare(judge(str(tmp_path / "out"), "A", new_tokens=8), tmp_path / "run", "A")
    card = (tmp_path / "out/README.md").read_text()
    assert "| block | RoPE" in card
    assert f"tags:\n- {'llama' if name == 'llama' else name}\n" in card


@pytest.mark.parametrize("name", ["olmo2", "all else"])
def test_a_branch_with_averaged_weights_and_noise_ends_as_an_uninterrupted_run(
    tiny: list[str], tmp_path: Path, name: str
) -> None:
    more = ["train.ema_half_life_tokens=512", "optim.gradient_noise=0.3", "train.eval_every=0"]
    continued, whole = branch_and_whole([*tiny, *BYTES, *BLOCKS[name], *more], tmp_path)
    assert equal(continued, whole)
    evaluation = events(whole, "eval")[-1]
    assert 0 < evaluation["val/loss_ema"] != evaluation["val/loss"]


def test_a_run_begins_from_one_whose_mlp_has_a_ratio(tiny: list[str], tmp_path: Path) -> None:
    argv = [*tiny, *BYTES, *BLOCKS["llama"], "model.mlp_ratio=3", "model.parametrisation=mup", "model.base_n_embd=8"]
    run_dir.save_config(tmp_path / "run", compose([*argv, "model.base_n_head=2"]))
    assert train_here([*argv, "model.base_n_head=2"], tmp_path / "run") == 0
    kept = [text for text in tiny if not text.startswith("model")]
    register_from_init()
    model = compose([*kept, "model=from_init", f"init_from={tmp_path / 'run'}", "data.tokenizer=bytes"]).model
    assert (model.mlp_size, model.mlp_ratio, model.n_mlp) == (48, 3, None)


@pytest.mark.parametrize(("width", "mlp"), [(1024, 2736), (576, 1536), (768, 2048), (384, 1024), (192, 640)])
def test_the_ratio_that_is_proposed_for_mup_gives_the_same_mlp(tiny: list[str], width: int, mlp: int) -> None:
    own = [f"model.n_embd={width}", f"model.n_mlp={mlp}", "model.parametrisation=mup", "model.base_n_embd=64"]
    with pytest.raises(ConfigError) as refused:
        compose([*tiny, *own])
    proposed = re.search(r"model.mlp_ratio=[0-9.]+", str(refused.value))
    assert proposed is not None
    assert compose([*tiny, own[0], proposed.group(), *own[2:]]).model.mlp_size == mlp


@pytest.mark.e2e
def test_a_block_that_transformers_lacks_is_not_exported(gptexp: Gptexp, tiny: list[str], tmp_path: Path) -> None:
    assert gptexp("train", *tiny, *BYTES, *BLOCKS["nanochat"], "hydra.run.dir=run").returncode == 0
    done = gptexp("export", "run", "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gptexp: config error: model.mlp=relu2: ")
    assert done.stderr.endswith("[not-exportable]\n")
    assert not (tmp_path / "out").exists()


def theirs(family: str, **more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "vocab_size": 257,
        "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **sizes, **more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.e2e
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers_trains_on_here(
    gptexp: Gptexp, corpus: Path, tiny: list[str], tmp_path: Path, family: str, tied: bool
) -> None:
    """In several files and in bfloat16. Its first loss is transformers' own, and 50 steps lower it."""
    model = theirs(family, tie_word_embeddings=tied).bfloat16()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    for name, content in transformers_files(ByteTokenizer(), 32).items():
        (tmp_path / "theirs" / name).write_text(content)
    kept = [text for text in tiny if not text.startswith(("model", "train.max_steps", "optim"))]
    argv = ["model=from_init", "init_from=theirs", "data.tokenizer=bytes", "train.max_steps=50", "optim.lr=3e-3"]
    done = gptexp("train", *kept, *argv, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    losses = [event["train/loss"] for event in events(tmp_path / "run", "step")]
    config = run_dir.load_config(tmp_path / "run")
    from gptexp.data.loader import build_dataset

    dataset = build_dataset(run_dir.load_resolved(tmp_path / "run"))
    rows = torch.from_numpy(dataset.rows(dataset.train, dataset.order.train_starts(range(4), 32)).astype("int64"))
    with torch.no_grad():
        logits = model.float()(rows[:, :-1]).logits
    first = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert config.seq_len == 32
    assert losses[0] == pytest.approx(first, rel=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_a_run_says_what_its_block_is(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*tiny, *BYTES, *BLOCKS["all else"], "train.max_steps=1", "log.progress=lines"]
    run_dir.save_config(tmp_path / "run", compose(argv))
    assert train_here(argv, tmp_path / "run") == 0
    assert (
        "block           RoPE (theta 10,000), LayerNorm before and after the branches, GEGLU of 64, window of 5 "
        "(none in block 2)\n"
    ) in (said := capsys.readouterr().out)
    assert re.search(r"documents +attention stays within each; that of a layer takes [0-9.]+ ms in place of", said)
    model, _, _ = package.load_run(tmp_path / "run")
    assert model.document_start == 256
    assert json.loads((tmp_path / "run/effective.json").read_text())["vocab_size"]
