"""Building the model from its choices, DDP's buckets, and compilation by one rank of a node first."""

import getpass
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import events

from gptexp.config.overrides import quoted
from gptexp.config.schema import Config, ModelConfig
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import Choice, Source
from gptexp.machine.resolve import resolve
from gptexp.model.gpt import GPT
from gptexp.model.loss import chunked_cross_entropy, plain_cross_entropy
from gptexp.process.errors import ConfigError
from gptexp.run.build import (
    build_gpt,
    compile_in_turn,
    compiles,
    refuse_missing_compiler,
    replace_unusable_folders,
    wrap,
)

Gptexp = Callable[..., subprocess.CompletedProcess[str]]

CPU = torch.device("cpu")
LOGS = "recompiles,+torch._inductor.codecache"


@pytest.mark.parametrize(("name", "loss"), [("plain", plain_cross_entropy), ("chunked", chunked_cross_entropy)])
def test_a_model_has_the_loss_and_the_checkpointing_of_its_config(name: str, loss: object) -> None:
    cfg = Config()
    cfg.model.n_layer, cfg.model.n_embd, cfg.train.activation_checkpointing = 1, 24, True
    cfg.train.loss, cfg.train.z_loss = name, 0.25
    gpt = build_gpt(cfg, resolve(cfg, CPU, Rank()), CPU)
    assert isinstance(gpt.loss, partial)
    assert (gpt.loss.func, gpt.loss.keywords, gpt.activation_checkpointing) == (loss, {"z_loss": 0.25}, True)


def test_the_initial_weights_are_a_function_of_the_seed() -> None:
    cfg = Config()
    cfg.model.n_layer, cfg.model.n_embd = 1, 24
    effective = resolve(cfg, CPU, Rank())
    first = build_gpt(cfg, effective, CPU)
    torch.rand(7)  # whatever was drawn before
    again = build_gpt(cfg, effective, CPU)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    cfg.train.seed += 1
    other = build_gpt(cfg, effective, CPU)
    assert not torch.equal(first.wte.weight, other.wte.weight)


def test_a_single_rank_uses_no_ddp() -> None:
    cfg = Config()
    cfg.model.n_layer, cfg.model.n_embd = 1, 24
    effective = resolve(cfg, CPU, Rank())
    gpt = build_gpt(cfg, effective, CPU)
    assert wrap(gpt, effective, "mean", Rank(), CPU) is gpt


@pytest.fixture
def one_of_two() -> Iterator[Rank]:
    """A rank with a world size of two. It is alone in its process group, so nothing waits."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Rank(0, 2)
    finally:
        dist.destroy_process_group()


def wrapped(one_of_two: Rank, layers: int, compiled: bool) -> Any:
    """DDP around `layers` layers of 4 MiB each."""
    effective = replace(resolve(Config(), CPU, Rank()), compile=Choice(compiled, "decided", ""))
    linear = [torch.nn.utils.skip_init(torch.nn.Linear, 1024, 1024, bias=False) for _ in range(layers)]
    model: Any = torch.nn.Sequential(*linear)
    return wrap(model, effective, "mean", one_of_two, CPU)


def buckets(ddp: Any) -> int:
    """The number of buckets after DDP knows the order of the gradients. The gradients are views of the buckets."""
    for _ in range(3):
        ddp(torch.ones(1, 1024)).sum().backward()
    return len({p.grad.untyped_storage().data_ptr() for p in ddp.parameters()})


@pytest.mark.e2e
def test_the_gradients_of_a_large_compiled_model_are_in_few_buckets(one_of_two: Rank) -> None:
    """DDP splits a compiled graph at every bucket."""
    assert buckets(wrapped(one_of_two, 40, True)) <= 6 < buckets(wrapped(one_of_two, 40, False))


@pytest.mark.e2e
def test_a_small_compiled_model_has_no_more_buckets_than_ddps_default(one_of_two: Rank) -> None:
    """Each bucket costs a reduction."""
    assert buckets(wrapped(one_of_two, 13, True)) <= buckets(wrapped(one_of_two, 13, False)) < 13


def test_the_first_rank_of_a_node_compiles_first_and_no_gradient_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads simulate two ranks. The second begins after the first has finished."""
    used: dict[int, list[float]] = {0: [], 1: []}  # by rank: when its model is used
    together = threading.Barrier(2, timeout=60)

    class Wrapped(torch.nn.Module):
        """Replaces DDP, whose reduction would wait for the other rank."""

        def __init__(self, gpt: GPT, rank: int) -> None:
            super().__init__()
            self.gpt, self.rank, self.reduces = gpt, rank, True

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            assert not self.reduces
            used[self.rank].append(time.monotonic())
            time.sleep(0.1)
            used[self.rank].append(time.monotonic())
            loss: torch.Tensor = self.gpt(x, y)
            return loss

        @contextmanager
        def no_sync(self) -> Iterator[None]:
            self.reduces = False
            yield
            self.reduces = True

    monkeypatch.setattr("gptexp.run.build.DistributedDataParallel", Wrapped)
    monkeypatch.setattr("gptexp.run.build.barrier", lambda patient: together.wait())
    models = []

    def compile_on(rank: int) -> None:
        gpt = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=64), plain_cross_entropy)
        models.append(gpt)
        step = SimpleNamespace(
            model=Wrapped(gpt, rank), optimizer=torch.optim.SGD(gpt.parameters()), forward_context=nullcontext
        )
        training: Any = SimpleNamespace(
            step=step, gpt=gpt, plan=SimpleNamespace(batch=SimpleNamespace(micro_batch_size=2, seq_len=8)),
            device=CPU, rank=Rank(rank, 2, rank, 2), dataset=SimpleNamespace(val_starts=[1]),
        )  # fmt: skip
        compile_in_turn(training, None)

    threads = [threading.Thread(target=compile_on, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert used[0]
    assert used[1]
    assert max(used[0]) < min(used[1])
    assert all(p.grad is None for gpt in models for p in gpt.parameters())
    assert all(gpt.training for gpt in models)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["auto", "plain"])
def test_two_ranks_compile_each_graph_once(gptexp: Gptexp, tiny: list[str], tmp_path: Path, loss: str) -> None:
    """Three validation windows on two ranks: the last batch is padded, and nothing is compiled again for it."""
    done = gptexp(
        "train", *(o for o in tiny if "val_tokens" not in o), "data.val_tokens=48", "world=ddp2", "train.compile=on",
        f"train.loss={loss}", "train.max_steps=3", "train.eval_every=1", "log=disabled", "log.sample_tokens=0",
        "hydra.run.dir=out", env={"TORCH_LOGS": LOGS, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stderr + done.stdout
    looked_up = re.findall(r"^\[rank(\d)\].*cache (hit|miss) for key (\w+)", said, re.MULTILINE)
    compiled = [key for rank, what, key in looked_up if (rank, what) == ("0", "miss")]
    assert len(compiled) == len(set(compiled)) >= 3  # forward, backward, validation
    assert {(rank, what) for rank, what, _ in looked_up} <= {("0", "miss"), ("0", "hit"), ("1", "hit")}
    assert {key for rank, _, key in looked_up if rank == "1"} == set(compiled)
    again = Counter(re.findall(r"^\[rank(\d)\].*Recompiling function forward", said, re.MULTILINE))
    assert again == {"0": 1, "1": 1}  # validation: without gradients
    assert len(events(tmp_path / "out", "eval")) == 3


def test_a_saved_compiled_run_names_all_that_no_compiler_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    choices: dict[str, Any] = {"compile": True, "loss": "fused"}
    saved = {key: Choice(value, "saved", "") for key, value in choices.items()}
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError) as refused:
        refuse_missing_compiler(replace(resolve(Config(), CPU, Rank()), **saved), CPU)  # type: ignore[arg-type]
    assert str(refused.value) == (
        "train.compile=on train.loss=fused: the C++ compiler no-such-compiler is not installed; use train.compile=off "
        "train.loss=chunked"
    )


@pytest.mark.parametrize("source", ["asked", "saved"])
def test_what_must_be_compiled_is_refused_without_a_compiler(monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
    cfg = Config()
    cfg.train.compile = "off"
    rules = resolve(cfg, CPU, Rank())
    effective = replace(rules, loss=Choice("fused", source, ""))
    assert (compiles(rules), compiles(effective)) == (False, True)
    monkeypatch.setenv("CXX", sys.executable)
    refuse_missing_compiler(effective, CPU)
    with pytest.raises(ConfigError, match=r"train.loss=fused: torch.compile is incomplete for mps; use train.loss"):
        refuse_missing_compiler(effective, torch.device("mps"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    message = r"train.loss=fused: the C\+\+ compiler no-such-compiler is not installed"
    with pytest.raises(ConfigError, match=message):
        refuse_missing_compiler(effective, CPU)
    refuse_missing_compiler(rules, CPU)


ODD = 'CORP\\bob\'s "ü", a=b'  # a name that torch's command line of the compiler does not survive


@pytest.mark.parametrize("odd", [ODD, "CORP\\bob", "two words", "O'Neil", 'a"b'])
@pytest.mark.parametrize("variable", ["LOGNAME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_the_compiler_gets_no_path_that_its_command_line_splits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, odd: str
) -> None:
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOGNAME", "bob")
    monkeypatch.setattr(tempfile, "tempdir", None)
    is_folder = variable != "LOGNAME"
    (tmp_path / odd).mkdir()
    monkeypatch.setenv(variable, str(tmp_path / odd) if is_folder else odd)
    lines = replace_unusable_folders()
    for name in (getpass.getuser(), tempfile.gettempdir(), os.environ["TORCHINDUCTOR_CACHE_DIR"]):
        assert shlex.split(name) == [name]
    assert [line.partition("=")[0] for line in lines] == ([variable] if is_folder else [])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler; apt-get install g++")
def test_a_run_compiles_whatever_the_user_and_the_folders_are_called(
    start: Callable[..., subprocess.Popen[str]], tiny: list[str], tmp_path: Path
) -> None:
    """The command that goes on with the run survives a shell."""
    (tmp_path / ODD / "temporary").mkdir(parents=True)
    names = dict.fromkeys(("USER", "LOGNAME"), ODD)
    folders = {"HOME": tmp_path / ODD, "TMPDIR": tmp_path / ODD / "temporary", "GPTEXP_CACHE": tmp_path / ODD / "cache"}
    env = {**os.environ, **names, **{name: str(folder) for name, folder in folders.items()}}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    out = f"hydra.run.dir={quoted(str(tmp_path / ODD / 'out'))}"
    process = start("train", *tiny, "train.compile=on", "log.progress=lines", out, env=env)
    stdout, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    [report] = [line for line in stdout.splitlines() if "gptexp report" in line]
    assert shlex.split(report)[1:] == ["gptexp", "report", str(tmp_path / ODD / "out")]
